"""Comparing results: which cells are partners, paired intervals, what changes for each workflow, the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_rel
from typer.testing import CliRunner

from chimsim import sweep
from chimsim.compare import compare_folders, compare_policies, joined_workflows, over_blocks, workflow_changes
from chimsim.compare_cells import Row, Side, match, policy_side
from chimsim.compare_cli import compare_command
from chimsim.compare_text import comparison_text
from chimsim.errors import ChimsimError
from chimsim.results import Results
from tests.chimsim.small import small_keys, write_small

LATENCY = "mean_workflow_latency_s"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return sweep(**small_keys(write_small(folder)), out=folder / "out")


@pytest.fixture(scope="module")
def wide(folder: Path, results: Results) -> Results:
    keys = small_keys(str(folder / "small.jsonl")) | {"slots": 8, "seeds": [1, 2], "policy": "fcfs", "tau": None}
    return sweep(**keys, out=folder / "wide")


def side(*axes: dict[str, Any]) -> Side:
    base = {"trace": "t", "combo": "c", "policy": "fcfs", "tau": None, "router": None, "seed": 0}
    results = cast(Results, type("Folder", (), {"path": Path("results/x")}))
    return Side("x", results, tuple(Row(str(n), base | each, {LATENCY: 1.0}) for n, each in enumerate(axes)))


def test_the_interval_is_that_of_a_paired_t_test() -> None:
    values = {0: (10.0, 7.0), 1: (12.0, 11.0), 2: (9.0, 8.5), 3: (14.0, 12.0)}
    change = over_blocks(LATENCY, [values])
    assert change is not None
    assert change.ratio is not None
    a, b = (np.array(column) for column in zip(*values.values(), strict=True))
    plain, logs = ttest_rel(b, a).confidence_interval(), ttest_rel(np.log(b), np.log(a)).confidence_interval()
    assert (change.difference.low, change.difference.high) == pytest.approx((plain.low, plain.high))
    assert (change.ratio.low, change.ratio.high) == pytest.approx((np.exp(logs.low), np.exp(logs.high)))
    assert change.verdict == "noise" if logs.low < 0 < logs.high else "lower"


def test_blocks_weigh_the_same_whatever_their_size_and_seeds_are_the_observations() -> None:
    small, large = {0: (1.0, 0.5), 1: (1.0, 0.5)}, {0: (100.0, 200.0), 1: (100.0, 200.0), 2: (1.0, 9.0)}
    change = over_blocks(LATENCY, [small, large])
    assert change is not None
    assert change.ratio is not None
    assert (change.seeds, change.verdict) == (2, "noise")
    assert change.ratio.value == pytest.approx(1.0)
    assert over_blocks(LATENCY, [{0: (1.0, 2.0)}, {1: (1.0, 2.0)}]) is None


@given(st.lists(st.tuples(st.floats(0.1, 1e3), st.floats(0.1, 1e3)), min_size=2, max_size=6))
def test_turned_round_the_difference_changes_its_sign_and_the_ratio_is_its_inverse(
    pairs: list[tuple[float, float]],
) -> None:
    there = over_blocks(LATENCY, [dict(enumerate(pairs))])
    back = over_blocks(LATENCY, [dict(enumerate((b, a) for a, b in pairs))])
    assert there is not None
    assert there.ratio is not None
    assert back is not None
    assert back.ratio is not None
    assert there.difference.value == pytest.approx(-back.difference.value)
    assert there.ratio.value == pytest.approx(1 / back.ratio.value)
    turned = {"lower": "higher", "higher": "lower"}
    assert back.verdict == turned.get(there.verdict, there.verdict)


def test_blocks_of_a_seed_are_one_observation() -> None:
    block = {0: (10.0, 7.0), 1: (10.0, 8.0), 2: (10.0, 9.5)}
    once, twice = over_blocks(LATENCY, [block]), over_blocks(LATENCY, [block, block])
    assert once is not None
    assert twice is not None
    for mine, theirs in ((once.ratio, twice.ratio), (once.difference, twice.difference)):
        assert mine is not None
        assert theirs is not None
        assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high))


def test_shares_and_what_may_be_zero_are_compared_by_difference_only() -> None:
    for name, values in (("solved_rate", (0.5, 0.6)), ("mean_queue_time_s", (0.0, 0.1)), ("preemptions", (3.0, 9.0))):
        change = over_blocks(name, [{0: values, 1: values}])
        assert change is not None
        assert change.ratio is None
        assert change.verdict == "higher"


def test_one_seed_has_no_interval_and_no_verdict() -> None:
    change = over_blocks(LATENCY, [{0: (2.0, 1.0)}])
    assert change is not None
    assert change.ratio is not None
    assert (change.difference.low, change.ratio.high, change.verdict) == (None, None, "")


def test_workflows_are_joined_by_their_id() -> None:
    def table(**columns: list[Any]) -> pd.DataFrame:
        frame = pd.DataFrame({"arrived_at": 0.0, "status": "completed", "measured": True, "solved": np.nan, **columns})
        return frame.astype({"workflow_id": "category"})

    ids, done = ["u", "t", "v", "w", "x"], ["completed"] * 4
    a = table(workflow_id=[*ids, "cold"], latency_s=[1.0, 1.0, 2.0, 3.0, np.nan, 1.0], solved=[1, 1, 0, 1, 0, 0],
              status=[*done, "rejected", "completed"], measured=[True] * 5 + [False])  # fmt: skip
    b = table(workflow_id=[*reversed(ids), "y"], latency_s=[4.0, 1.0, 2.5, 0.9995, 1.0005, 9.0],
              solved=[np.nan, 0, 1, 1, 1, 1])  # fmt: skip
    found = workflow_changes(joined_workflows(a, b))
    assert (found.workflows, found.only_in_a, found.only_in_b, found.same_load) == (5, 0, 1, False)
    assert (found.completed, found.faster, found.slower, found.equal) == (4, 1, 1, 2)
    assert found.median_change_s == pytest.approx(0.0, abs=1e-9)
    assert found.labelled == 4
    assert (found.solved_by_a, found.solved_by_b, found.solved_by_both) == (1, 1, 2)


def test_a_setting_that_only_some_policies_have_is_no_obstacle() -> None:
    routed = {"policy": "chimera", "tau": 1}
    a = side({}, {**routed, "router": "trace"}, {"policy": "sjf"})
    b = side({}, {**routed, "router": "none"})
    matched = match(a, b, policies=False)
    assert [pair.axes["policy"] for pair in matched.pairs] == ["fcfs", "chimera"]
    assert (matched.differ, matched.alone_a, matched.alone_b) == ({"router": ("trace", "none")}, 1, 0)


def test_without_a_common_cell_the_axes_are_named() -> None:
    with pytest.raises(ChimsimError, match=r"no cell in common \(seed: 0 in A, 3 in B\)"):
        match(side({}), side({"seed": 3}), policies=False)
    with pytest.raises(ChimsimError, match=r"trace: t, u in A, v in B; seed: 0 in A, 1 in B"):
        match(side({}, {"trace": "u"}), side({"seed": 1, "trace": "v"}), policies=False)
    with pytest.raises(ChimsimError, match=r"taken together \(trace: t, u in A, u, t in B; seed: 0, 1 in A"):
        match(side({}, {"trace": "u", "seed": 1}), side({"trace": "u"}, {"seed": 1}), policies=False)


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ("fcfs", "chimera", r"chimera has 3 settings: tau=0; tau=1; tau=inf. Choose one, say chimera:tau=0"),
        ("fcsf", "chimera", "'fcsf' is not in .*did you mean 'fcfs'"),
        ("fcfs", "chimera:tua=1", "did you mean 'tau'"),
        ("fcfs", "chimera:tau=2", "no cell has tau 2; there is 0, 1, inf"),
    ],
)
def test_what_is_meant_must_be_one_policy(results: Results, a: str, b: str, message: str) -> None:
    with pytest.raises(ChimsimError, match=message):
        compare_policies(results, a, b)


def test_a_label_may_have_a_colon() -> None:
    whole = side({"policy": "mine.py:Best", "tau": 1}, {"policy": "mine.py:Best", "tau": 2}, {"policy": "mine.py"})
    assert [row.axes["tau"] for row in policy_side(whole, "mine.py:Best:tau=2").rows] == [2]


def test_two_policies_of_a_folder_pair_by_seed_and_give_the_summarys_means(results: Results) -> None:
    compared = compare_policies(results, "fcfs", "chimera:tau=1")
    (block,) = compared.blocks
    assert block.seeds == (0, 1)
    assert compared.matched.differ["tau"] == ("-", "1")
    assert not compared.other_loads
    summary = results.summary
    change = next(change for change in block.changes if change.metric == LATENCY)
    means = [summary.loc[mine, LATENCY].mean() for mine in (summary["policy"] == "fcfs", summary["tau"] == 1)]
    assert (change.a, change.b, change.difference.value) == pytest.approx((*means, means[1] - means[0]))
    flows = block.workflows
    assert flows.workflows == summary.loc[summary["policy"] == "fcfs", "workflows"].sum()
    assert flows.same_load
    assert flows.faster + flows.slower + flows.equal == flows.completed > 0


def test_a_folder_and_itself_differ_in_nothing(results: Results) -> None:
    compared = compare_folders(results, results)
    changes = [change for block in compared.blocks for change in block.changes] + list(compared.overall)
    assert len(compared.blocks) == 4
    assert {change.verdict for change in changes} == {"equal"}
    assert compared.workflows.faster == compared.workflows.slower == 0
    assert "all differences are 0" in comparison_text(compared, False)


def test_two_folders_are_paired_where_they_can_and_the_rest_is_counted(results: Results, wide: Results) -> None:
    compared = compare_folders(results, wide, [LATENCY, "p99_slowdown"])
    matched = compared.matched
    assert (len(matched.pairs), matched.alone_a, matched.alone_b) == (1, 7, 1)
    assert matched.differ == {"slots": ("4", "8")}
    text = comparison_text(compared, True)
    assert "without a partner: 7 cells of A, 1 of B" in text
    assert "One seed: no interval" in text
    assert [change.metric for change in compared.overall] == [LATENCY, "p99_slowdown"]


@pytest.mark.parametrize(("blocks", "asked"), [(6, False), (6, True), (1, False), (1, True)])
def test_the_text_fits_80_columns_in_all_of_its_forms(
    results: Results, monkeypatch: pytest.MonkeyPatch, blocks: int, asked: bool
) -> None:
    monkeypatch.setattr("chimsim.compare_text.IN_FULL", blocks)
    text = comparison_text(compare_folders(results, results, ["p99_workflow_queue_time_s"] if asked else ()), asked)
    assert max(len(line) for line in text.splitlines() if not line.startswith(("A ", "B "))) <= 80
    assert all(f"chimera tau {tau}" in text for tau in ("0", "1", "inf"))
    assert ("--csv FILE" in text) == (blocks == 1 and not asked)


def run(*arguments: object) -> Any:
    app = typer.Typer()
    app.command()(compare_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_the_command_writes_text_json_and_csv(results: Results, tmp_path: Path) -> None:
    asked = ("fcfs", "chimera:tau=1", "--in", results.path, "--metric", f"{LATENCY},yields")
    csv = tmp_path / "c.csv"
    ran = run(*asked, "--csv", csv)
    assert ran.exit_code == 0
    assert "mean latency s" in ran.stdout
    assert f"written: {csv}" in ran.stdout
    table = pd.read_csv(csv)
    assert table["block"].tolist() == ["1", "1", "overall", "overall"]
    found = json.loads(run(*asked, "--json").stdout)
    metric = found["blocks"][0]["metrics"][0]
    assert (
        metric["difference"] == pytest.approx(metric["b"] - metric["a"]) == pytest.approx(table["difference"].iloc[0])
    )
    assert metric["ratio_low"] <= metric["ratio"] <= metric["ratio_high"]


def test_wrong_input_is_named(results: Results, tmp_path: Path) -> None:
    for arguments, message in (
        (("fcfs", "stjf"), "with --in DIR"),
        (("fcfs", "fcfs", "--in", results.path, "--metric", "p99_latency_s"), "did you mean"),
        ((tmp_path, results.path), "is not a results folder"),
        (("fcfs", "fcfs", "--in", results.path, "--csv", tmp_path), "is a folder"),
    ):
        assert message in str(run(*arguments).exception)
