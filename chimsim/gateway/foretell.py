"""Predictions for calls as they come: saved models in a process of their own, asked in batches, off the event loop.

What a policy reads and no model is given for is refused at the start. It trains nothing and decides nothing.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from calibration.rows import PredictionInput
from chimsim.errors import ChimsimError
from chimsim.learned import check_models, length_table, rank_table
from policies.interface import Policy, Prediction

Numbers = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Models:
    """Folders of saved models (None: that prediction stays empty) and the models to predict for."""

    models: tuple[str, ...]
    router: str | None = None
    lengths: str | None = None
    rank: str | None = None
    quantile: float | None = None

    def check(self, policy: Policy) -> None:
        """Raises `ChimsimError` where the policy reads what no folder is given for."""
        lengths = self.lengths is not None
        has = {
            "confidence": self.router is not None, "stage_tokens": lengths, "remaining_tokens": lengths,
            "rank": lengths or self.rank is not None,
        }  # fmt: skip
        lengths_cure = "--length-predictor qrf:FOLDER (chimsim predictor train; --record makes a trace for it)"
        cures = {
            "confidence": "--router FOLDER (chimsim router train, from a labelled trace as chimsim collect makes)",
            "rank": "--rank-predictor FOLDER or --length-predictor qrf:FOLDER (chimsim predictor train)",
        }
        lacking = [name for name in sorted(policy.reads) if not has[name]]
        if lacking:
            wanted = dict.fromkeys(cures.get(name, lengths_cure) for name in lacking)
            raise ChimsimError(
                f"policy {type(policy).__name__} reads the predictions {', '.join(lacking)}: "
                f"give {' and '.join(wanted)}"
            )


@dataclass(frozen=True, slots=True)
class Question:
    """A call to foretell; ``task`` is the text for the router, None where the workflow's confidence is known."""

    call: PredictionInput
    task: str | None


@dataclass(frozen=True, slots=True)
class Foretold:
    """The answer; ``router_s`` and ``predictor_s`` are the call's share of its batch's computing time."""

    prediction: Prediction
    router_s: float = 0.0
    predictor_s: float = 0.0


class Foreteller:
    """Asks the models in a process of its own, which is started anew once if it dies under a batch.

    A batch goes off when it has ``max_batch`` calls or ``timeout_s`` after its first one, and not before the last
    one is back. Use it as an asynchronous context manager. Raises the packages' errors for folders that cannot be
    used, on entering.
    """

    def __init__(self, models: Models, *, max_batch: int = 32, timeout_s: float = 0.002) -> None:
        self._models = models
        self._max_batch = max_batch
        self._timeout_s = timeout_s
        self._idle = models.router is None and models.lengths is None and models.rank is None
        self._pool: ProcessPoolExecutor | None = None
        self._asked: asyncio.Queue[tuple[Question, asyncio.Future[Foretold]]] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Foreteller:
        if not self._idle:
            await self._start()
            self._task = asyncio.get_running_loop().create_task(self._serve())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    async def ask(self, question: Question) -> Foretold:
        """The prediction, whenever its batch is back. Raises `ChimsimError` if the process fails twice."""
        if self._idle:
            return Foretold(Prediction({}, {}, {}, {}))
        future: asyncio.Future[Foretold] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait((question, future))
        return await future

    async def _start(self) -> None:
        # Spawned: a fork would take the loop's sockets and threads along.
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_stay)
        try:
            await asyncio.get_running_loop().run_in_executor(pool, _load, self._models)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        self._pool = pool

    async def _serve(self) -> None:
        while True:
            batch = await self._batch()
            if not await self._settle(batch):
                # One of them is at fault, and the others are not to suffer for it.
                for each in batch:
                    await self._settle([each])

    async def _settle(self, batch: list[tuple[Question, asyncio.Future[Foretold]]]) -> bool:
        """Give every call of the batch its answer or its error; false where a try for each alone may help."""
        try:
            answers = await self._compute([question for question, _ in batch])
        except Exception as error:
            if len(batch) > 1 and not isinstance(error, BrokenProcessPool):
                return False
            for _, future in batch:
                if not future.done():
                    future.set_exception(ChimsimError(f"the predictors failed: {error}"))
            return True
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)
        return True

    async def _batch(self) -> list[tuple[Question, asyncio.Future[Foretold]]]:
        batch = [await self._asked.get()]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._timeout_s):
                while len(batch) < self._max_batch:
                    batch.append(await self._asked.get())
        return batch

    async def _compute(self, questions: list[Question]) -> list[Foretold]:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, _answer, questions)
        except BrokenProcessPool:
            await self._start()
            return await loop.run_in_executor(self._pool, _answer, questions)


@dataclass
class _Loaded:
    """The models in the process that asks them."""

    models: Models = field(default_factory=lambda: Models(()))
    router: Any = None
    lengths: Any = None
    rank: Any = None


_LOADED = _Loaded()


def _stay() -> None:
    """In the models' process: signals to the whole group are the gateway's to handle, and without it there is an end.

    A pool's process holds both ends of its pipes, so that it would never notice.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _load(models: Models) -> None:
    global _LOADED
    loaded = _Loaded(models)
    if models.router is not None:
        from calibration.router_model import load_router

        loaded.router, _ = load_router(models.router)
        check_models(models.router, loaded.router.models, models.models)
    if models.lengths is not None:
        from calibration.length_model import load_length

        loaded.lengths = load_length(models.lengths)
        check_models(models.lengths, loaded.lengths.models, models.models)
    if models.rank is not None:
        from calibration.rank_model import load_rank

        loaded.rank = load_rank(models.rank)
        check_models(models.rank, loaded.rank.models, models.models)
    _LOADED = loaded


def _answer(questions: Sequence[Question]) -> list[Foretold]:
    models = _LOADED.models.models
    calls = [question.call for question in questions]
    started = perf_counter()
    confidences = _confidences(questions)
    routed = perf_counter()
    stage: list[Numbers] = [{}] * len(calls)
    remaining: list[Numbers] = stage
    if _LOADED.lengths is not None:
        table = length_table(_LOADED.lengths, calls, _LOADED.models.quantile)
        stage, remaining = (_by_model(table[:, :, part]) for part in (0, 1))
    rank = stage
    if _LOADED.rank is not None:
        rank = _by_model(rank_table(_LOADED.rank, calls, models))
    predicted_s = (perf_counter() - routed) / len(calls)
    asked = sum(question.task is not None for question in questions) if _LOADED.router is not None else 0
    return [
        Foretold(
            Prediction(*parts), (routed - started) / asked if asked and question.task is not None else 0.0, predicted_s
        )
        for question, *parts in zip(questions, confidences, stage, remaining, rank, strict=True)
    ]


def _confidences(questions: Sequence[Question]) -> list[Numbers]:
    made: list[Numbers] = [{}] * len(questions)
    asked = [at for at, question in enumerate(questions) if question.task is not None]
    if _LOADED.router is not None and asked:
        places = [_LOADED.router.models.index(model) for model in _LOADED.models.models]
        table = _LOADED.router.predict_proba([questions[at].task for at in asked])[:, places]
        for at, row in zip(asked, _by_model(table), strict=True):
            made[at] = row
    return made


def _by_model(table: Any) -> list[Numbers]:
    """Rows of numbers, one a model, as mappings."""
    return [dict(zip(_LOADED.models.models, row, strict=True)) for row in table.tolist()]
