"""Options that several commands share, and how they and a spec file become a spec."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from chimsim.errors import ChimsimError
from chimsim.results import Results
from chimsim.spec import Spec, read_spec, spec_from

SpecFile = Annotated[Path | None, typer.Argument(metavar="SPEC.toml", help="Spec file; options override it.")]
TraceOpt = Annotated[str | None, typer.Option("--trace", help="Shipped traces or trace files: apps,maths,my.jsonl")]
ComboOpt = Annotated[str | None, typer.Option("--combo", help="Clusters of one engine a model: qwen1.5b+7b,...")]
ClusterOpt = Annotated[str | None, typer.Option("--cluster", help="Cluster TOML files.")]
PolicyOpt = Annotated[str | None, typer.Option("--policy", help="fcfs,sjf,..., my_file.py:MyPolicy")]
RpsOpt = Annotated[str | None, typer.Option("--rps", help="Arrival rates, workflows per second.")]
TauOpt = Annotated[str | None, typer.Option("--tau", help="Latency slack of policies that have it: 0,0.5,inf")]
DeltaOpt = Annotated[str | None, typer.Option("--delta-s", help="Smallest gain in confidence worth a switch.")]
KnobOpt = Annotated[list[str] | None, typer.Option("--knob", help="Any other knob: name=v1,v2 (repeatable).")]
SeedsOpt = Annotated[str | None, typer.Option("--seeds", help="How many seeds (3: 0,1,2), or a list: 5,7")]
SeedOpt = Annotated[int | None, typer.Option("--seed", help="The run's seed.")]
WorkflowsOpt = Annotated[
    str | None, typer.Option("--workflows", "--limit", help="Workflows a run (default: the whole trace).")
]
WarmupOpt = Annotated[str | None, typer.Option("--warmup", help="First workflows left out of the metrics.")]
BurstOpt = Annotated[str | None, typer.Option("--burstiness", help="1 is Poisson, smaller is burstier (gamma).")]
ArrivalsOpt = Annotated[
    str | None, typer.Option("--arrivals", help="poisson, recorded, or a trace to borrow them from.")
]
RouterOpt = Annotated[
    str | None,
    typer.Option(
        "--router", help="Confidence: trace, oracle, none (constant), noisy:0.6, a router's folder; shuffled:SOURCE."
    ),
]
LengthPredictorOpt = Annotated[
    str | None, typer.Option("--length-predictor", help="Lengths: oracle, noisy:0.2 or qrf:FOLDER.")
]
RankOpt = Annotated[
    str | None, typer.Option("--rank-predictor", help="Rank of LTR: oracle or the folder of a rank model.")
]
SplitOpt = Annotated[
    str | None, typer.Option("--split", help="all workflows, or test: those no saved model was trained on.")
]
PartOpt = Annotated[
    str | None, typer.Option("--part", help="A part of the workflows, after --split: 1/2 is the first of two.")
]
MapOpt = Annotated[str | None, typer.Option("--router-map", help="Noisy routers of this average precision.")]
LengthOpt = Annotated[
    str | None,
    typer.Option("--length-error", help="Kendall distance of predicted lengths: 0 true, 0.5 random."),
]
RouterSOpt = Annotated[
    str | None, typer.Option("--router-s", help="Router seconds on a workflow's first call; default: its cost.")
]
PredictorSOpt = Annotated[
    str | None, typer.Option("--predictor-s", help="Predictor seconds on each call; default: its cost.")
]
QueueOpt = Annotated[str | None, typer.Option("--queue", help="Where calls wait: dispatcher or engine.")]
AheadOpt = Annotated[str | None, typer.Option("--look-ahead", help="Calls inside the engine beyond its slots.")]
OversizeOpt = Annotated[
    str | None, typer.Option("--oversize", help="A call that can never fit: error, reject or clip.")
]
SlotsOpt = Annotated[str | None, typer.Option("--slots", help="Calls in an engine at once (default: the profile's).")]
EnginesOpt = Annotated[str | None, typer.Option("--engines", help="Engines of a model: qwen7b=2,...")]
SeqsOpt = Annotated[str | None, typer.Option("--max-num-seqs", help="vLLM's max_num_seqs of every engine.")]
FailOpt = Annotated[
    list[str] | None, typer.Option("--fail", help="An engine is down: qwen7b@120s-180s, or ...@120s- (repeatable).")
]
SlowOpt = Annotated[
    list[str] | None, typer.Option("--slow", help="Steps take longer: qwen7b=1.5x, ...@120s-180s (repeatable).")
]
GoodputOpt = Annotated[str | None, typer.Option("--goodput", help="Limits: ttft=500ms,e2el=9s,latency=60s")]
WORKERS_HELP = "Processes (default: all cores, one for short work)."
WorkersOpt = Annotated[str | None, typer.Option("--workers", help=WORKERS_HELP)]
BackendOpt = Annotated[str | None, typer.Option("--backend", help="Who runs the cells: local, ray or dask.")]
AddressOpt = Annotated[
    str | None,
    typer.Option("--address", help="Their cluster: auto, ray://host:10001, tcp://host:8786 (default: one here)."),
]


def given_options(given: dict[str, Any]) -> dict[str, Any]:
    """The spec's keys among a command's parameters."""
    skip = ("spec", "out", "timeline", "dry_run", "figures", "as_json")
    named = {"knob": "knobs"}
    return {named.get(k, k): v for k, v in given.items() if k not in skip and v not in (None, [])}


def resolve(spec: Path | None, options: dict[str, Any]) -> Spec:
    base = read_spec(spec) if spec is not None else None
    return spec_from(options, base, source=str(spec) if spec is not None else "", dashes=True)


def local_workers(resolved: Spec) -> int | None:
    """Of commands that stay on this machine; raises `ChimsimError` where the spec says something else."""
    if resolved.backend != "local":
        raise ChimsimError(f"backend: only sweep runs on {resolved.backend}; leave it out here")
    return resolved.workers


def command_line() -> list[str]:
    return ["chimsim", *sys.argv[1:]]


def note_incomplete(results: Results) -> None:
    """Say on stderr how many cells of a folder are missing, if any are."""
    if not results.complete:
        note(f"note: {results.path} is not complete: {len(results.cells)} of {results.planned} cells are finished")


def note(text: str) -> None:
    typer.echo(f"chimsim: {text}", err=True)
