"""Figures and tables: which files, the same bytes again, a frontier that shows what the table says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from chimsim import sweep
from chimsim.errors import ChimsimError
from chimsim.figures_style import PAPER, paper_style
from chimsim.plots import draw, frontier, panel_rows, queue_bars, series_labels
from chimsim.plots_frontier import frontier_table
from chimsim.plots_runs import latency_cdf, utilisation
from chimsim.report import run_tables, summary_table, warnings
from chimsim.results import Results
from tests.chimsim.small import small_keys, write_small


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("plots")
    return sweep(**small_keys(write_small(folder)), out=folder / "out")


def rows(*changes: dict[str, object]) -> pd.DataFrame:
    """A summary as a sweep writes it, a row a change."""
    base: dict[str, object] = {
        "trace": "t", "combo": "c", "slots": 4, "rps": 8.0, "burstiness": 1.0, "policy": "fcfs", "tau": None,
        "router": None, "seed": 0, "cell": "x", "mean_workflow_latency_s": 10.0, "solved_rate": 0.5,
        "latency_per_token_ms": 9.0, "p99_workflow_latency_s": 30.0, "mean_queue_time_s": 2.0,
        "not_steady": False,
        "rejected_workflows": 0, "queues_filled": 0.5,
    }  # fmt: skip
    return pd.DataFrame([base | change for change in changes]).astype({"tau": "float64"})


def test_all_kinds_are_drawn_and_drawn_again_to_the_same_bytes(results: Results) -> None:
    files = draw(results, formats=("png", "svg"))
    assert [path.name for path in files] == [
        f"{stem}.{kind}" for stem in ("frontier", "queue", "cdf", "utilisation") for kind in ("png", "svg")
    ]
    before = {path: path.read_bytes() for path in files}
    draw(results, formats=("png", "svg"))
    assert {path: path.read_bytes() for path in files} == before
    assert all(data.startswith((b"\x89PNG", b"<?xml")) for data in before.values())


def test_another_latency_gets_a_file_of_its_own(results: Results) -> None:
    assert [path.name for path in draw(results, ["frontier"], latency="p99", formats=["pdf"])] == ["frontier-p99.pdf"]


@pytest.mark.parametrize(
    ("kinds", "latency", "formats", "message"),
    [
        (["fronteer"], "mean", ["png"], "did you mean 'frontier'"),
        (["queue"], "median", ["png"], "latency 'median' is unknown"),
        (["queue"], "mean", ["gif"], "format 'gif' is unknown"),
    ],
)
def test_wrong_choices_are_named(
    results: Results, kinds: list[str], latency: str, formats: list[str], message: str
) -> None:
    with pytest.raises(ChimsimError, match=message):
        draw(results, kinds, latency=latency, formats=formats)


def test_a_trace_without_labels_has_no_frontier(tmp_path: Path) -> None:
    keys = small_keys(write_small(tmp_path, labels=False)) | {"seeds": 1, "tau": None}
    unlabelled = sweep(**keys, out=tmp_path / "out")
    assert unlabelled.summary["solved_rate"].isna().all()
    assert [path.name for path in draw(unlabelled, ["frontier", "queue"], formats=["svg"])] == ["queue.svg"]
    assert " -" in summary_table(unlabelled.summary)


def test_the_frontier_has_a_panel_a_combination_and_rate_and_rings_the_best() -> None:
    summary = rows(
        {"policy": "fcfs", "mean_workflow_latency_s": 20.0},
        {"policy": "chimera", "tau": 0.0, "mean_workflow_latency_s": 5.0, "solved_rate": 0.4},
        {"policy": "chimera", "tau": 1.0, "mean_workflow_latency_s": 9.0, "solved_rate": 0.6},
        {"combo": "d", "rps": 12.0},
    )
    figure = frontier(summary)
    assert len(figure.axes) == 4
    ringed = figure.axes[0].lines[-1]
    assert sorted(np.asarray(ringed.get_xdata(), dtype=np.float64)) == [5.0, 9.0]
    assert len(queue_bars(summary).axes) == 4


def test_unsteady_points_are_told_by_hollow_markers_of_the_lines_own_shapes() -> None:
    steady: list[dict[str, object]] = [{"policy": "fcfs"}, {"policy": "chimera", "tau": 1.0, "solved_rate": 0.4}]
    for growing in (False, True):
        (legend,) = frontier(rows(*steady, {"policy": "mlfq", "not_steady": growing})).legends
        texts = [text.get_text() for text in legend.get_texts()]
        assert ("hollow: not steady" in texts) == growing
    assert texts[:4] == ["fcfs", "chimera", "mlfq", "not dominated"]


def test_a_papers_figures_have_its_size_and_fonts_and_their_numbers_beside_them(results: Results) -> None:
    files = draw(results, style="paper", width_in=3.5, height_in=3.8)
    assert [path.name for path in files] == [
        f"{stem}.{kind}" for stem in ("frontier", "queue", "cdf", "utilisation") for kind in ("pdf", "svg", "csv")
    ]
    assert {path.parent for path in files} == {results.path / "paper"}
    before = {path: path.read_bytes() for path in files}
    for path, data in before.items():
        if path.suffix == ".pdf":
            assert b"/MediaBox [ 0 0 252 273.6 ]" in data
            assert b"/FontFile2" in data
            assert b"/Type3" not in data
        if path.suffix == ".svg":
            assert b'width="252pt" height="273.6pt"' in data
            assert b"<text" not in data
    again = draw(results, ["frontier"], style="paper", width_in=3.5, height_in=3.8)
    assert [path.read_bytes() for path in again] == [before[path] for path in again]


def test_the_tables_hold_exactly_what_is_drawn(results: Results) -> None:
    draw(results, formats=["svg"], csv=True)
    tables = {kind: pd.read_csv(results.path / f"{kind}.csv") for kind in ("frontier", "queue", "cdf", "utilisation")}
    with paper_style(PAPER):
        made = frontier(results.summary), queue_bars(results.summary)
        lines, engines = latency_cdf(results, results.summary), utilisation(results, results.summary)
    table = tables["frontier"]
    for container, series in zip(made[0].axes[0].containers, ("fcfs", "chimera"), strict=True):
        mine = table[table["series"] == series]
        line, _, bars = container.lines  # type: ignore[attr-defined]
        assert line.get_xdata().tolist() == mine["mean_workflow_latency_s"].tolist()
        assert line.get_ydata().tolist() == mine["solved_percent"].tolist()
        half = [(ends[1][0] - ends[0][0]) / 2 for ends in bars[0].get_segments()]
        assert half == pytest.approx(mine["mean_workflow_latency_half_width_s"].tolist())
    heights = [bar.get_height() for bar in made[1].axes[0].patches]  # type: ignore[attr-defined]
    assert heights == tables["queue"]["mean_queue_time_s"].tolist()
    drawn = np.concatenate([np.asarray(line.get_xdata(), dtype=np.float64) for line in lines.axes[0].lines])
    assert drawn.tolist() == tables["cdf"]["workflow_latency_s"].tolist()
    cells = results.summary.loc[results.summary["policy"] == "fcfs", "cell"]
    latencies = pd.concat([results.table(cell, "workflows")["latency_s"] for cell in cells])
    fcfs = tables["cdf"][tables["cdf"]["series"] == "fcfs"].set_index("workflows_percent")["workflow_latency_s"]
    assert fcfs[[0.0, 50.0, 100.0]].tolist() == latencies.quantile([0.0, 0.5, 1.0]).tolist()
    running = [np.asarray(line.get_ydata(), dtype=np.float64) for ax in engines.axes for line in ax.lines[::2]]
    assert np.concatenate(running).tolist() == tables["utilisation"]["running_requests"].tolist()


def test_one_seed_has_no_interval_in_the_table() -> None:
    table = frontier_table(rows({}, {"policy": "chimera", "tau": 1.0}), "per-token")
    assert table["latency_per_token_ms"].tolist() == [9.0, 9.0]
    assert table[["latency_per_token_half_width_ms", "solved_half_width_percent"]].isna().all(axis=None)


def test_a_choice_is_part_of_the_files_names(results: Results) -> None:
    only = {"combo": ["qwen1.5b+7b"], "rps": ["20.0"], "policy": ["chimera"]}
    (path,) = draw(results, ["queue"], formats=["svg"], only=only)
    assert path.name == "queue-qwen1.5b+7b-20rps-chimera.svg"


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"only": {"policy": ["chimaera"]}}, "policy 'chimaera' is not in .*fcfs, chimera; did you mean 'chimera'"),
        ({"only": {"rps": ["8"]}}, "rps '8' is not in this folder; choose from 20"),
        ({"style": "papier"}, "choose from screen, paper; did you mean 'paper'"),
        ({"style": "paper", "width_in": 1.0}, "queue: 1 panels and their labels do not fit in 1 x 2.3 inches"),
        ({"style": "paper", "height_in": 100.0}, "height 100 is in inches"),
    ],
)
def test_what_cannot_be_drawn_is_said(results: Results, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ChimsimError, match=message):
        draw(results, ["queue"], **asked)


def test_a_line_is_named_by_what_varies_but_tau() -> None:
    summary = rows(
        {"policy": "chimera", "tau": 0.0, "router": "oracle"},
        {"policy": "chimera", "tau": 1.0, "router": "none"},
        {"policy": "fcfs"},
    )
    assert series_labels(summary).tolist() == ["chimera router=oracle", "chimera router=none", "fcfs"]
    assert [title for title, _ in panel_rows(rows({"rps": 8.0}, {"rps": None}))] == [
        "8 rps",
        "recorded arrivals",
    ]


def test_the_table_fits_80_columns_and_marks_rows() -> None:
    table = summary_table(
        rows(
            {"not_steady": True, "seed": 0},
            {"not_steady": True, "seed": 1, "mean_workflow_latency_s": 14.0},
            {
                "policy": "chimera",
                "tau": float("inf"),
                "mean_workflow_latency_s": 123456.0,
                "rejected_workflows": 3,
            },
            {"policy": "a-policy-with-a-rather-long-name-of-its-own", "mean_workflow_latency_s": 1.0},
        )
    )
    lines = table.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "c  t, 8 rps"
    assert lines[2].split() == ["!", "fcfs", "12.0", "±25.4", "30.0", "2.00", "50.0", "±0.0"]
    assert lines[3].split()[:3] == ["r", "chimera", "inf"]
    assert lines[4].startswith("*")


def test_a_sweep_that_cannot_tell_queue_orders_apart_says_so() -> None:
    flat = rows({"queues_filled": 0.0}, {"policy": "sjf", "queues_filled": 0.001})
    assert "queues never fill in 1 of 1 blocks (c t, 8 rps)" in warnings(flat)[0]
    assert not warnings(rows({"queues_filled": 0.0}, {"policy": "sjf", "queues_filled": 0.3}))
    assert not warnings(rows({"queues_filled": 0.0}))


def test_a_run_in_full_names_engines_and_stages(results: Results) -> None:
    name = results.cells[0]
    text = run_tables(
        results.table(name, "requests"), results.table(name, "engines"), results.cell_summary(name), "title"
    )
    assert max(map(len, text.splitlines())) <= 80
    for word in ("title", "solved_rate", "Qwen2.5-7B", "stage0"):
        assert word in text
