"""A process that compares answers to maths problems with `math-verify`, one JSON line in, one out.

A process of its own, because the library ends what takes too long by signals, which only a main thread gets, and
because some expressions cannot be ended so and must be killed. Run by its path; it imports nothing of the project.
"""

from __future__ import annotations

import json
import resource
import sys

MEMORY_BYTES = 4 * 2**30


def main() -> None:
    """Say ``ready``, then answer each [right, given] with true or false until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    from math_verify import parse, verify

    print("ready", flush=True)
    for line in sys.stdin:
        right, given = json.loads(line)
        try:
            # gold first: the comparison is not symmetric
            same = bool(verify(parse(f"\\boxed{{{right}}}"), parse(f"\\boxed{{{given}}}")))
        except Exception:  # whatever the parser trips over is no right answer
            same = False
        print(json.dumps(same), flush=True)


if __name__ == "__main__":
    main()
