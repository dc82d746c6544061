"""Claims about summaries: the words they are made of, and verdicts on data whose truth is known."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pandas as pd
import pytest

from chimsim.errors import ChimsimError
from chimsim.reproduce.claims import parse_claim
from chimsim.reproduce.relations import Relation, judge


def summary(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Runs as a summary: axes, the column ``cell``, metrics."""
    axes = ["trace", "combo", "rps", "policy", "tau", "router_map", "seed"]
    frame = pd.DataFrame(
        [{name: row.get(name) for name in axes} | {"cell": str(i)} | row for i, row in enumerate(rows)]
    )
    return frame[[*axes, "cell", *(name for name in frame.columns if name not in (*axes, "cell"))]]


def runs(values: dict[str, float], noise: float, seeds: int = 5, **axes: Any) -> list[dict[str, Any]]:
    """One run a policy and seed: the value times what all policies share at that seed, plus noise of its own."""
    draw = np.random.default_rng(3)
    shared = draw.uniform(0.5, 2.0, seeds)
    return [
        {"trace": "t", "combo": "c", "rps": 1.0, "policy": policy, "seed": seed, **axes,
         "mean_queue_time_s": value * shared[seed] * (1 + noise * draw.standard_normal())}
        for policy, value in values.items()
        for seed in range(seeds)
    ]  # fmt: skip


def verdict(claim: str, frame: pd.DataFrame, **keys: Any) -> Any:
    return judge(Relation(parse_claim(claim, "here"), "", **keys), frame)


def test_pairs_of_a_seed_tell_what_means_cannot() -> None:
    frame = summary(runs({"sjf": 10.0, "stjf": 9.0}, noise=0.02))
    found = verdict("stjf.mean_queue_time_s < sjf.mean_queue_time_s", frame)
    assert found.verdict == "holds"
    (block,) = found.blocks
    assert block.measure == "ratio"
    assert block.low < 0.9 < block.high
    assert verdict("stjf.mean_queue_time_s > sjf.mean_queue_time_s", frame).verdict == "fails"
    assert verdict("stjf.mean_queue_time_s < 100", frame).verdict == "holds"


def test_noise_beyond_the_difference_is_undecided_and_one_seed_always_is() -> None:
    frame = summary(runs({"sjf": 10.0, "stjf": 9.9}, noise=0.3))
    assert verdict("stjf.mean_queue_time_s < sjf.mean_queue_time_s", frame).verdict == "undecided"
    frame = summary(runs({"sjf": 10.0, "stjf": 1.0}, noise=0.0, seeds=1))
    found = verdict("stjf.mean_queue_time_s < sjf.mean_queue_time_s", frame)
    assert (found.verdict, found.blocks[0].note) == ("undecided", "one seed, no interval")


def test_a_claim_is_asked_block_by_block_and_holds_where_it_is_meant() -> None:
    rows = runs({"a": 1.0, "b": 2.0}, 0.01, rps=4.0) + runs({"a": 2.0, "b": 1.0}, 0.01, rps=8.0)
    claim = "a.mean_queue_time_s < b.mean_queue_time_s"
    found = verdict(claim, summary(rows))
    assert (found.verdict, found.count("holds"), found.count("fails")) == ("fails", 1, 1)
    assert [block.title for block in found.blocks] == ["rps 4", "rps 8"]
    assert verdict(claim, summary(rows), where={"rps": [4.0]}).verdict == "holds"
    found = verdict(claim, summary(rows), when=parse_claim("b.mean_queue_time_s > a.mean_queue_time_s", "here"))
    assert (found.verdict, found.skipped) == ("holds", 1)


def test_a_chance_failure_among_many_blocks_is_not_a_failure() -> None:
    """Of forty blocks without a difference one or two look wrong at 95 %; the widened interval does not."""
    draw = np.random.default_rng(0)
    rows = []
    for rps in range(40):
        for policy in ("a", "b"):
            for seed in range(6):
                rows.append({"trace": "t", "combo": "c", "rps": float(rps), "policy": policy, "seed": seed,
                             "mean_queue_time_s": float(np.exp(0.1 * draw.standard_normal()))})  # fmt: skip
    found = verdict("a.mean_queue_time_s < b.mean_queue_time_s", summary(rows))
    assert found.count("fails") > 0
    assert found.verdict == "undecided"


def tradeoff(tau_points: dict[float, tuple[float, float]], rival: tuple[float, float], noise: float) -> pd.DataFrame:
    """Chimera at some taus and a rival, each with its latency and solved rate."""
    draw = np.random.default_rng(1)
    rows = []
    for seed in range(6):
        shared = draw.uniform(0.8, 1.2)
        for tau, (latency, solved) in [*tau_points.items(), (None, rival)]:
            rows.append(
                {"trace": "t", "combo": "c", "rps": 1.0, "policy": "fcfs" if tau is None else "chimera", "tau": tau,
                 "seed": seed, "mean_workflow_latency_s": latency * shared * (1 + noise * draw.standard_normal()),
                 "solved_rate": solved + 0.1 * noise * draw.standard_normal()}
            )  # fmt: skip
    return summary(rows)


def test_dominates_takes_the_fastest_settings_that_solve_as_much() -> None:
    points = {0.0: (4.0, 0.2), 1.0: (8.0, 0.45), 4.0: (15.0, 0.6)}
    found = verdict("chimera dominates fcfs", tradeoff(points, (10.0, 0.4), 0.01))
    (block,) = found.blocks
    assert found.verdict == "holds"
    # on the line between the first two: 0.4 of 0.2 to 0.45
    assert block.value == pytest.approx((0.2 * 4 + 0.8 * 8) / 10, abs=0.03)
    assert block.note.startswith("tau 0 20%, tau 1 80%; solved +0.0 ± 0.0 points")
    assert verdict("chimera dominates fcfs", tradeoff(points, (6.0, 0.4), 0.01)).verdict == "fails"
    out_of_reach = verdict("chimera dominates fcfs", tradeoff(points, (10.0, 0.7), 0.01))
    assert out_of_reach.verdict == "fails"
    assert "60.0 % at most" in out_of_reach.blocks[0].note


def test_dominates_may_choose_on_other_runs() -> None:
    points = {0.0: (4.0, 0.2), 1.0: (8.0, 0.45)}
    judged = tradeoff(points, (10.0, 0.4), 0.01)
    relation = Relation(parse_claim("chimera dominates fcfs", "here"), "")
    elsewhere = tradeoff({0.0: (4.0, 0.46), 1.0: (8.0, 0.45)}, (10.0, 0.4), 0.0)
    found = judge(relation, judged, elsewhere)
    # on the other runs tau 0 was all that is worth taking; here it solves too little
    assert found.verdict == "fails"
    assert found.blocks[0].note.startswith("tau 0 100%; solved -")
    assert found.blocks[0].value < 0.5


def test_a_trend_holds_from_end_to_end_and_fails_at_a_sure_step_back() -> None:
    rising = {tau: (2.0 + tau, 0.2 + 0.1 * tau) for tau in (0.0, 1.0, 2.0)}
    found = verdict("chimera.solved_rate rises with tau", tradeoff(rising, (1.0, 0.1), 0.01))
    assert found.verdict == "holds"
    assert found.blocks[0].measure == "difference"
    assert (
        verdict("chimera.mean_workflow_latency_s falls with tau", tradeoff(rising, (1.0, 0.1), 0.01)).verdict == "fails"
    )
    dip = {0.0: (2.0, 0.2), 1.0: (3.0, 0.1), 2.0: (4.0, 0.5)}
    found = verdict("chimera.solved_rate rises with tau", tradeoff(dip, (1.0, 0.1), 0.01))
    assert (found.verdict, "the other way from 0 to 1" in found.blocks[0].note) == ("fails", True)


def test_settings_of_a_predictor_are_blocks_of_their_own() -> None:
    rows = [
        {**row, "policy": "chimera", "tau": tau, "router_map": quality, "mean_workflow_latency_s": 5.0 + row["seed"],
         "solved_rate": quality}
        for quality in (0.5, 0.9)
        for tau in (0.0, 1.0)
        for row in runs({"chimera": 1.0}, 0.0)
    ] + [
        {**row, "mean_workflow_latency_s": 6.0 + row["seed"], "solved_rate": 0.6} for row in runs({"fcfs": 1.0}, 0.0)
    ]  # fmt: skip
    found = verdict("chimera dominates fcfs", summary(rows))
    assert [(block.axes, block.verdict) for block in found.blocks] == [
        ({"router_map": 0.5}, "fails"),
        ({"router_map": 0.9}, "holds"),
    ]


def test_hypervolumes_share_a_reference_and_equal_settings_are_compared() -> None:
    frame = tradeoff({0.0: (4.0, 0.2), 1.0: (8.0, 0.45)}, (10.0, 0.1), 0.01)
    found = verdict("chimera.hypervolume > fcfs.hypervolume", frame)
    assert found.verdict == "holds"
    other = frame[frame["policy"] == "chimera"].assign(
        policy="better", mean_workflow_latency_s=lambda rows: 0.5 * rows["mean_workflow_latency_s"]
    )
    found = verdict("better.mean_workflow_latency_s < chimera.mean_workflow_latency_s", pd.concat([frame, other]))
    assert [block.axes for block in found.blocks] == [{"tau": 0.0}, {"tau": 1.0}]
    assert [block.value for block in found.blocks] == pytest.approx([0.5, 0.5])


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ("stjf is better", "is no claim"),
        ("stjf.a < b", "'b' in 'stjf.a < b' is not of the form policy.metric"),
        ("stjf[tau].a < 3", "'tau' in 'stjf\\[tau\\]' is not of the form axis=value"),
    ],
)
def test_words_that_make_no_claim(claim: str, message: str) -> None:
    with pytest.raises(ChimsimError, match=message):
        parse_claim(claim, "file.toml: relation 1")


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ("stfj.mean_queue_time_s < sjf.mean_queue_time_s", "no policy 'stfj'; did you mean 'stjf'?"),
        ("stjf.mean_queue_time < sjf.mean_queue_time", "no metric 'mean_queue_time'; did you mean"),
        ("stjf[tua=2].mean_queue_time_s < 3", "no axis 'tua'; did you mean 'tau'?"),
        ("stjf.mean_queue_time_s rises with rate", "no axis 'rate'"),
    ],
)
def test_names_that_there_are_not(claim: str, message: str) -> None:
    with pytest.raises(ChimsimError, match=re.escape(message)):
        verdict(claim, summary(runs({"sjf": 10.0, "stjf": 9.0}, noise=0.02)))
