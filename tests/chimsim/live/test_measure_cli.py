"""`chimsim calibrate measure`, `fit` and `record`: what they print and write, and one line for what is wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calibration.profile import load_profile
from calibration.raw_measurements import RawWriter, read_raw
from chimsim.live.client import Client
from chimsim.live.measure import Engine
from chimsim.live.recording import MOST_FAILURES, Planned, like, poisson, replay
from chimsim.measured import read_records, read_run
from chimsim.run_meta import read_engine_file, read_timeseries
from tests.calibration.test_measured_fit import measured
from tests.chimsim.live.stub import Stub, serving
from tests.chimsim.small import run_chimsim

Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Main:
    """Run ``chimsim calibrate`` in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        return run_chimsim(monkeypatch, capsys, "calibrate", *arguments)

    return run


def measure(main: Main, url: str, *more: str) -> tuple[int, str, str]:
    given = ("--max-num-seqs", "4", "--max-num-batched-tokens", "256", "--mean-call-tokens", "300")
    return main("measure", "--url", url, "--model", "tiny", "--gpu", "GPU", "--out", "p.toml", "--quick", *given, *more)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """The raw file of a whole measuring, made up."""
    path = tmp_path / "raw.jsonl"
    found = measured(noise=0.02)
    writer = RawWriter(path, found.header)
    path.write_text(
        path.read_text("utf-8") + "".join(json.dumps(vars_of(entry)) + "\n" for entry in found.measurements),
        encoding="utf-8",
    )
    writer.write(found.skipped[0])
    return path


def vars_of(entry: Any) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in entry.__dataclass_fields__}


def test_fit_prints_errors_settings_and_the_decode_time_at_the_right_batch(main: Main, raw: Path) -> None:
    code, out, err = main("fit", raw.name, "--out", "p.toml")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    text = " ".join(out.split())
    for words in (
        "tiny on 1 x RTX 4090, vLLM 0.19.0, measured 2026-11-30",
        "held out",
        "left out: 1 cells, does not fit",
        "num_kv_tokens: 40,000, reported by /metrics",
        "max_batch_size: 20 (KV memory decides",
        "decode_ms_per_token at that batch",
        "times too optimistic",
        "written: p.toml",
    ):
        assert words in text
    assert load_profile("p.toml").max_batch_size == 20


def test_fit_as_json_has_the_same_figures(main: Main, raw: Path) -> None:
    code, out, _ = main("fit", str(raw), "--out", "p.toml", "--json", "--mean-call-tokens", "500")
    found = json.loads(out)
    profile = load_profile("p.toml")
    assert code == 0
    assert found["digest"] == profile.digest
    assert found["max_batch_size"] == profile.max_batch_size == 32
    assert found["decode_ms_per_token"] == pytest.approx(1e3 * profile.decode_s_per_token(32, 250.0))
    assert found["decode_ms_per_token"] > found["decode_ms_per_token_at_batch_1"]
    assert {part["part"] for part in found["held_out"]} == {"decode steps", "prefill", "prefill among decodes"}
    assert found["skipped"][0]["reason"] == "does not fit"


def test_measure_writes_a_profile_and_keeps_the_raw_file(main: Main) -> None:
    with serving(Stub()) as url:
        code, out, err = measure(main, url)
        assert (code, err) == (0, "")
        assert "written: p.toml (raw measurements: p.raw.jsonl)" in " ".join(out.split())
        profile = load_profile("p.toml")
        assert (profile.model, profile.gpu, profile.num_kv_tokens, profile.max_num_seqs) == ("tiny", "GPU", 6400, 4)
        again = measure(main, url, "--json")
    assert again[0] == 0
    assert json.loads(again[1])["digest"] == profile.digest


@pytest.mark.parametrize(
    ("stub", "message"),
    [
        (Stub(trouble="500", trouble_from=40), "answered 500: EngineCore encountered an issue"),
        (Stub(trouble="hang", trouble_from=40), "sent nothing for 0.5 s"),
        (Stub(trouble="close", trouble_from=40), "closed the connection"),
        (Stub(trouble="stream-error", trouble_from=40), "error in the stream: EngineCore died"),
    ],
    ids=lambda value: value.trouble if isinstance(value, Stub) else "",
)
def test_a_failing_engine_is_one_line_and_the_raw_file_stays(main: Main, stub: Stub, message: str) -> None:
    with serving(stub) as url:
        code, out, err = measure(main, url, "--inactivity-s", "0.5")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err
    kept = len(read_raw("p.raw.jsonl").measurements)
    assert kept > 0
    assert f"{kept} results are kept in p.raw.jsonl" in err
    assert "chimsim calibrate fit p.raw.jsonl" in err
    assert not Path("p.toml").exists()


@pytest.mark.parametrize(
    ("stub", "options", "message"),
    [
        (Stub(models=("tinny",)), (), "does not serve 'tiny'; did you mean 'tinny'?; it serves: tinny"),
        (Stub(metrics=""), (), "has no /metrics of vLLM's; give --num-kv-tokens"),
        (Stub(metrics="foreign"), (), "has no /metrics of vLLM's; give --num-kv-tokens"),
        (Stub(), ("--out", "no/such/p.toml"), "there is no folder no/such"),
        (Stub(trouble="500"), (), "answered 500"),
    ],
)
def test_what_is_wrong_from_the_start_leaves_nothing_behind(
    main: Main, stub: Stub, options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with serving(stub) as url:
        code, out, err = measure(main, url, *options)
    assert (code, out) == (2, "")
    assert message in err
    assert "kept" not in err
    assert list(tmp_path.iterdir()) == []


def test_interrupted_it_says_how_to_go_on(main: Main, monkeypatch: pytest.MonkeyPatch) -> None:
    async def stopped(engine: Engine, header: Any, raw: Path, **_: Any) -> None:
        RawWriter(raw, header).write(measured().measurements[0])
        raise KeyboardInterrupt

    monkeypatch.setattr("chimsim.live.measure.measure", stopped)
    with serving(Stub()) as url:
        code, _, err = measure(main, url)
    assert code == 130
    assert "interrupted; 1 results are kept in p.raw.jsonl" in err


def test_record_writes_what_validate_reads(main: Main) -> None:
    lengths = ("--prompt-tokens", "20-60", "--output-tokens", "5-20")
    with serving(Stub(per_request_metrics=True)) as url:
        sent = ("record", "--url", url, "--model", "tiny", "--requests", "20", "--rps", "60", *lengths)
        code, out, err = main(*sent, "--out", "run.jsonl")
        assert (code, err) == (0, "")
        assert "20 requests completed, 0 failed" in out
        assert main(*sent, "--out", "run.jsonl")[0] == 2
        again = main("record", "--url", url, "--model", "tiny", "--like", "run.jsonl", "--out", "b.jsonl", "--json")
    assert json.loads(again[1])["completed"] == 20
    run, second = read_run("run.jsonl"), read_run("b.jsonl")
    assert len(run.requests) == 20
    assert run.requests["prompt_tokens"].between(20, 60).all()
    assert sorted(zip(run.requests["prompt_tokens"], run.requests["output_tokens"], strict=True)) == sorted(
        zip(second.requests["prompt_tokens"], second.requests["output_tokens"], strict=True)
    )
    assert (run.requests["finished_at"] > run.requests["first_token_at"]).any()
    assert run.requests["admitted_at"].notna().all()
    settings = read_engine_file("run.meta.json")
    assert settings.model == "tiny"
    assert settings.tree["num_kv_tokens"] == 6400
    assert (read_timeseries("run.load.csv")["running"] <= 4).all()


def test_the_same_seed_plans_the_same_requests() -> None:
    one, two, other = (poisson(50, 3.0, (10, 20), (5, 5), seed) for seed in (1, 1, 2))
    assert one == two != other
    assert [r.at_s for r in one] == sorted(r.at_s for r in one)
    assert all(10 <= r.prompt_tokens <= 20 and r.output_tokens == 5 for r in one)


def test_failed_requests_are_recorded_and_too_many_end_the_run(main: Main) -> None:
    with serving(Stub(trouble="500", trouble_from=4)) as url:
        arguments = ("record", "--url", url, "--model", "tiny", "--requests", "30", "--rps", "50")
        code, _, err = main(*arguments, "--prompt-tokens", "20", "--output-tokens", "5", "--out", "run.jsonl")
    assert code == 2
    assert "answered 500" in err
    assert "requests are in run.jsonl" in err
    statuses = [record.status for record in read_records("run.jsonl")]
    assert statuses.count("failed") == MOST_FAILURES - 1
    assert statuses.count("completed") == 3


def test_requests_that_the_engine_would_cut_are_refused(main: Main) -> None:
    with serving(Stub()) as url:
        code, _, err = main(
            "record", "--url", url, "--model", "tiny", "--prompt-tokens", "500", "--output-tokens", "100", "--out", "r"
        )
    assert code == 2
    assert "the longest request has 600 tokens, tiny takes 512" in err


@pytest.mark.parametrize("text", ["x", "5-1", "0", "1-2-3", "-5"])
def test_lengths_that_are_none_are_refused(main: Main, text: str) -> None:
    code, _, err = main(
        "record", "--url", "http://localhost:1", "--model", "m", f"--prompt-tokens={text}", "--out", "r.jsonl"
    )
    assert code == 2
    assert "--prompt-tokens is" in err


def test_requests_keep_their_times_and_order() -> None:
    """Sent at the planned times, not one after the other's end."""

    async def run(url: str) -> list[float]:
        async with Client(url) as client:
            engine = Engine(client, "tiny", (20, 240))
            found = await replay(engine, [Planned(f"r{i}", 0.02 * i, 20, 40) for i in range(6)])
            ordered = sorted(found.records, key=lambda record: record.request_id)
            assert max(found.lags_s) >= 0.0
            return [record.submitted_at for record in ordered]

    with serving(Stub()) as url:
        sent = asyncio.run(run(url))
    assert sent == sorted(sent)
    assert all(at >= 0.02 * i for i, at in enumerate(sent))


def test_a_recorded_run_is_planned_as_it_was(tmp_path: Path) -> None:
    stub = Stub()

    async def run(url: str) -> None:
        async with Client(url) as client:
            records = (await replay(Engine(client, "tiny", (20, 240)), poisson(5, 50.0, (10, 20), (3, 6), 0))).records
        from chimsim.measured import write_records

        write_records(tmp_path / "r.jsonl", records)

    with serving(stub) as url:
        asyncio.run(run(url))
    planned = like(read_run(tmp_path / "r.jsonl"))
    assert planned[0].at_s == 0.0
    assert sorted(len(body["prompt"]) for body in stub.bodies) == sorted(request.prompt_tokens for request in planned)
