"""Runs the agents' workflows of every question on every model and judges the answers: the work of `chimsim collect`.

Each engine has so many workflows at a time, and the engines of a model share its questions. Finished runs go to a
journal; the trace is made of it at the end.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from chimsim.config import Cluster
from chimsim.errors import ChimsimError
from chimsim.live.client import Chat, Client, EngineError
from chimsim.live.driver import DOWN_S
from chimsim.live.grading import Grader
from chimsim.live.journal import Journal
from chimsim.live.measure import together
from chimsim.live.questions import Question
from chimsim.live.roles import Role, Roles
from chimsim.replay import BACKOFF_S, PROBE_S, RETRIES
from chimsim.results import digest
from traces import Run, Stage, Trace, Workflow
from traces.readers.call import in_common
from traces.schema import SharedPrefix

A = TypeVar("A")
T = TypeVar("T")

PAUSES_S = tuple(BACKOFF_S * 2.0**tried for tried in range(RETRIES))
"""Before a call is sent again to an engine that is busy or ill."""
BACK_S = DOWN_S
"""How long an engine that does not answer may take to come back."""
MOST_LOSSES = 3
"""So often may an engine be lost in the middle of one question before that question is taken for the cause."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn, alike for all stages."""

    temperature: float = 0.0
    seed: int = 0


@dataclass
class Server:
    """A running engine of a model. ``prefixes``: by system message, how many tokens all its prompts begin with."""

    name: str
    client: Client
    served_model: str
    max_model_len: int | None
    prefixes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failure:
    """A workflow that was given up on a model, and why."""

    question: str
    model: str
    reason: str


Hear = Callable[[Workflow | Failure], None]


def settings_of(
    questions: Sequence[Question], roles: Roles, cluster: Cluster, sampling: Sampling, *, allow_code: bool
) -> dict[str, Any]:
    """All that decides what is in the trace; where the engines are does not."""
    return {
        "questions_sha256": digest([asdict(question) for question in questions]),
        "prompts_sha256": digest(roles.texts()),
        "models": {e.model: e.address.served_model for e in cluster.engines if e.address is not None},
        "temperature": sampling.temperature,
        "seed": sampling.seed,
        "max_tokens": {kind: [role.max_tokens for role in stages] for kind, stages in roles.of.items()},
        "allow_code": allow_code,
    }


@asynccontextmanager
async def servers(cluster: Cluster, inactivity_s: float) -> AsyncIterator[dict[str, list[Server]]]:
    """The engines of each model, answering. Raises `ChimsimError` or `EngineError` for one that does not."""
    async with AsyncExitStack() as stack:
        found: dict[str, list[Server]] = {model: [] for model in cluster.models}
        for spec, address in cluster.addressed():
            client = await stack.enter_async_context(
                Client(address.url, api_key=address.api_key, inactivity_s=inactivity_s)
            )
            served = await client.served(address.served_model)
            found[spec.model].append(Server(spec.name, client, address.served_model, served.max_model_len))
        yield found


def check_lengths(roles: Roles, found: Mapping[str, Sequence[Server]], kinds: Sequence[str]) -> None:
    """Raises `ChimsimError` if the answers alone may fill a context: long workflows would be missing in the trace."""
    for kind, stages in roles.of.items():
        needed = sum(role.max_tokens for role in stages)
        for server in (each for engines in found.values() for each in engines):
            if kind in kinds and server.max_model_len is not None and needed >= server.max_model_len:
                raise ChimsimError(
                    f"engine {server.name} has a context of {server.max_model_len:,} tokens, and the answers of a "
                    f"{kind} workflow may have {needed:,}; give a smaller --max-tokens"
                )


async def collect(
    questions: Sequence[Question],
    found: Mapping[str, Sequence[Server]],
    roles: Roles,
    sampling: Sampling,
    grader: Grader,
    journal: Journal,
    *,
    concurrency: int,
    hear: Hear,
) -> None:
    """Run what the journal does not hold yet; ``hear`` gets every run that is finished or given up.

    Raises `ChimsimError` if the last engine of a model does not come back.
    """

    async def one(server: Server, question: Question, model: str) -> None:
        stages = await run_workflow(server, question, roles, sampling)
        outputs = [stage.output or "" for stage in stages]
        verdict = await grader.grade(question, outputs)
        meta = {"kind": question.kind, "verdict": {model: verdict.why}}
        runs = {model: Run(tuple(stages), verdict.solved)}
        workflow = Workflow(question.id, question.workload, runs, prompt=question.question, meta=meta)
        journal.add(workflow)
        hear(workflow)

    async def of_model(model: str, engines: Sequence[Server]) -> None:
        queue: asyncio.Queue[Question] = asyncio.Queue()
        for question in questions:
            if (question.id, model) not in journal.runs:
                queue.put_nowait(question)
        losses = Counter[str]()

        async def work(server: Server) -> EngineError:
            """Until it is cancelled, or its engine is lost."""
            while True:
                question = await queue.get()
                lost: EngineError | None = None
                try:
                    await one(server, question, model)
                except EngineError as error:
                    if not error.final and not await server.client.healthy():
                        lost = error
                        losses[question.id] += 1
                    if lost is not None and losses[question.id] < MOST_LOSSES:
                        queue.put_nowait(question)
                    else:
                        hear(Failure(question.id, model, str(error)))
                finally:
                    queue.task_done()
                if lost is not None and not await _comes_back(server):
                    return lost

        workers = [asyncio.ensure_future(work(server)) for server in engines for _ in range(concurrency)]
        lost, done = asyncio.gather(*workers), asyncio.ensure_future(queue.join())
        try:
            await asyncio.wait((lost, done), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise ChimsimError(f"no engine of {model} answers any more: {lost.result()[-1]}")
        finally:
            done.cancel()
            for worker in workers:
                worker.cancel()
            await asyncio.gather(lost, done, *workers, return_exceptions=True)

    await together([of_model(model, engines) for model, engines in found.items()])


async def run_workflow(server: Server, question: Question, roles: Roles, sampling: Sampling) -> list[Stage]:
    """One stage after the other on one engine. Raises `EngineError` when a call fails for good."""
    known = {"question": question.question}
    stages: list[Stage] = []
    before: tuple[int, ...] = ()
    begun_by: dict[str, str] = {}
    for role in roles.of[question.kind]:
        user = role.fill(known)
        messages = (("system", role.system), ("user", user))
        chat = Chat(server.served_model, messages, role.max_tokens, sampling.temperature, sampling.seed)
        answer = await _patiently(server.client.complete, chat)
        # half a surrogate pair, as JSON may have it, could not be written to a file
        known[role.name] = answer.text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = await _tokens(server, role.system, user)
        told: dict[str, Any] = {}
        if len(ids) == answer.prompt_tokens:
            prefix = min(await _prefix_tokens(server, role), len(ids))
            told = {"system_tokens": prefix, "user_tokens": len(ids) - prefix}
            if prefix:
                begun_by.setdefault(role.system, f"{question.kind}-{role.name}")
                told["shared_prefix"] = SharedPrefix(begun_by[role.system], prefix)
                if stages and stages[-1].shared_prefix == told["shared_prefix"]:
                    told["reused_tokens"] = in_common(before, ids)
        before = ids
        stages.append(
            Stage(
                name=role.name,
                prompt_tokens=answer.prompt_tokens,
                output_tokens=max(answer.output_tokens, 1),
                prompt=f"{role.system}\n\n{user}",
                output=known[role.name],
                **told,
            )
        )
    return stages


def trace_of(name: str, questions: Sequence[Question], models: Sequence[str], journal: Journal) -> Trace:
    """The questions that have a run of every model, in file order: a trace with gaps could not be replayed."""
    workflows = []
    for question in questions:
        found = [journal.runs[question.id, model] for model in models if (question.id, model) in journal.runs]
        if len(found) == len(models):
            runs = {model: run for workflow in found for model, run in workflow.runs.items()}
            verdicts = {model: why for workflow in found for model, why in workflow.meta["verdict"].items()}
            meta = {**found[0].meta, "verdict": verdicts}
            workflows.append(Workflow(question.id, question.workload, runs, prompt=question.question, meta=meta))
    return Trace(name, tuple(workflows))


async def _patiently(ask: Callable[[A], Awaitable[T]], what: A) -> T:
    """Ask again after a pause while the engine is busy or ill. Raises the last `EngineError`."""
    for pause_s in PAUSES_S:
        try:
            return await ask(what)
        except EngineError as error:
            if error.final:
                raise
        await asyncio.sleep(pause_s)
    return await ask(what)


async def _comes_back(server: Server) -> bool:
    clock = asyncio.get_running_loop().time
    until = clock() + BACK_S
    while clock() < until:
        await asyncio.sleep(PROBE_S)
        if await server.client.healthy():
            return True
    return False


async def _tokens(server: Server, system: str, user: str) -> tuple[int, ...]:
    """The prompt's token ids, none where the server does not tell."""
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    body = {"model": server.served_model, "messages": messages}
    return await _patiently(server.client.tokenize, body) or ()


async def _prefix_tokens(server: Server, role: Role) -> int:
    """With how many tokens every prompt of the role begins: what two with other user messages have in common.

    That is the beginning of the chat template and the system message.
    """
    if role.system not in server.prefixes:
        server.prefixes[role.system] = in_common(*[await _tokens(server, role.system, user) for user in ("A", "7")])
    return server.prefixes[role.system]
