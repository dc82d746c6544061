"""Everything handed to the engine at once (``queue = "engine"``): its own priority queue keeps the policy's order."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chimsim import sweep
from chimsim.errors import ChimsimError
from chimsim.grid import Cell
from chimsim.simulation import simulate
from chimsim.spec import spec_from
from chimsim.sweeps import cells, run_cell
from policies import PolicyError, load_policy
from tests.chimsim.small import small_keys, write_small
from tests.chimsim.worlds import MODELS, TrueLengths, cluster, engine, single_stage, traces
from traces import Run, Stage, Trace, Workflow, write_trace

MODEL = "Qwen2.5-7B"
CALLS = {"first": [200], "b": [50], "two": [10, 90], "c": [30], "d": [70]}
"""Output tokens by stage; the others arrive in this order while the first is served."""
ORDERS = {
    "fcfs": ["first", "b", "two", "c", "d", "two"],
    "sjf": ["first", "two", "c", "b", "d", "two"],
    "stjf": ["first", "c", "b", "d", "two", "two"],
    "chimera": ["first", "c", "b", "d", "two", "two"],
}


def grid(folder: Path, **keys: object) -> list[Cell]:
    rows = []
    for number, (name, outputs) in enumerate(CALLS.items()):
        run = Run(tuple(Stage(f"s{index}", 40, tokens) for index, tokens in enumerate(outputs)), True)
        rows.append(Workflow(name, "test", {MODEL: run}, 0.01 * number, confidence={MODEL: 0.5}))
    path = folder / "calls.jsonl"
    write_trace(Trace("calls", tuple(rows)), path)
    given = {"trace": str(path), "combo": "qwen7b", "policy": list(ORDERS), "slots": 1, "max_num_seqs": 1}
    return cells(spec_from(given | keys))


def test_each_policy_is_served_in_its_own_order(tmp_path: Path) -> None:
    served = {}
    for cell in grid(tmp_path, queue="engine"):
        assert [spec.scheduling for spec in cell.cluster.engines] == ["priority"]
        requests = run_cell(cell)[0].requests.sort_values("admitted_at")
        served[cell.policy] = requests["workflow_id"].astype(str).tolist()
    assert served == ORDERS


def test_where_calls_wait_is_an_axis_of_the_sweep(tmp_path: Path) -> None:
    both = grid(tmp_path, queue=["dispatcher", "engine"], policy="stjf")
    assert [cell.axes["queue"] for cell in both] == ["dispatcher", "engine"]
    assert [cell.cluster.engines[0].scheduling for cell in both] == ["fcfs", "priority"]
    assert both[0].name != both[1].name
    # one slot, one sequence: it makes no difference to the order
    orders = [run_cell(cell)[0].requests.sort_values("admitted_at")["workflow_id"].tolist() for cell in both]
    assert orders[0] == orders[1]


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(traces(), st.sampled_from(["fcfs", "sjf", "stjf", "chimera"]), st.integers(1, 3))
def test_nobody_is_admitted_before_a_better_one_that_waits(trace: Trace, policy: str, seqs: int) -> None:
    spec = cluster(*(engine(model, model, slots=seqs, scheduling="priority") for model in MODELS))
    result = simulate(trace, spec, policy, predictor=TrueLengths(trace), queue="engine", log_decisions=True)
    assert result.decisions is not None
    # an engine's priorities are whole numbers
    priorities = {request_id: round(priority[0]) if priority else 0 for _, request_id, _, priority in result.decisions}
    calls = [
        (name, enqueued_at, admitted_at, (priorities[request_id], request_id))
        for name, request_id, enqueued_at, admitted_at in zip(
            *(result.requests[key].tolist() for key in ("engine", "request_id", "enqueued_at", "admitted_at")),
            strict=True,
        )
    ]
    for name, _, now, place in calls:
        for other, enqueued_at, admitted_at, better in calls:
            if other == name and enqueued_at <= now < admitted_at:
                assert place < better


def test_a_policy_that_takes_slots_back_is_refused_before_anything_runs(tmp_path: Path) -> None:
    keys = small_keys(write_small(tmp_path)) | {"policy": ["mlfq", "fcfs"], "queue": "engine", "seeds": 1}
    del keys["tau"]
    with pytest.raises(ChimsimError, match=r"^policy mlfq takes slots back, which .* use --queue dispatcher$"):
        sweep(**keys, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert sweep(**keys | {"policy": "fcfs"}).summary["queue"].tolist() == ["engine"]


def test_an_order_that_the_engine_would_ignore_is_refused() -> None:
    trace = single_stage([(40, 5)] * 3, arrivals=[0.0, 0.0, 0.1])
    spec = cluster(engine(scheduling="fcfs"))
    with pytest.raises(ChimsimError, match="engine A runs with scheduling fcfs and would ignore the policy's order"):
        simulate(trace, spec, "stjf", predictor=TrueLengths(trace), queue="engine")
    assert len(simulate(trace, spec, "fcfs", queue="engine", predictor=TrueLengths(trace)).requests) == 3
    with pytest.raises(PolicyError, match="Mlfq orders by 2 numbers"):
        simulate(trace, spec, load_policy("mlfq"), queue="engine")
