"""``python -m chimsim``: the same as the command ``chimsim``."""

from __future__ import annotations

from chimsim.cli import main

if __name__ == "__main__":
    main()
