"""One experiment run: models trained where it needs them, its sweeps, its relations judged, and all of it written.

What is there already is not done again. The folder of a sweep is a results folder with ``experiment.json`` beside its
manifest; other kinds leave their rows as ``rows.csv``.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

import chimsim
from chimsim.errors import ChimsimError, near
from chimsim.grid import plan, warnings_of
from chimsim.reproduce.experiment import Experiment
from chimsim.reproduce.relations import Finding, Relation, check, judge
from chimsim.reproduce.studies import study
from chimsim.results import Results, digest, json_bytes, ordered_json_bytes, summary_frame, write_file
from chimsim.spec import SPEC_KEYS, Spec, spec_from
from chimsim.sweeps import Progress, commit, run_sweep
from chimsim.training import predictor_into, router_into, trainer_of
from traces import load_trace

EXPERIMENT = "experiment.json"
ROWS = "rows.csv"
MODELS = "{models}"
"""In an experiment's file: the folder of the models that ``[prepare]`` trains, one of each kind for a trace."""
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an experiment gave: its folder, its runs as a summary, and its relations judged."""

    experiment: Experiment
    folder: Path
    summary: pd.DataFrame
    findings: tuple[Finding, ...]
    made: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """For ``experiment.json``."""
        about = self.experiment
        words = ("name", "title", "figure", "question", "paper", "kind")
        return {
            **{key: getattr(about, key) for key in words},
            "command": self.made["command"],
            "spec": about.path.name,
            "relations": [finding.to_dict() for finding in self.findings],
            "made": dict(self.made),
        }


def run_experiment(
    experiment: Experiment,
    out: Path,
    *,
    quick: bool = False,
    workers: int | None = None,
    data: Path | None = None,
    tell: Tell = lambda text: None,
    progress: Progress | None = None,
    warn: Tell = lambda text: None,
) -> Outcome:
    """Run an experiment into ``out/NAME`` and judge its relations; a run that was stopped is gone on with.

    Args:
        experiment: what to run.
        out: the folder of all experiments.
        quick: with the overrides of ``[quick]``, for a look at it.
        workers: cells at once, as in `chimsim.sweeps.run_sweep`.
        data: where the traces of an experiment that ``needs`` some are.
        tell: told what is being done.
        progress: told how many cells are done.
        warn: told what is allowed but seldom meant.

    Raises one of the packages' errors for bad input, `Interrupted` after Ctrl-C.
    """
    keys = experiment.asked(quick)
    if experiment.needs:
        keys["trace"] = [str(path) for path in data_files(experiment, data)]
    folder = out / experiment.name
    for overrides in (experiment.quick, experiment.choose):
        unknown = [key for key in overrides if key not in SPEC_KEYS]
        if unknown and experiment.kind == "sweep":
            raise ChimsimError(f"{experiment.path}: unknown key {unknown[0]!r}{near(unknown[0], SPEC_KEYS)}")
    began = time.time()
    if experiment.kind != "sweep":
        summary = _studied(experiment, keys, folder, tell)
        choose = None
    else:
        if experiment.prepare:
            keys = _filled(keys, str(_prepared(experiment, keys["trace"], out / "models", tell)))
        tell(experiment.name)
        summary = _swept(_spec(experiment, keys), experiment.relations, folder, workers, progress, warn)
        choose = None
        if experiment.choose:
            others = {**keys, **experiment.choose}
            if quick and isinstance(others.get("seeds"), list):
                others["seeds"] = others["seeds"][:2]
            tell(f"{experiment.name}, to choose settings by")
            choose = _swept(_spec(experiment, others), (), out / f"{experiment.name}-choose", workers, progress, warn)
    findings = tuple(judge(relation, summary, choose) for relation in experiment.relations)
    made = _made(experiment, folder, time.time() - began, quick)
    outcome = Outcome(experiment, folder, summary, findings, made)
    write_file(folder / EXPERIMENT, ordered_json_bytes(outcome.to_dict()))
    return outcome


def data_files(experiment: Experiment, data: Path | None) -> list[Path]:
    """The traces that must be given. Raises `ChimsimError` that says which and how."""
    files = [(data or Path()) / Path(name).name for name in experiment.keys.get("trace", [])]
    lacking = [path.name for path in files if data is None or not path.is_file()]
    if lacking:
        where = "--data is not given" if data is None else f"{data} does not have it"
        raise ChimsimError(
            f"experiment {experiment.name} needs {experiment.needs} as FOLDER/{lacking[0]} of --data FOLDER; {where}"
        )
    return files


def _spec(experiment: Experiment, keys: Mapping[str, Any]) -> Spec:
    return spec_from({}, keys, source=str(experiment.path))


def _swept(
    spec: Spec, relations: Sequence[Relation], folder: Path, workers: int | None, progress: Progress | None, warn: Tell
) -> pd.DataFrame:
    planned = plan(spec)
    axes = summary_frame([{**cell.axes, "cell": cell.name} for cell in planned[0]])
    for relation in relations:
        check(relation, axes)
    for warning in warnings_of(planned[0]):
        warn(warning)
    return run_sweep(spec, folder, workers=workers, progress=progress, planned=planned).summary


def _prepared(experiment: Experiment, traces: Sequence[str], out: Path, tell: Tell) -> Path:
    """Train the models that are not there yet; the folder that holds one of each kind for every trace."""
    wanted = dict(experiment.prepare)
    models, share, seed = wanted.get("models"), wanted.get("test_share", 0.2), wanted.get("seed", 0)
    folder = out / digest([chimsim.__version__, models, share, seed])[:12]
    for name in traces:
        trace = load_trace(name)
        length, router = folder / trace.name / "length", folder / trace.name / "router"
        if wanted.get("predictor") and not length.exists():
            tell(f"{trace.name}: lengths")
            predictor_into(length, trace, models, trainer_of("length", seed=seed), test_share=share, seed=seed)
        if wanted.get("router") and not router.exists():
            tell(f"{trace.name}: router")
            router_into(router, trace, models, test_share=share, seed=seed)
    return folder


def _filled(value: Any, models: str) -> Any:
    """The keys with the folder of the models in its place."""
    if isinstance(value, str):
        return value.replace(MODELS, models)
    if isinstance(value, Mapping):
        return {key: _filled(item, models) for key, item in value.items()}
    return [_filled(item, models) for item in value] if isinstance(value, list) else value


def _studied(experiment: Experiment, keys: Mapping[str, Any], folder: Path, tell: Tell) -> pd.DataFrame:
    """The rows of a study, from its folder if they are of this file, of these traces and of this version."""
    content = [hashlib.sha256(experiment.path.read_bytes()).hexdigest(), dict(keys), chimsim.__version__]
    content += [load_trace(name).digest for name in keys.get("trace", [])]
    key = digest(content)
    rows, mark = folder / ROWS, folder / "rows.json"
    try:
        if json.loads(mark.read_bytes()) == {"key": key}:
            return pd.read_csv(rows, keep_default_na=True, na_filter=True, dtype={"combo": str}).fillna({"combo": ""})
    except (OSError, ValueError):
        pass
    summary = study(experiment.kind, keys, tell)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(rows, summary.to_csv(index=False, lineterminator="\n").encode())
    write_file(mark, json_bytes({"key": key}))
    return summary


def _made(experiment: Experiment, folder: Path, wall_s: float, quick: bool) -> dict[str, Any]:
    """When, on what and how long: what may differ between equal runs."""
    if experiment.kind == "sweep":
        runs = json.loads((folder / "run.json").read_bytes())["runs"]
        wall_s = sum(run["wall_s"] for run in runs)
    return {
        "command": f"chimsim reproduce {experiment.call}{' --quick' if quick else ''}",
        "quick": quick,
        "date": time.strftime("%Y-%m-%d"),
        "wall_s": round(wall_s, 1),
        "commit": commit(),
        "chimsim": chimsim.__version__,
        "machine": machine(),
    }


def machine() -> str:
    """This machine in a few words: processor, cores, memory."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
        memory = f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    except (OSError, ValueError):
        memory = ""
    return f"{name}, {os.cpu_count()} cores{memory}"


def outcomes_in(out: Path) -> list[dict[str, Any]]:
    """Every ``experiment.json`` of a folder of experiments, by name."""
    found = []
    for path in sorted(out.glob(f"*/{EXPERIMENT}")):
        try:
            found.append(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ChimsimError(f"{path}: not the record of an experiment ({error})") from error
    return found


def results_of(outcome: Outcome) -> Results | None:
    """The results folder of a sweep; other kinds have none."""
    return Results(outcome.folder) if outcome.experiment.kind == "sweep" else None
