"""Figures and tables: which files, the same bytes again, a frontier that shows what the table says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from chimsim import sweep
from chimsim.errors import ChimsimError
from chimsim.plots import draw, frontier, panel_rows, queue_bars, series_labels
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
