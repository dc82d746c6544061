"""Measuring: what is planned, what counts as a step, what is thrown away, how it is gone on with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibration.measured_fit import fit_raw
from calibration.raw_measurements import Header, Raw, RawWriter, read_raw
from chimsim.errors import ChimsimError
from chimsim.live.client import Answer, Client, EngineError
from chimsim.live.measure import Engine, header_there, measure
from chimsim.live.metrics import read_metrics
from chimsim.live.plan import Limits, ladder, plan, unfit
from chimsim.live.probe import BUDGETS, budget_from_gaps
from chimsim.live.survey import Given, survey
from chimsim.live.windows import decode_window, mixed_window
from tests.chimsim.live.stub import Stub, serving

T = TypeVar("T")
LIMITS = Limits(16, 2048, 32_768, 128, 4096)


def on_engine(url: str, work: Callable[[Engine], Awaitable[T]]) -> T:
    async def run() -> T:
        async with Client(url, inactivity_s=5.0) as client:
            return await work(Engine(client, "tiny"))

    return asyncio.run(run())


def header(url: str, given: Given | None = None) -> Header:
    usual = Given("GPU", max_num_seqs=4, max_num_batched_tokens=256)
    return on_engine(url, lambda engine: survey(engine, given or usual))


def measured(url: str, raw: Path, **given: int) -> Raw:
    """A quick measuring of the stub."""

    async def work(engine: Engine) -> None:
        settings = {"max_num_batched_tokens": 256, "max_num_seqs": 4, **given}
        found = await survey(engine, Given("GPU", **settings), header_there(raw))
        await measure(engine, found, raw, quick=True)

    on_engine(url, work)
    return read_raw(raw)


@given(st.integers(1, 5000), st.sampled_from([1.5, 2.0, 4.0]), st.integers(1, 32))
def test_a_ladder_rises_to_its_last_rung(last: int, factor: float, first: int) -> None:
    rungs = ladder(last, factor, first)
    assert rungs == sorted(set(rungs))
    assert rungs[-1] == last
    assert rungs[0] == min(first, last)


@given(
    st.integers(1, 512), st.sampled_from([512, 2048, 8192]), st.integers(1000, 500_000), st.integers(64, 40_000),
    st.booleans(),
)  # fmt: skip
def test_every_cell_is_within_the_models_limit_and_unfit_ones_are_said(
    seqs: int, budget: int, kv: int, length: int, quick: bool
) -> None:
    limits = Limits(seqs, budget, kv, 16, length)
    cells = plan(limits, quick=quick)
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells:
        assert 0 <= cell.batch <= seqs - (cell.kind == "mixed")
        assert max(cell.context + cell.output_tokens(limits), cell.prompt + 1) <= max(length, cell.prompt + 1)
        assert cell.prompt < length
        if not unfit(cell, limits) and cell.kind == "decode":
            assert limits.kv_tokens(cell.batch, cell.context + cell.output_tokens(limits)) < kv


def answer(prompt: int, progress: tuple[tuple[float, int], ...]) -> Answer:
    return Answer(0.0, progress[0][0], progress[-1][0], prompt, progress[-1][1], "length", progress)


def test_steps_are_counted_while_all_decode_and_not_by_chunks() -> None:
    """The first begins early and the second ends late; a step takes 0.5 s; chunks hold one token or two."""
    first = answer(100, tuple((0.5 * i, i) for i in (1, 2, 3, 5, 7, 8, 10)))
    second = answer(200, tuple((1.5 + 0.5 * i, i) for i in (1, 2, 4, 5, 6, 8, 9, 20)))
    window = decode_window([first, second])
    assert window is not None
    assert window.seconds / window.steps == pytest.approx(0.5)
    assert window.context_tokens == pytest.approx(100 + 7.5 + 200 + 3.5)


def test_requests_that_were_never_in_flight_together_give_no_window() -> None:
    first, second = answer(1, ((1.0, 1), (2.0, 2), (3.0, 3))), answer(1, ((4.0, 1), (5.0, 2), (6.0, 3)))
    assert decode_window([first, second]) is None


def test_without_a_running_count_tokens_come_evenly() -> None:
    window = decode_window([answer(10, ((1.0, 1), (11.0, 101))), answer(10, ((2.0, 1), (12.0, 101)))])
    assert window is not None
    assert window.seconds / window.steps == pytest.approx(0.1)
    assert mixed_window([answer(10, ((1.0, 1), (11.0, 101)))], 2.0, 3.0) is None


def test_a_mixed_window_holds_its_prefills_whole() -> None:
    decode = answer(100, tuple((float(i), i) for i in range(1, 11)))
    window = mixed_window([decode], 3.2, 6.5)
    assert window is not None
    assert (window.steps, window.seconds) == (4.0, 4.0)
    assert mixed_window([decode], 0.5, 6.5) is None
    assert mixed_window([decode], 3.2, 10.5) is None


@pytest.mark.parametrize("generation", ["new", "old"])
def test_both_generations_of_names_are_read(generation: str) -> None:
    with serving(Stub(metrics=generation, prefix_hits=7, preemptions=3)) as url:
        found = on_engine(url, lambda engine: engine.metrics())
    assert found is not None
    assert (found.running, found.waiting, found.kv_used_fraction) == (0.0, 0.0, 0.0)
    assert (found.prefix_hits, found.preemptions) == (7.0, 3.0)
    assert (found.num_kv_tokens, found.block_tokens, found.prefix_caching) == (6400, 16, True)
    assert (found.prefill_count is None) == (generation == "old")


def test_the_engines_own_kv_figure_goes_before_blocks_times_size() -> None:
    info = 'vllm:cache_config_info{block_size="16",num_gpu_blocks="100",kv_cache_size_tokens="3200"} 1.0\n'
    assert read_metrics(info).num_kv_tokens == 3200
    assert read_metrics(info.replace('"3200"', '"None"')).num_kv_tokens == 1600


def test_engines_behind_one_server_are_added_up_and_counted() -> None:
    lines = [f'vllm:num_requests_running{{engine="{i}"}} {i + 1}' for i in range(3)]
    found = read_metrics("\n".join(lines) + "\n")
    assert (found.engines, found.running) == (3, 6.0)


@pytest.mark.parametrize("text", ["<html>", "python_info 1.0\n", ""])
def test_what_is_not_vllms_metrics_is_refused(text: str) -> None:
    with pytest.raises(ChimsimError, match="/metrics"):
        read_metrics(text)


def test_slots_are_seen_and_a_budget_is_looked_for() -> None:
    stub = Stub(max_num_seqs=6, budget=512, max_model_len=1500, law=lambda n, _, c: 0.002 + 5e-5 * sum(t for t, _ in c))
    with serving(stub) as url:
        found = header(url, Given("GPU"))
    assert found.max_num_seqs == 6
    assert found.settings_from["max_num_seqs"].startswith("seen")
    assert found.max_num_batched_tokens in BUDGETS
    assert (1, (511, 0)) in {(decodes, chunks[0]) for decodes, _, chunks in stub.steps if chunks}


@pytest.mark.parametrize(
    ("prompt", "gaps", "budget"),
    [
        (4094, [9, 10, 300, 310, 11], 2048),
        (4094, [9, 640, 11], None),
        (4094, [9, 10, 11], None),
        (4094, [*[300] * 4, 9], 1024),
        (8190, [9, *[300 + i for i in range(16)], 40], 512),
        (32766, [1500, 1400], 16_384),
        (3000, [300, 140, 9], 2048),
    ],
)
def test_the_budget_is_told_by_the_number_of_long_steps(prompt: int, gaps: list[float], budget: int | None) -> None:
    assert budget_from_gaps(prompt, gaps, 10.0) == budget


def test_token_ids_outside_the_vocabulary_are_not_sent_again() -> None:
    stub = Stub(vocabulary=264)
    with serving(stub) as url:
        header(url)
    last = stub.bodies[-1]["prompt"]
    assert max(last) < 240


def test_a_measuring_gives_every_cell_of_the_plan_with_new_prompts_and_a_profile(tmp_path: Path) -> None:
    stub = Stub()
    with serving(stub) as url:
        raw = measured(url, tmp_path / "raw.jsonl")
    assert raw.header.settings_from["num_kv_tokens"] == "reported by /metrics"
    assert (raw.header.max_num_seqs, raw.header.num_kv_tokens) == (4, 6400)
    limits = Limits(4, 256, 6400, 16, 512)
    assert {name for name, _ in raw.done} == {cell.name for cell in plan(limits, quick=True)}
    assert {repeat for _, repeat in raw.done} == {0, 1}
    decode = [m for m in raw.measurements if m.kind == "decode"]
    assert all(m.steps >= 8 and m.seconds > 0 for m in decode)
    assert all(m.context_tokens > m.batch * 128 for m in decode)
    assert all(m.engine_s is not None and m.engine_s < m.seconds for m in raw.measurements if m.kind == "prefill")
    profile = fit_raw(raw).profile
    assert profile.mixed_step_s(0, 0, [(256, 0)]) > profile.mixed_step_s(0, 0, [(16, 0)])
    assert profile.decode_s_per_token(4) >= 0.002

    assert not raw.skipped
    prompts = [tuple(body["prompt"][:16]) for body in stub.bodies if len(body["prompt"]) >= 16]
    assert len(prompts) > 50
    assert len(set(prompts)) == len(prompts)


def test_the_batch_that_was_measured_really_ran_together(tmp_path: Path) -> None:
    """max_num_seqs said to be 8 where the engine takes 4: the larger batches are left out, not believed."""
    with serving(Stub(law=lambda *_: 0.0003)) as url:
        raw = measured(url, tmp_path / "raw.jsonl", max_num_seqs=8)
    assert {m.batch for m in raw.measurements if m.kind == "decode"} == {1, 4}
    assert any(skip.cell == "8 decodes after 128" and "in flight" in skip.reason for skip in raw.skipped)


@pytest.mark.parametrize(
    ("stub", "reason"),
    [
        (Stub(hits_a_request=1), "prefix cache"),
        (Stub(preemptions_a_request=1), "preempted"),
        (Stub(num_blocks=20), "KV memory"),
    ],
)
def test_cells_that_would_mislead_are_left_out_with_the_reason(stub: Stub, reason: str, tmp_path: Path) -> None:
    with serving(stub) as url:
        raw = measured(url, tmp_path / "raw.jsonl")
    assert any(reason in skip.reason for skip in raw.skipped)
    assert all(reason in skip.reason for skip in raw.skipped)
    if stub.num_blocks != 20:
        assert not raw.measurements


def test_going_on_measures_only_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    stub = Stub()
    with serving(stub) as url:
        whole = measured(url, path)
        lines = path.read_text("utf-8").splitlines(keepends=True)
        path.write_text("".join(lines[:-4]) + lines[-4][:20], encoding="utf-8")
        before = stub.completions
        again = measured(url, path)
    assert again.done == whole.done
    assert again.measurements[: len(lines) - 5] == whole.measurements[: len(lines) - 5]
    assert stub.completions - before < before / 2


def test_a_file_of_another_engine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    with serving(Stub()) as url:
        RawWriter(path, header(url))
    size = path.stat().st_size
    with serving(Stub(num_blocks=300)) as url, pytest.raises(ChimsimError, match="another engine"):
        measured(url, path)
    assert path.stat().st_size == size


def test_an_engine_that_fails_in_between_leaves_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    with serving(Stub(trouble="close", trouble_from=60)) as url, pytest.raises(EngineError, match="closed"):
        measured(url, path)
    kept = read_raw(path).measurements
    assert kept
    with serving(Stub()) as url:
        assert read_raw(path).measurements == measured(url, path).measurements[: len(kept)]


def test_an_engine_without_metrics_is_measured_when_told_its_memory(tmp_path: Path) -> None:
    with serving(Stub(metrics="", running_counts=True)) as url:
        with pytest.raises(ChimsimError, match="--num-kv-tokens"):
            measured(url, tmp_path / "raw.jsonl")
        with pytest.raises(ChimsimError, match="--max-num-seqs"):
            header(url, Given("GPU", num_kv_tokens=6400))
        raw = measured(url, tmp_path / "raw.jsonl", num_kv_tokens=6400)
    assert raw.header.settings_from["block_tokens"].startswith("assumed")
    assert all(m.engine_s is None for m in raw.measurements)
    assert fit_raw(raw).request_s is not None


def test_an_engine_that_others_use_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chimsim.live.measure.IDLE_S", 0.2)
    with serving(Stub(others_running=2)) as url, pytest.raises(ChimsimError, match="2 requests"):
        measured(url, tmp_path / "raw.jsonl")


def test_another_limit_than_served_is_refused_and_a_missing_one_asked_for() -> None:
    with serving(Stub()) as url, pytest.raises(ChimsimError, match="not what is served: 512"):
        header(url, Given("GPU", max_model_len=4096))
    with serving(Stub(say_max_model_len=False)) as url, pytest.raises(ChimsimError, match="--max-model-len"):
        header(url)


def test_a_server_that_cuts_answers_is_noticed() -> None:
    with serving(Stub(max_model_len=64)) as url, pytest.raises(EngineError, match="the server counts 60"):
        on_engine(url, lambda engine: engine.ask(60, 10))


def test_limits_count_whole_blocks_and_leave_one() -> None:
    assert LIMITS.kv_tokens(3, 129) == 3 * 256
    assert LIMITS.fits(255, 128)
    assert not LIMITS.fits(256, 128)
    assert not replace(LIMITS, num_kv_tokens=256).fits(1, 129)
