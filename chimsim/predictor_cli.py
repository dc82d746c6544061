"""The `chimsim predictor` commands: train a length or rank predictor from a trace, and say how good it is.

They parse, call and print; learning and scores are in `calibration.length_model`, `calibration.rank_model` and
`calibration.length_eval`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from chimsim.errors import ChimsimError
from chimsim.training import trainer_of
from chimsim.training_cli import (
    JsonOpt,
    ModelsOpt,
    SeedOpt,
    names,
    number,
    print_json,
    print_written,
    progress,
    unseen,
)
from traces import load_trace

if TYPE_CHECKING:
    from calibration.length_eval import Judged, Predictor
    from traces import Trace, Workflow

predictor_app = typer.Typer(
    help="Train and judge predictors of output lengths, or of their order.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

TraceOpt = Annotated[str, typer.Option("--trace", help="A shipped trace or a trace file; prompts help, labels do not.")]
KindOpt = Annotated[
    str, typer.Option("--kind", help="length: a quantile forest; rank: LightGBM's ranker, for LTR (extra ltr).")
]
TextOpt = Annotated[bool, typer.Option("--text/--no-text", help="Read the prompts.")]
HistoryOpt = Annotated[bool, typer.Option("--history/--no-history", help="Look at what finished stages put out.")]

_ORDER_NOTE = """Kendall-tau distance: share of pairs in the wrong order (0: none, 0.5: chance).
FCFS: as they arrive; prompt: shorter prompts first. {what}"""

_LENGTH_NOTE = """Of a workflow's
tokens at its first call, of the rest from every call on, and of every call."""

_TOKENS_NOTE = """Pinball loss of the median in tokens, beside the training median's (constant);
cover: share of true lengths within the 10-90 % interval (80 % is right)."""


@predictor_app.command()
def train(
    trace: TraceOpt,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the model; a model in it is replaced.")],
    models: ModelsOpt = None,
    kind: KindOpt = "length",
    quantile: Annotated[float, typer.Option("--quantile", help="What a length model predicts by default.")] = 0.5,
    test_share: Annotated[
        float, typer.Option("--test-share", help="Share of the workflows held out and judged on; 0: none.")
    ] = 0.2,
    seed: SeedOpt = 0,
    text: TextOpt = True,
    history: HistoryOpt = True,
    as_json: JsonOpt = False,
) -> None:
    """Train a predictor and save it, judged on the workflows held out.

    \b
    chimsim predictor train --trace apps --models Qwen2.5-1.5B,Qwen2.5-7B --out models/length
    chimsim predictor train --trace my.jsonl.gz --kind rank --out models/rank
    chimsim predictor train --trace my.jsonl.gz --quantile 0.9 --test-share 0 -o models/p90
    """
    from chimsim.training import predictor_into

    trainer = trainer_of(kind, quantile=quantile, seed=seed, text=text, history=history)
    loaded = load_trace(trace)
    with progress() as tell:
        made = predictor_into(out, loaded, names(models), trainer, test_share=test_share, seed=seed, tell=tell)
    _note_textless(text and not made.reads_text, loaded.name)
    if as_json:
        print_json(
            {
                "folder": str(out),
                "digest": made.saved.digest,
                "bytes": made.saved.size_bytes,
                "train_s": made.train_s,
                **made.saved.manifest,
            }
        )
        return
    typer.echo(f"{loaded.name}: {kind} predictor, learned from {made.learned} workflows in {made.train_s:.1f} s")
    if made.scores:
        typer.echo(f"judged on {made.judged} workflows held out (seed {seed}):")
        _print_scores(made.scores, kind)
    print_written(out, made.saved, made.cost_ms)


@predictor_app.command(name="eval")
def eval_(
    trace: TraceOpt,
    model_dir: Annotated[
        Path | None, typer.Option("--model-dir", help="Judge a saved model, on workflows it has not learned from.")
    ] = None,
    models: ModelsOpt = None,
    kind: KindOpt = "length",
    folds: Annotated[int, typer.Option("--folds", help="Parts; each is judged by a model that learned the rest.")] = 5,
    group_by: Annotated[
        str | None, typer.Option("--group-by", help="workload: leave out one workload at a time instead.")
    ] = None,
    seed: SeedOpt = 0,
    text: TextOpt = True,
    history: HistoryOpt = True,
    as_json: JsonOpt = False,
) -> None:
    """Judge a saved predictor, or predictors trained on parts of a trace, on held-out workflows.

    \b
    chimsim predictor eval --trace my.jsonl.gz
    chimsim predictor eval --trace apps --models Qwen2.5-1.5B,Qwen2.5-7B --no-history
    chimsim predictor eval --trace apps --model-dir models/length --json
    chimsim predictor eval --trace my.jsonl.gz --group-by workload --kind rank
    """
    from calibration.length_eval import cross_validated, evaluate
    from calibration.rows import by_workload, check_models
    from calibration.rows import folds as make_folds

    if group_by not in (None, "workload"):
        raise ChimsimError(f"group-by {group_by!r} is unknown; expected workload")
    if model_dir is not None and group_by is not None:
        raise ChimsimError("group-by trains predictors of its own; leave out model-dir")
    trainer = trainer_of(kind, seed=seed, text=text, history=history)
    loaded = load_trace(trace)
    with progress() as tell:
        if model_dir is not None:
            judged, kind = _judge_saved(loaded, model_dir, names(models))
            unseen = len({row.known.workflow_id for row in judged.rows})
            how = f"{unseen} workflows that {model_dir} has not learned from"
        else:
            chosen = check_models(loaded, names(models))
            splits = by_workload(loaded) if group_by else make_folds(loaded, folds, seed)
            how = f"{len(splits)} workloads, each left out in turn" if group_by else f"{folds} folds (seed {seed})"
            textless: list[bool] = []

            def trained(workflows: Sequence[Workflow]) -> Predictor:
                model = trainer(workflows, chosen)
                textless.append(not model.reads_text)
                return model

            judged = cross_validated(splits, trained, tell)
            _note_textless(text and all(textless), loaded.name)
    table = evaluate(judged, [workflow.workflow_id for workflow in loaded.workflows])
    if as_json:
        print_json(
            {"trace": loaded.name, "trace_digest": loaded.digest, "judged_on": how, "kind": kind, "scores": table}
        )
        return
    typer.echo(f"{loaded.name}: {kind} predictor, {how}")
    _print_scores(table, kind)


def _judge_saved(trace: Trace, model_dir: Path, models: Sequence[str] | None) -> tuple[Judged, str]:
    from calibration.length_eval import judge
    from calibration.length_model import load_length
    from calibration.rank_model import load_rank
    from calibration.rows import check_models
    from calibration.saved import read_manifest

    kind = read_manifest(model_dir).kind
    model = load_rank(model_dir) if kind == "rank" else load_length(model_dir)
    if models is not None and set(models) != set(model.models):
        raise ChimsimError(f"{model_dir} was trained for {', '.join(model.models)}; leave out --models")
    check_models(trace, model.models)
    assert model.saved is not None
    known = model.saved.trained_on
    learned = [workflow for workflow in trace.workflows if workflow.workflow_id in known]
    return judge(model, unseen(trace, model_dir, known), learned), kind


def _note_textless(textless: bool, trace: str) -> None:
    if textless:
        typer.echo(f"chimsim: note: trace {trace} has no prompts to learn from; text features are left out", err=True)


def _print_scores(table: Sequence[Mapping[str, Any]], kind: str) -> None:
    """Tables of one workload each; where every workflow is a single call, its tokens are shown once."""
    console = Console(width=80)
    single = all(row["calls"] == row["workflows"] for row in table)
    workloads = list(dict.fromkeys(row["workload"] for row in table))
    for workload in workloads:
        mine = [row for row in table if row["workload"] == workload]
        if len(workloads) > 1:
            typer.echo(f"\n{workload or 'all workloads'}")
        console.print(_order_table(mine, kind, single))
        if kind == "length":
            console.print(_tokens_table(mine, single))
    typer.echo(_ORDER_NOTE.format(what=_LENGTH_NOTE if kind == "length" and not single else "Of calls."))
    if kind == "length":
        typer.echo(_TOKENS_NOTE)


def _order_table(rows: Sequence[Mapping[str, Any]], kind: str, single: bool) -> Table:
    made = Table(box=None, pad_edge=False, collapse_padding=True)
    made.add_column("model", overflow="fold")
    made.add_column("calls", justify="right", no_wrap=True)
    first = "stage" if kind == "rank" else "workflow"
    columns = [(first, name) for name in ("fcfs", "prompt", "predicted", "oracle")]
    if kind == "length" and not single:
        columns += [(what, name) for what in ("remaining", "stage") for name in ("prompt", "predicted")]
    heads = {"workflow": "workflow", "remaining": "rest", "stage": "call"}
    names = {"fcfs": "FCFS", "predicted": "forest" if kind == "length" else "ranker"}
    last = ""
    for what, name in columns:
        made.add_column(
            f"{heads[what] if what != last else ''}\n{names.get(name, name)}", justify="right", no_wrap=True
        )
        last = what
    for row in rows:
        made.add_row(row["model"], str(row["calls"]), *(number(row["kendall"][what][name]) for what, name in columns))
    if len(rows) > 1:
        means = [sum(row["kendall"][what][name] for row in rows) / len(rows) for what, name in columns]
        made.add_row("mean", str(sum(row["calls"] for row in rows)), *(number(mean) for mean in means))
    return made


def _tokens_table(rows: Sequence[Mapping[str, Any]], single: bool) -> Table:
    made = Table(box=None, pad_edge=False, collapse_padding=True)
    made.add_column("model", overflow="fold")
    columns = (("mean", "mean_tokens"), ("pinball", "pinball_50"), ("constant", "pinball_50_constant"))
    parts = (("call", "stage"),) if single else (("rest", "remaining"), ("call", "stage"))
    for head, _ in parts:
        for name in ("mean", "pinball", "constant", "cover"):
            made.add_column(f"{head if name == 'mean' else ''}\n{name}", justify="right", no_wrap=True)
    for row in rows:
        cells = []
        for _, what in parts:
            cells += [number(row[what][key], 0 if name == "mean" else 1) for name, key in columns]
            cells.append(f"{row[what]['coverage']:.1%}")
        made.add_row(row["model"], *cells)
    return made
