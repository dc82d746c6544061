"""Every kind of file that users hand in: valid ones of it, and the command that reads it."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from calibration.datasheets import read_config
from calibration.length_model import save_length, train_length
from calibration.raw_measurements import Measurement, RawWriter, Skipped
from calibration.rows import split
from calibration.saved import training_record
from chimsim.config import load_cluster
from chimsim.live.endpoints import command_of
from chimsim.live.questions import read_questions
from chimsim.live.roles import load_roles
from chimsim.reproduce.experiment import read_experiment
from chimsim.spec import spec_from
from chimsim.sweeps import run_sweep
from tests.calibration.learnable import TINY, learnable
from tests.calibration.test_measured_fit import HEADER
from tests.chimsim import measured_runs
from tests.chimsim.fuzzed import Kind, command
from tests.chimsim.measured_runs import META, bench_result, made_run
from tests.chimsim.small import small_trace
from tests.mutations import Dump, csv_bytes, json_bytes, json_lines, toml_bytes
from traces import Trace, TraceError, workflow_from_dict, write_trace
from traces.files import load_trace
from traces.parameters import load_parameters
from traces.schema import to_dict

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "tests" / "traces" / "files"
Read = Callable[[Random, Path, Path], None]


def kinds(home: Path) -> dict[str, Kind]:
    """All kinds by name; ``home`` is a folder for what they have in common: a trace, a sweep, a saved model."""
    trace = home / "small.jsonl"
    write_trace(small_trace(12), trace)
    rows = [[to_dict(workflow) for workflow in small_trace(count).workflows] for count in (1, 6)]
    sweep = {"trace": str(trace), "combo": "qwen1.5b+7b", "rps": 20, "slots": 4}
    done = home / "done"
    run_sweep(spec_from(sweep | {"policy": "fcfs,chimera", "tau": "0,1", "seeds": 2}), done)
    cells = sorted((done / "cells").iterdir())
    _train(home / "lengths", home / "learnable.jsonl")
    both = sweep | {"combo": ["qwen1.5b+7b", "qwen7b"]}
    specs = [
        {**both, "policy": ["fcfs", "chimera", "ltr"], "tau": [0, 0.5, float("inf")], "seeds": 2, "rps": [8, 12.5],
         "knobs": {"aging_tokens_per_s": [0, 5]}, "goodput": {"ttft": "500ms", "latency": "60s"}, "workflows": 5,
         "fail": ["qwen7b@120s-180s"], "slow": ["qwen7b=1.5x@10s-"]},
        {**both, "policy": {"stjf": {}, "mine": {"policy": "chimera", "router": "none", "length_error": 0.2}},
         "engines": {"qwen7b": 2}, "warmup": 2, "burstiness": [0.5, 1], "router": ["oracle", "noisy:0.6"],
         "part": "1/2", "queue": "engine", "look_ahead": 3, "oversize": "clip", "arrivals": "recorded"},
    ]  # fmt: skip
    experiments = [tomllib.loads(path.read_text()) for path in sorted((ROOT / "experiments").glob("*.toml"))]
    engines = [
        {"name": "mixed", "engine": [
            {"model": "qwen1.5b", "count": 2, "max_batch_size": 8, "max_num_seqs": 64, "prefix_caching": False},
            {"model": "mine", "profile": "qwen7b", "gpu": "RTX A6000", "num_kv_tokens": 60_000, "name": "large",
             "max_num_batched_tokens": 2048, "max_model_len": 8192, "tensor_parallel": 2, "scheduling": "priority"}]},
        {"engine": [{"model": "Qwen2.5-1.5B"}, {"model": "Qwen2.5-7B"}]},
    ]  # fmt: skip
    live = [
        {"engine": [
            {"model": "qwen1.5b", "url": ["http://127.0.0.1:8001", "http://127.0.0.1:8002"], "count": 2,
             "served_model": "Qwen/Qwen2.5-1.5B-Instruct", "api_key_env": "KEY"},
            {"model": "qwen7b", "url": "http://localhost:8003", "launch": "serve {model} --port {port}"}]},
        tomllib.loads((ROOT / "examples" / "rehearsal.toml").read_text()),
    ]  # fmt: skip
    profiles = [tomllib.loads(path.read_text()) for path in sorted((ROOT / "calibration" / "profiles").glob("*.toml"))]
    questions = [
        [*_lines((ROOT / "examples" / "questions.jsonl").read_text()),
         {"kind": "code", "question": "Add.", "tests": [{"input": "1 2", "output": "3"}], "workload": "sums"}],
    ]  # fmt: skip
    parameters = [
        tomllib.loads((ROOT / "examples" / "fan-out.toml").read_text()),
        tomllib.loads((ROOT / "traces" / "data" / "maths.toml").read_text()),
    ]
    found = {
        "trace.jsonl": Kind("t.jsonl", rows, json_lines, _trace),
        "trace.jsonl.gz": Kind("t.jsonl.gz", rows, _gzipped, _trace),
        "trace.parquet": Kind("t.parquet", rows, _parquet, _trace),
        "cluster.toml": Kind("c.toml", engines, toml_bytes, _cluster(trace)),
        "live.toml": Kind("l.toml", live, toml_bytes, _live),
        "spec.toml": Kind("s.toml", specs, toml_bytes, lambda draw, path, out: command("sweep", path, "--dry-run")),
        "experiment.toml": Kind("e.toml", experiments, toml_bytes, _experiment),
        "profile.toml": Kind("p.toml", profiles, toml_bytes, lambda draw, path, out: command("profiles", path)),
        "questions.jsonl": Kind("q.jsonl", questions, json_lines, lambda draw, path, out: _none(read_questions(path))),
        "prompts.toml": Kind("r.toml", [_roles()], toml_bytes, lambda draw, path, out: _none(load_roles(path))),
        "parameters.toml": Kind("g.toml", parameters, toml_bytes, lambda draw, path, out: _none(load_parameters(path))),
        "model manifest": Kind("manifest.json", [_json(home / "lengths" / "manifest.json")], json_bytes,
                               _model(home / "lengths", home / "learnable.jsonl")),
        "results manifest": Kind("m/manifest.json", [_json(done / "manifest.json")], json_bytes, _results(done, sweep)),
        "cell summary": Kind("summary.json", [_json(cells[0] / "summary.json")], json_bytes, _cell(done, cells[0])),
        "cell table": Kind("workflows.parquet", [(cells[0] / "workflows.parquet").read_bytes()], _as_it_is,
                           _cell(done, cells[0])),
    }  # fmt: skip
    found |= _measured(home)
    for name, (file, dump) in READERS.items():
        found[f"import {name}"] = Kind(file, _readable(name), dump, _import(name.split()[0]))
    return found


def _measured(home: Path) -> dict[str, Kind]:
    """What `chimsim validate` and `chimsim calibrate` read."""
    requests = made_run(count=6)
    own, bench = home / "own.jsonl", home / "bench.jsonl"
    measured_runs.own(requests, own)
    measured_runs.llmservingsim(requests, bench)
    writer = RawWriter(home / "raw.jsonl", HEADER)
    for batch in (1, 2, 4, 8):
        writer.write(Measurement(f"{batch} decodes", 1, "decode", batch, 300.5 * batch, 0, 0, 48.0, 1.25))
    writer.write(Measurement("a prompt", 1, "prefill", 0, 0.0, 1, 512, 0.0, 0.05))
    writer.write(Skipped("4 decodes after 8192", 0, "does not fit"))
    samples = [["time_s", "running", "waiting", "kv_used_fraction"], ["0.0", "1", "0", "0.1"], ["1.0", "4", "2", "0.5"]]
    card = {"num_hidden_layers": 28, "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2,
            "intermediate_size": 8960, "vocab_size": 151936, "max_position_embeddings": 32768, "head_dim": 128,
            "tie_word_embeddings": True}  # fmt: skip

    def validate(*more: str) -> Read:
        """The command with ``FILE`` among its arguments."""
        return lambda draw, path, out: command(
            "validate", "--profile", "qwen1.5b", *(path if word == "FILE" else word for word in more)
        )

    good = ("--measured", str(own))
    return {
        "measured requests": Kind("r.jsonl", [_lines(own.read_text()), _lines(bench.read_text())], json_lines,
                                  validate("--measured", "FILE")),
        "measured vllm bench": Kind("b.json", [bench_result(requests, latencies=True)], json_bytes,
                                    validate("--measured", "FILE")),
        "engine settings": Kind("meta.json", [META], json_bytes, validate(*good, "--engine-settings", "FILE")),
        "timeseries.csv": Kind("t.csv", [samples], csv_bytes, validate(*good, "--timeseries", "FILE")),
        "raw measurements": Kind("raw.jsonl", [_lines((home / "raw.jsonl").read_text())], json_lines,
                                 lambda draw, path, out: command("calibrate", "fit", path, "--out", out / "p.toml")),
        "model config.json": Kind("config.json", [card], json_bytes,
                                  lambda draw, path, out: _none(read_config(path, "m"))),
    }  # fmt: skip


READERS: dict[str, tuple[str, Dump]] = {
    "mooncake": ("m.jsonl", json_lines),
    "agentic_mooncake": ("a.jsonl", json_lines),
    "azure": ("a.csv", csv_bytes),
    "burstgpt": ("b.csv", csv_bytes),
    "llmservingsim": ("l.jsonl", json_lines),
    "otel": ("o.jsonl", json_lines),
    "otel export": ("o.json", json_bytes),
    "servegen": ("s.csv", csv_bytes),
    "vllm_bench": ("v.json", json_bytes),
}
"""By format (and which of its forms) a file's name and how its documents are written."""

_SAMPLES = {
    "mooncake": ("mooncake-sessions.jsonl",), "agentic_mooncake": ("agentic-1.jsonl", "agentic-2.jsonl"),
    "azure": ("azure-2024.csv",), "burstgpt": ("burstgpt.csv",), "llmservingsim": ("llmservingsim.jsonl",),
    "otel": ("otel-spans.jsonl",), "otel export": ("otel-fan-out.json",), "servegen": ("servegen.csv",),
    "vllm_bench": ("vllm-bench.json",),
}  # fmt: skip


def _readable(name: str) -> list[Any]:
    found: list[Any] = []
    for file in _SAMPLES[name]:
        text = (FILES / file).read_text()
        if file.endswith(".csv"):
            found.append([line.split(",") for line in text.splitlines()])
        else:
            found.append(_lines(text) if file.endswith(".jsonl") else json.loads(text))
    return found


def _lines(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def _json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def _roles() -> Any:
    return tomllib.loads((ROOT / "chimsim" / "live" / "roles.toml").read_text())


def _as_it_is(draw: Random, data: Any) -> bytes:
    return data if isinstance(data, bytes) else json_bytes(draw, data)


def _none(value: object) -> None:
    """For readers whose result nobody needs."""


def _train(folder: Path, path: Path) -> None:
    """A small length model, of a trace that is written to the path."""
    names = {"small": "Qwen2.5-1.5B", "large": "Qwen2.5-7B"}
    rows = [to_dict(workflow) for workflow in learnable(60).workflows]
    renamed = [row | {"runs": {names[model]: run for model, run in row["runs"].items()}} for row in rows]
    path.write_bytes(json_lines(Random(0), renamed))
    trace, models = load_trace(path), tuple(names.values())
    parts = split(trace, 0.3, 1)
    save_length(
        folder, train_length(parts.train, models, TINY), training=training_record(trace, parts, models, 1, 0.3),
        scores={}, cost_ms={"per_call": 2.5}, made_by="test",
    )  # fmt: skip


def _gzipped(draw: Random, tree: Any) -> bytes:
    data = gzip.compress(json_lines(draw, tree), mtime=0)
    return data + draw.choice((b"", b"", b"\0" * 7, data, b"\x1f\x8b"))


def _parquet(draw: Random, tree: Any) -> bytes:
    """As Parquet, its columns text, numbers or whatever Arrow makes of the values; sealed, where it is a trace."""
    if draw.random() < 0.3 and (data := _sealed(tree)) is not None:
        return data
    rows = [row if isinstance(row, dict) else {"x": row} for row in (tree if isinstance(tree, list) else [tree])]
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        nested = name in ("runs", "confidence", "meta") and draw.random() < 0.5
        texts = [None if value is None else json_bytes(draw, value).decode(errors="replace") for value in values]
        try:
            columns[name] = pa.array(texts if nested else values)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError, RecursionError):
            columns[name] = pa.array(texts)
    sink = io.BytesIO()
    try:
        pq.write_table(pa.table(columns), sink, compression=draw.choice(("zstd", "none", "snappy")))
    except (pa.ArrowException, UnicodeEncodeError):
        return b"PAR1"
    return sink.getvalue()


def _sealed(tree: Any) -> bytes | None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "t.parquet")
        try:
            rows = tree if isinstance(tree, list) else [tree]
            write_trace(Trace("t", tuple(workflow_from_dict(row, "t") for row in rows)), path)
        except TraceError:
            return None
        return path.read_bytes()


def _trace(draw: Random, path: Path, out: Path) -> None:
    """What the trace holds, or a run of it."""
    if draw.random() < 0.5:
        command("trace", "describe", path)
    else:
        policy = draw.choice(("fcfs", "chimera", "stjf"))
        arrivals = draw.choice((("--rps", "8"), ()))
        oversize = draw.choice(("reject", "clip", "error"))
        command("run", "--trace", path, "--combo", "qwen1.5b+7b", "--policy", policy, *arrivals, "--oversize", oversize)


def _import(format: str) -> Read:
    def read(draw: Random, path: Path, out: Path) -> None:
        model = draw.choice((("--model", "Qwen2.5-7B"), ()))
        command("trace", "import", path, "--format", format, *model, "-o", out / "made.jsonl")
        load_trace(out / "made.jsonl")

    return read


def _cluster(trace: Path) -> Read:
    def read(draw: Random, path: Path, out: Path) -> None:
        more = ("sweep", "--dry-run") if draw.random() < 0.7 else ("run", "--workflows", "4")
        command(*more, "--trace", trace, "--cluster", path, "--policy", "fcfs", "--rps", "20", "--oversize", "reject")

    return read


def _live(draw: Random, path: Path, out: Path) -> None:
    for spec, address in load_cluster(path).addressed():
        if address.launch:
            command_of(spec, address)


def _experiment(draw: Random, path: Path, out: Path) -> None:
    """Read it, then each of its sweeps."""
    experiment = read_experiment(path)
    for more in ({}, experiment.quick, experiment.choose):
        spec_from({}, {**experiment.keys, **more}, source=str(path))


def _model(saved: Path, trace: Path) -> Read:
    def read(draw: Random, path: Path, out: Path) -> None:
        for name in ("workflows.json", "model.joblib"):
            shutil.copyfile(saved / name, out / name)
        if draw.random() < 0.5:
            command("predictor", "eval", "--trace", trace, "--model-dir", out)
        else:
            more = ("--length-predictor", f"qrf:{out}", "--split", draw.choice(("all", "test")))
            command("sweep", "--dry-run", "--trace", trace, "--combo", "qwen7b", "--policy", "sjf", "--rps", "8", *more)

    return read


def _results(done: Path, sweep: dict[str, Any]) -> Read:
    def read(draw: Random, path: Path, out: Path) -> None:
        folder = path.parent
        (folder / "cells").symlink_to(done / "cells")
        kind = draw.randrange(5)
        if kind == 0:
            command("frontier", folder, "--json")
        elif kind == 1:
            command("compare", done, folder)
        elif kind == 2:
            command("compare", "fcfs", "chimera", "--in", folder)
        elif kind == 3:
            command("explain", folder)
        else:
            command("sweep", path, "--dry-run")

    return read


def _cell(done: Path, cell: Path) -> Read:
    def read(draw: Random, path: Path, out: Path) -> None:
        folder = out / "copy"
        shutil.copytree(done, folder, ignore=shutil.ignore_patterns("itl.parquet", "engines.parquet"))
        shutil.copyfile(path, folder / "cells" / cell.name / path.name)
        one = folder / "cells" / cell.name
        command(*draw.choice((("frontier", folder), ("compare", done, folder), ("explain", one))))

    return read
