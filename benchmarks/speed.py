"""How fast the simulator is: LLM calls per CPU second and memory, against the number of calls and against the load.

    python benchmarks/speed.py [--scenario growth,load,peers,mooncake] [--policy fcfs,chimera] [--calls 10000,100000]
                               [--rps 1,6,30] [--full] [--repeat 3] [--base CHECKOUT] [--json FILE] [--plot FILE]

prints a row for each policy, size and rate, every run in a fresh process (`benchmarks/measure.py`), and what a bare
SimPy loop and a bare heapq loop did in those processes. ``--base`` is another checkout of the project, an older one
say: its runs alternate with this one's, and the results must be the same, else the exit code is 1. The columns are
explained in `benchmarks/README.md`. About a minute; ``--full`` takes several.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.machine import machine, version_of
from benchmarks.workloads import MOONCAKE, MOONCAKE_SOURCE, ROOT, Scenario, scenarios

Runs = list[dict[str, Any]]
"""What `measure` found of one policy, size, rate and version, a run an entry."""


def in_process(job: dict[str, Any], checkout: Path) -> dict[str, Any]:
    """`measure` in a fresh interpreter with this checkout's packages."""
    path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        # -P: the modules beside it are not for others to import
        [sys.executable, "-P", str(ROOT / "benchmarks" / "measure.py"), json.dumps(job)],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"the run of {job['policy']} with {job['calls']:,} calls failed in {checkout} (see above)")
    found: dict[str, Any] = json.loads(done.stdout)
    if Path(found["checkout"]) != checkout:
        raise SystemExit(f"the run was to use {checkout}, and used {found['checkout']}")
    return found


def best(runs: Runs) -> dict[str, Any]:
    """The run that took the least CPU time: other work on the machine only ever adds to it."""
    return min(runs, key=lambda run: run["cpu_s"])


def _median_speed(runs: Runs) -> float:
    return float(median(run["calls"] / run["cpu_s"] for run in runs))


def _short(value: float) -> str:
    """Three digits: 5.21M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.{max(0, 3 - len(str(int(value / size))))}f}{unit}"
    return f"{value:.0f}"


def _number(form: str, value: float | None) -> str:
    """A value that there is none of (of no call of more than one token, say) is a dash."""
    return "-" if value is None else format(value, form)


Column = tuple[str, int, Callable[[Runs], str]]

KEYS: list[Column] = [
    ("policy", -9, lambda runs: runs[0]["policy"]),
    ("calls", 10, lambda runs: f"{runs[0]['calls']:,}"),
    ("rps", 6, lambda runs: _number("g", runs[0]["rps"])),
]
SPEED: Column = ("calls/s", 9, lambda runs: f"{best(runs)['calls'] / best(runs)['cpu_s']:,.0f}")
MEDIAN: Column = ("median", 8, lambda runs: f"{_median_speed(runs):,.0f}")
VERSION: Column = ("code", 6, lambda runs: runs[0]["version"])
SIMULATED: Column = ("sim s/s", 9, lambda runs: f"{best(runs)['simulated_s'] / best(runs)['wall_s']:,.0f}")
COST: list[Column] = [
    ("out tok/s", 11, lambda runs: _short(best(runs)["output_tokens"] / best(runs)["cpu_s"])),
    ("in tok/s", 10, lambda runs: _short(best(runs)["prompt_tokens"] / best(runs)["cpu_s"])),
    SIMULATED,
    ("steps", 7, lambda runs: f"{runs[0]['steps'] / runs[0]['calls']:.1f}"),
    ("peak MB", 9, lambda runs: f"{median(run['peak_mb'] for run in runs):,.0f}"),
    ("B/call", 8, lambda runs: f"{median(run['bytes_a_call'] for run in runs):,.0f}"),
    ("SimPy", 7, lambda runs: f"{_ratio(runs, 'simpy_calls_s'):.1f}x"),
    ("heapq", 7, lambda runs: f"{_ratio(runs, 'heapq_calls_s'):.0f}x"),
]
PLAUSIBLE: list[Column] = [
    SIMULATED,
    ("wall s", 8, lambda runs: f"{best(runs)['wall_s']:.2f}"),
    ("CPU s", 8, lambda runs: f"{best(runs)['cpu_s']:.2f}"),
    ("steps", 7, lambda runs: f"{runs[0]['steps'] / runs[0]['calls']:.1f}"),
    ("TTFT ms", 9, lambda runs: _number(",.0f", runs[0]["mean_ttft_ms"])),
    ("TPOT ms", 9, lambda runs: _number(".1f", runs[0]["mean_tpot_ms"])),
    ("E2E s", 8, lambda runs: _number(".1f", runs[0]["mean_e2el_ms"] and runs[0]["mean_e2el_ms"] / 1000)),
    ("hits", 6, lambda runs: _number(".0%", runs[0]["prefix_hit_rate"])),
]


def _ratio(runs: Runs, yardstick: str) -> float:
    """CPU time of the simulator over that of the yardstick for as many calls, both of the same process."""
    run = best(runs)
    return float(run[yardstick] * run["cpu_s"] / run["calls"])


def line(cells: Iterable[tuple[int, str]]) -> str:
    """Cells side by side in their widths, below 0 to the left."""
    return "".join(text.rjust(width) if width > 0 else text.ljust(-width) for width, text in cells)


def compared(base: Runs, this: Runs) -> str:
    """Both versions' speed and memory, and whether they gave the same results."""
    times = f"x{best(base)['cpu_s'] / best(this)['cpu_s']:.2f}"
    if len(this) > 1:
        times += f" by the best, x{_median_speed(this) / _median_speed(base):.2f} by the median of {len(this)}"
    memory = median(run["bytes_a_call"] for run in this) / median(run["bytes_a_call"] for run in base)
    return (
        f"{'':9}this / base: calls/s {times}; memory a call x{memory:.2f}; "
        f"results {'the same' if same([*base, *this]) else 'DIFFER'}"
    )


def same(runs: Runs) -> bool:
    """Whether all gave the same records."""
    return len({run["digest"] for run in runs}) == 1


def growth(small: Runs, large: Runs) -> str:
    """How CPU time and memory grow between two sizes: x1.00 a call is linear."""
    few, many = best(small), best(large)
    per_call = many["cpu_s"] / few["cpu_s"] / (many["calls"] / few["calls"])
    added = (many["peak_mb"] - few["peak_mb"]) * 1e6 / (many["calls"] - few["calls"])
    who = few["policy"] + (" base" if few["version"] == "base" else "")
    return (
        f"{who:<15}{few['calls']:>9,} -> {many['calls']:>9,}: CPU a call x{per_call:.2f}, "
        f"memory +{added:,.0f} bytes a call"
    )


def run_scenario(name: str, scenario: Scenario, options: argparse.Namespace, folder: Path) -> list[Runs]:
    """All its runs, each row printed when it is known."""
    checkouts = {"this": ROOT} if options.base is None else {"base": options.base, "this": ROOT}
    columns = [
        *KEYS, *([VERSION] if options.base else []), SPEED, *([MEDIAN] if options.repeat > 1 else []),
        *(PLAUSIBLE if scenario.plausible else COST),
    ]  # fmt: skip
    print(f"\n{name}: {scenario.about}")
    print(line((width, title) for title, width, _ in columns))
    rates = options.rps if options.rps and None not in scenario.rates else scenario.rates
    found: list[Runs] = []
    for policy, rps, calls in product(options.policy, rates, options.calls or scenario.calls):
        job = scenario.job(folder, policy, calls, rps)
        versions: dict[str, Runs] = {version: [] for version in checkouts}
        for _, (version, checkout) in product(range(options.repeat), checkouts.items()):
            asked = {"scenario": name, "version": version, "policy": policy, "rps": rps}
            versions[version].append({**asked, **in_process(job, checkout)})
        for runs in versions.values():
            print(line((width, text(runs)) for _, width, text in columns), flush=True)
        if options.base:
            print(compared(versions["base"], versions["this"]), flush=True)
        if scenario.oversize == "clip":
            counts = "{clipped} calls clipped, {rejected} rejected; {preemptions} preemptions, {yields} yields"
            print(" " * 9 + counts.format_map(versions["this"][0]), flush=True)
        found += versions.values()
    if name == "growth":
        points = sorted(found, key=lambda runs: runs[0]["version"])
        for small, large in pairwise(points):
            if all(small[0][key] == large[0][key] for key in ("policy", "rps", "version")):
                print(growth(small, large))
    return found


def whole_numbers(text: str) -> list[int]:
    """Numbers of calls."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"expected positive numbers, found {text!r}")
    return sorted(set(found))


def rates(text: str) -> list[float]:
    """Workflows a second."""
    found = [float(part) for part in text.split(",")]
    if not all(0 < rate < float("inf") for rate in found):
        raise argparse.ArgumentTypeError(f"expected positive rates, found {text!r}")
    return sorted(set(found))


def policies(text: str) -> list[str]:
    """Names of policies, ``all`` of those that ship."""
    from policies import POLICIES, policy_class

    names = list(POLICIES) if text == "all" else text.split(",")
    for name in names:
        try:
            policy_class(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    return names


def asked_for(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="growth,load", help="joined by commas, or all")
    parser.add_argument("--policy", type=policies, default="fcfs,chimera", help="joined by commas, or all")
    parser.add_argument("--calls", type=whole_numbers, help="sizes instead of the scenario's own, joined by commas")
    parser.add_argument(
        "--rps", type=rates, help="workflows a second instead of the scenario's own rates, where it has rates"
    )
    parser.add_argument("--full", action="store_true", help="growth to 1,000,000 calls and the load at 100,000")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each; the best one is shown, and the median")
    parser.add_argument("--base", type=Path, metavar="CHECKOUT", help="time this checkout of the project in turn")
    parser.add_argument("--data", type=Path, metavar="FILE", help=f"of the scenario mooncake: {MOONCAKE_SOURCE}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers, of every run")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw growth and load (png, svg or pdf)")
    options = parser.parse_args(arguments)
    if options.repeat < 1:
        parser.error(f"--repeat: expected a positive number, found {options.repeat}")
    if options.base is not None:
        options.base = options.base.resolve()
        if not (options.base / "chimsim" / "simulation.py").is_file():
            parser.error(f"--base: expected a checkout of the project, found {options.base}")
    if options.data is not None and not options.data.is_file():
        parser.error(f"--data: {options.data}: no such file")
    if options.plot is not None and options.plot.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"--plot: expected a name that ends in .png, .svg or .pdf, found {options.plot}")
    for path in (options.json, options.plot):
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"{path}: there is no such folder")
    known = scenarios(options.full, options.data or MOONCAKE)
    names = list(known) if options.scenario == "all" else options.scenario.split(",")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--scenario: {unknown[0]!r} is unknown (known: {', '.join(known)}, all)")
    options.scenario = {name: known[name] for name in names}
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = asked_for(arguments)
    here = machine()
    code = {"this": version_of(ROOT)} | ({"base": version_of(options.base)} if options.base else {})
    print(f"{here['cpu']}, {here['cores']} cores, {here['system']}; Python {here['python']}, SimPy {here['simpy']}")
    print("; ".join(f"{version}: {name}" for version, name in code.items()) + f"; {here['date']}")
    found: list[Runs] = []
    with tempfile.TemporaryDirectory(prefix="chimsim-speed-") as folder:
        for name, scenario in options.scenario.items():
            if name == "mooncake" and options.data is None and not MOONCAKE.is_file():
                print(f"\n{name}: left out, for it needs {MOONCAKE_SOURCE}; download it and add --data FILE")
                continue
            found += run_scenario(name, scenario, options, Path(folder))
    runs = [run for point in found for run in point]
    if runs:
        print()
    for title, key in (("a bare SimPy loop", "simpy_calls_s"), ("a bare heapq loop", "heapq_calls_s")):
        if speeds := sorted(run[key] for run in runs):
            print(f"{title}: {median(speeds):,.0f} calls a CPU second ({speeds[0]:,.0f} to {speeds[-1]:,.0f})")
    if options.json:
        whole = {"machine": here, "code": code, "runs": runs}
        options.json.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if options.plot:
        from benchmarks.speed_plot import draw

        if not draw([best(point) for point in found], options.plot):
            print("nothing to draw: --plot is of the scenarios growth and load", file=sys.stderr)
    points: dict[tuple[Any, ...], Runs] = {}
    for run in runs:
        points.setdefault((run["scenario"], run["policy"], run["rps"], run["workflows"]), []).append(run)
    if differing := [point for point, mine in points.items() if not same(mine)]:
        print(f"results differ between runs of {differing[0]}", file=sys.stderr)
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
