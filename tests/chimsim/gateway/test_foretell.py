"""Predictions from a process of their own: right, in batches, and there again when the process is killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from calibration.length_model import load_length, save_length, train_length
from calibration.router_model import learning_set, load_router, save_router, train_router
from calibration.rows import PredictionInput
from calibration.saved import ModelError
from chimsim.errors import ChimsimError
from chimsim.gateway import core, server, upstreams
from chimsim.gateway.foretell import Foreteller, Models, Question, _load
from chimsim.learned import length_table
from policies import load_policy
from policies.chimera import Chimera
from policies.interface import Prediction
from tests.calibration.learnable import MODELS, TINY, learnable
from tests.chimsim.gateway.gateways import CHAT, chat, served, until
from tests.chimsim.gateway.rude_engine import RudeEngine, rude

T = TypeVar("T")
LONG, SHORT = "Find the proof proof integral integral of 7 things.", "Find the sum sum list list of 7 things."


def call(prompt: str, stage: int = 0) -> PredictionInput:
    return PredictionInput(f"w-{prompt}", "load0", stage, "plan", MODELS, 70, 10, 60, prompt, ())


@dataclass
class Live:
    """A foreteller in a loop that stays, and its models."""

    runner: asyncio.Runner
    foreteller: Foreteller
    models: Models
    batches: list[int]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    @property
    def pid(self) -> int:
        assert self.foreteller._pool is not None
        (pid,) = self.foreteller._pool._processes
        return pid


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A router and a length model that learned from a small trace."""
    root = tmp_path_factory.mktemp("models")
    workflows = []
    for number, workflow in enumerate(learnable(60).workflows):
        runs = {model: replace(workflow.runs[model], solved=number % (2 + at) == 0) for at, model in enumerate(MODELS)}
        workflows.append(replace(workflow, runs=runs))
    record: dict[str, Any] = {"trained_on": [], "held_out": []}
    common: dict[str, Any] = {"training": record, "scores": {}, "cost_ms": {"per_call": 1.0}, "made_by": "test"}
    save_router(root / "router", train_router(learning_set(workflows, MODELS), backend="tfidf"), **common)
    save_length(root / "lengths", train_length(workflows, MODELS, TINY), **common)
    return str(root / "router"), str(root / "lengths")


@pytest.fixture(scope="module")
def live(folders: tuple[str, str]) -> Iterator[Live]:
    models = Models(MODELS, router=folders[0], lengths=folders[1], quantile=0.5)
    with asyncio.Runner() as runner:
        foreteller = Foreteller(models, max_batch=8, timeout_s=0.05)
        runner.run(foreteller.__aenter__())
        batches: list[int] = []
        compute = foreteller._compute

        async def counted(questions: list[Question]) -> Any:
            batches.append(len(questions))
            return await compute(questions)

        foreteller._compute = counted  # type: ignore[method-assign]
        yield Live(runner, foreteller, models, batches)
        runner.run(foreteller.__aexit__())


def ask_all(live: Live, questions: list[Question]) -> list[Any]:
    async def run() -> list[Any]:
        return await asyncio.gather(*map(live.foreteller.ask, questions), return_exceptions=True)

    return live.run(run())


def test_it_says_what_the_models_say(live: Live, folders: tuple[str, str]) -> None:
    texts = [LONG, SHORT, LONG]
    answers = ask_all(live, [Question(call(text), text) for text in texts])
    router, _ = load_router(folders[0])
    confidences = router.predict_proba(texts)
    lengths = length_table(load_length(folders[1]), [call(text) for text in texts], 0.5)
    for at, answer in enumerate(answers):
        said = answer.prediction
        for number, model in enumerate(MODELS):
            assert said.confidence[model] == pytest.approx(confidences[at][router.models.index(model)])
            assert said.stage_tokens[model] == pytest.approx(lengths[at, number, 0])
            assert said.remaining_tokens[model] == pytest.approx(lengths[at, number, 1])
        # without a rank model of its own the length is the rank
        assert said.rank == said.stage_tokens
        assert answer.router_s > 0
        assert answer.predictor_s > 0
    assert answers[0].prediction.stage_tokens["small"] > answers[1].prediction.stage_tokens["small"]


def test_calls_that_come_together_are_asked_together_and_no_more_than_allowed(live: Live) -> None:
    live.batches.clear()
    answers = ask_all(live, [Question(call(SHORT), None) for _ in range(20)])
    assert sum(live.batches) == len(answers) == 20
    assert max(live.batches) == 8
    assert len(live.batches) <= 4
    # the router is asked only where the workflow's confidence is not known
    assert all(answer.prediction.confidence == {} and answer.router_s == 0 for answer in answers)


def test_one_call_that_cannot_be_foretold_does_not_spoil_the_others(live: Live) -> None:
    bad = Question(None, 7)  # type: ignore[arg-type]
    first, failed, last = ask_all(live, [Question(call(LONG), LONG), bad, Question(call(SHORT), SHORT)])
    assert first.prediction.stage_tokens["small"] > last.prediction.stage_tokens["small"]
    assert isinstance(failed, ChimsimError)
    assert str(failed).startswith("the predictors failed: ")


def test_signals_to_the_whole_group_do_not_end_it(live: Live) -> None:
    before = live.pid
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(before, number)
    (answer,) = ask_all(live, [Question(call(LONG), None)])
    assert answer.prediction.stage_tokens
    assert live.pid == before


def test_a_process_killed_under_a_batch_is_started_anew_and_the_answers_come(live: Live) -> None:
    before = live.pid

    async def run() -> list[Any]:
        # stopped, so that the batch is with it when it dies
        os.kill(before, signal.SIGSTOP)
        live.batches.clear()
        answers = asyncio.gather(*(live.foreteller.ask(Question(call(text), text)) for text in [LONG] * 12))
        await until(lambda: bool(live.batches))
        await asyncio.sleep(0.05)
        os.kill(before, signal.SIGKILL)
        return list(await answers)

    answers = live.run(run())
    assert len({answer.prediction.stage_tokens["small"] for answer in answers}) == 1
    assert len(answers) == 12
    assert live.pid != before


@pytest.fixture
def shared(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways take the foreteller that is there."""

    @asynccontextmanager
    async def same(*_: Any, **__: Any) -> AsyncIterator[Foreteller]:
        yield live.foreteller

    monkeypatch.setattr(server, "Foreteller", same)


def test_a_policy_that_reads_lengths_serves_the_shortest_first(live: Live, shared: None) -> None:
    async def run() -> None:
        engines = RudeEngine("large", gate=asyncio.Event()), RudeEngine("small")
        async with rude(*engines):
            urls = [(engine.model, engine.url) for engine in engines]
            async with served(urls, load_policy("sjf"), models=live.models, slots=1) as world:
                first = asyncio.ensure_future(world.post(CHAT, chat(model="large")))
                await until(lambda: engines[0].inside == 1)
                texts = [LONG, SHORT, LONG.replace("proof", "sum")]
                calls = []
                for text in texts:
                    body = chat(model="large", messages=[{"role": "user", "content": text}])
                    calls.append(asyncio.ensure_future(world.post(CHAT, body)))
                await until(lambda: world.gateway._upstreams._dispatcher.waiting("large/0") == 3)
                assert engines[0].gate is not None
                engines[0].gate.set()
                answers = await asyncio.gather(first, *calls)
                assert [status for status, _, _ in answers] == [200] * 4
                said = [int(headers["x-chimsim-predicted-stage-tokens"]) for _, _, headers in answers[1:]]
                order = [body["messages"][0]["content"] for body in engines[0].bodies[1:]]
                assert order == [text for _, text in sorted(zip(said, texts, strict=True))]
                assert len(set(said)) == 3
                text = (await world.get("/metrics"))[1]
                assert "chimsim_predictor_seconds_count 4.0" in text
                assert "chimsim_router_seconds_count 4.0" in text

    live.run(run())


def test_chimeras_count_of_what_is_in_flight_comes_back_to_zero_whatever_happens(
    live: Live, shared: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core, "BACKOFF_S", 0.005)
    monkeypatch.setattr(upstreams, "PROBE_S", 0.02)

    async def run() -> None:
        engines = RudeEngine("large", gate=asyncio.Event()), RudeEngine("small", fault="500", bad=3)
        policy = load_policy("chimera")
        assert isinstance(policy, Chimera)
        names = "large/0", "small/1"
        async with rude(*engines):
            urls = [(engine.model, engine.url) for engine in engines]
            async with served(urls, policy, models=live.models, slots=1) as world:
                calls = [
                    asyncio.ensure_future(
                        world.post(CHAT, chat(model=model, metadata={"workflow_id": f"w{number % 3}"}))
                    )
                    for number, model in enumerate(["large", "small", "auto"] * 3)
                ]
                await until(
                    lambda: engines[0].inside == 1 and world.gateway._upstreams._dispatcher.waiting(names[0]) > 1
                )
                assert policy._activity.tokens(names[0]) > 0
                calls[0].cancel()  # the one inside, or one that waits
                calls[3].cancel()
                assert engines[0].gate is not None
                engines[0].gate.set()
                answers = await asyncio.gather(*calls, return_exceptions=True)
                assert [answer[0] for answer in answers if not isinstance(answer, BaseException)] == [200] * 7
            # at the end of the gateway its workflows end too
            assert [policy._activity.tokens(name) for name in names] == [0.0, 0.0]

    live.run(run())


def test_folders_that_cannot_be_used_are_one_error(folders: tuple[str, str], tmp_path: Path) -> None:
    # `chimsim serve` is tested with the process between
    with pytest.raises(ModelError, match=f"{tmp_path}"):
        _load(Models(MODELS, lengths=str(tmp_path)))
    with pytest.raises(ChimsimError, match=r"lengths: it was not trained for larger; did you mean 'large'\?"):
        _load(Models(("larger", "small"), lengths=folders[1]))


def test_without_models_there_is_no_process_and_no_wait() -> None:
    async def run() -> None:
        async with Foreteller(Models(MODELS)) as foreteller:
            assert (await foreteller.ask(Question(call(LONG), LONG))).prediction == Prediction({}, {}, {}, {})
            assert foreteller._pool is None

    asyncio.run(run())


def test_the_process_ends_when_the_gateway_is_killed() -> None:
    code = (
        "import multiprocessing, os, signal; from concurrent.futures import ProcessPoolExecutor\n"
        "from chimsim.gateway.foretell import _stay\n"
        "if __name__ == '__main__':\n"
        "    pool = ProcessPoolExecutor(1, multiprocessing.get_context('spawn'), _stay)\n"
        "    print(pool.submit(os.getpid).result(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    # Its standard output is the child's too: this waits for the end of both.
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.strip().isdigit()
