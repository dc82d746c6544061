"""The `chimsim router` commands: train a semantic router from a trace, and say what it is good for.

They parse, call and print; learning and scores are in `calibration.router_model` and `calibration.router_eval`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from chimsim.errors import ChimsimError
from chimsim.training_cli import (
    JsonOpt,
    ModelsOpt,
    SeedOpt,
    listed,
    names,
    number,
    print_json,
    print_written,
    progress,
    unseen,
)
from traces import load_trace

if TYPE_CHECKING:
    from calibration.router_model import LearningSet
    from traces import Trace

router_app = typer.Typer(
    help="Train and judge semantic routers: from a prompt to each model's chance of solving it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

TraceOpt = Annotated[str, typer.Option("--trace", help="A shipped trace or a trace file, with prompts and labels.")]
BaseOpt = Annotated[
    str | None, typer.Option("--base-model", help="Encoder of embeddings and modernbert: a folder or a hub name.")
]
PairOpt = Annotated[
    str | None,
    typer.Option("--pair", help="SMALL,LARGE of the routing curve (default: lowest and highest solved rate)."),
]

_BACKENDS = "tfidf, forest, embeddings or modernbert"
_TARGETS = "solved, joint or difference"

_NOTE = """AP: average precision, to be held against the solved rate, which is a constant's.
ECE: mean difference of confidence and solved rate in ten bins. Brier: mean
squared error, beside that of the solved rate as a constant."""


@router_app.command()
def train(
    trace: TraceOpt,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the model; a model in it is replaced.")],
    models: ModelsOpt = None,
    backend: Annotated[str, typer.Option("--backend", help=f"{_BACKENDS}.")] = "forest",
    base_model: BaseOpt = None,
    target: Annotated[str, typer.Option("--target", help=f"What is learned: {_TARGETS}.")] = "solved",
    test_share: Annotated[
        float, typer.Option("--test-share", help="Share of the workflows held out and judged on; 0: none.")
    ] = 0.2,
    seed: SeedOpt = 0,
    pair: PairOpt = None,
    as_json: JsonOpt = False,
) -> None:
    """Train a router and save it, judged on the workflows held out.

    \b
    chimsim router train --trace maths --models Qwen2.5-1.5B,Qwen2.5-7B --out models/router
    chimsim router train --trace my.jsonl.gz --backend forest --target difference -o m
    chimsim router train --trace my.jsonl.gz --backend modernbert \\
        --base-model answerdotai/ModernBERT-base --out models/bert
    """
    from chimsim.training import router_into

    loaded = load_trace(trace)
    with progress() as tell:
        made = router_into(
            out,
            loaded,
            names(models),
            test_share=test_share,
            seed=seed,
            backend=backend,
            target=target,
            base_model=base_model,
            pair=names(pair),
            tell=tell,
        )
    saved = made.saved
    if as_json:
        print_json({"folder": str(out), "digest": saved.digest, "bytes": saved.size_bytes, **dict(saved.manifest)})
        return
    _note_textless(len(saved.trained_on) - made.learned)
    typer.echo(
        f"{loaded.name}: {backend} router, target {target}, learned from {made.learned} workflows "
        f"in {made.train_s:.1f} s"
    )
    if made.scores:
        typer.echo(f"judged on {made.judged} workflows held out (seed {seed}):")
        _print_scores(made.scores)
    print_written(out, saved, made.cost_ms)


@router_app.command(name="eval")
def eval_(
    trace: TraceOpt,
    model_dir: Annotated[
        Path | None, typer.Option("--model-dir", help="Judge a saved router, on workflows it has not learned from.")
    ] = None,
    models: ModelsOpt = None,
    backend: Annotated[str, typer.Option("--backend", help=f"{_BACKENDS}; a list compares.")] = "forest",
    base_model: BaseOpt = None,
    target: Annotated[str, typer.Option("--target", help=f"{_TARGETS}; a list compares.")] = "solved",
    folds: Annotated[int, typer.Option("--folds", help="Parts; each is judged by a router that learned the rest.")] = 5,
    group_by: Annotated[
        str | None, typer.Option("--group-by", help="workload: leave out one workload at a time instead.")
    ] = None,
    seed: SeedOpt = 0,
    pair: PairOpt = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw reliability and routing: .png, .svg, .pdf.")] = None,
    as_json: JsonOpt = False,
) -> None:
    """Judge a saved router, or routers trained on parts of a trace, on held-out workflows.

    \b
    chimsim router eval --trace my.jsonl.gz --plot router.png
    chimsim router eval --trace my.jsonl.gz --backend tfidf,forest --target solved,difference
    chimsim router eval --trace my.jsonl.gz --model-dir models/router --pair small,large
    chimsim router eval --trace my.jsonl.gz --group-by workload --json
    """
    from calibration.router_eval import cross_validated, evaluate
    from calibration.rows import by_workload, check_models
    from calibration.rows import folds as make_folds

    if plot is not None:
        from chimsim.router_plots import check_format

        check_format(plot)
    if group_by not in (None, "workload"):
        raise ChimsimError(f"group-by {group_by!r} is unknown; expected workload")
    loaded = load_trace(trace)
    judged: list[tuple[str, LearningSet, dict[str, Any]]] = []
    with progress() as tell:
        if model_dir is not None:
            if group_by is not None:
                raise ChimsimError("group-by trains routers of its own; leave out model-dir")
            judged.append(_judge_saved(loaded, model_dir, names(models), names(pair)))
            how = f"{judged[0][1].labels.shape[0]} workflows that {model_dir} has not learned from"
        else:
            chosen = check_models(loaded, names(models))
            splits = by_workload(loaded) if group_by else make_folds(loaded, folds, seed)
            how = f"{len(splits)} workloads, each left out in turn" if group_by else f"{folds} folds (seed {seed})"
            for name in listed(backend):
                for wanted in listed(target):
                    data, probabilities = cross_validated(
                        splits, chosen, backend=name, target=wanted, seed=seed, base_model=base_model, progress=tell
                    )
                    judged.append((f"{name} {wanted}", data, evaluate(data, probabilities, names(pair))))
    if model_dir is None:
        _note_textless(len(loaded.workflows) - len(judged[0][1].prompts))
    named = [(name, scores) for name, _, scores in judged]
    if plot is not None:
        from chimsim.router_plots import draw_router

        draw_router(named, plot)
    if as_json:
        rows = [{"router": name, **scores} for name, scores in named]
        print_json({"trace": loaded.name, "trace_digest": loaded.digest, "judged_on": how, "routers": rows})
        return
    typer.echo(f"{loaded.name}: {how}")
    if len(named) > 1:
        Console(width=80).print(_comparison(named))
    else:
        _print_scores(named[0][1])
    if plot is not None:
        typer.echo(f"written: {plot}")


def _judge_saved(
    trace: Trace, model_dir: Path, models: Sequence[str] | None, pair: Sequence[str] | None
) -> tuple[str, LearningSet, dict[str, Any]]:
    from calibration.router_eval import evaluate
    from calibration.router_model import learning_set, load_router
    from calibration.rows import check_models

    router, saved = load_router(model_dir)
    if models is not None and tuple(models) != router.models:
        raise ChimsimError(f"{model_dir} was trained for {', '.join(router.models)}; leave out --models")
    check_models(trace, router.models)
    data = learning_set(unseen(trace, model_dir, saved.trained_on), router.models)
    return f"{router.backend} {router.target}", data, evaluate(data, router.predict_proba(data.prompts), pair)


def _note_textless(count: int) -> None:
    if count:
        typer.echo(f"chimsim: note: {count} workflows have no prompt and are left out", err=True)


def _print_scores(scores: dict[str, Any]) -> None:
    console = Console(width=80)
    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    for name in ("n", "solved", "AP", "ECE", "Brier", "constant"):
        table.add_column(name, justify="right", no_wrap=True)
    for model, row in scores["models"].items():
        numbers = (row[name] for name in ("solved_rate", "ap", "ece", "brier", "base_brier"))
        table.add_row(model, str(row["n"]), *(number(value) for value in numbers))
    means = (scores["base_rate"], scores["map"], scores["ece"], scores["brier"])
    table.add_row("mean (AP: mAP)", str(scores["n"]), *(number(value) for value in means), "")
    console.print(table)
    typer.echo(_NOTE)
    if "curve" not in scores:
        return
    small, large = scores["pair"]
    typer.echo(
        f"\nBetween {small} and {large}: only the larger solves {scores['only_large']:.1%}, only the\n"
        f"smaller {scores['only_small']:.1%}. Gap AUC {number(scores['gap_auc'])} (0.5: chance). Of the oracle's "
        f"area over random\nmixing the router has {number(scores['curve_area'])}.\n"
    )
    curve = Table(box=None, pad_edge=False, title=f"solved (%) when this share of calls goes to {large}")
    shown = [row for row in scores["curve"] if round(row[0] * 100) % 10 == 0]
    curve.add_column("share (%)")
    for row in shown:
        curve.add_column(f"{row[0]:.0%}".rstrip("%"), justify="right", no_wrap=True)
    for column, name in ((1, "random"), (2, "router"), (3, "oracle")):
        curve.add_row(name, *(number(100 * row[column], 1) for row in shown))
    console.print(curve)


def _comparison(named: Sequence[tuple[str, dict[str, Any]]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("router", overflow="fold")
    for name in ("mAP", "base", "ECE", "Brier", "gap AUC", "area"):
        table.add_column(name, justify="right", no_wrap=True)
    for router, scores in named:
        keys = ("map", "base_rate", "ece", "brier", "gap_auc", "curve_area")
        table.add_row(router, *(number(scores.get(key, math.nan)) for key in keys))
    return table
