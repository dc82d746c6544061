"""Calls through the gateway: whose turn it is, whose workflow it belongs to, what the policy hears, what is freed."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from chimsim.errors import ChimsimError
from chimsim.gateway import core, upstreams
from chimsim.gateway.ask import WORKFLOW_HEADERS
from chimsim.gateway.core import Limits
from chimsim.gateway.foretell import Models
from policies import load_policy
from policies.interface import ClusterView, Dispatch, RequestView
from policies.mlfq import Mlfq
from tests.chimsim.gateway.gateways import (
    CHAT,
    COMPLETIONS,
    Told,
    World,
    chat,
    events_of,
    served,
    text_of,
    until,
)
from tests.chimsim.gateway.rude_engine import PROMPT_TOKENS, WORDS, RudeEngine, rude
from traces import load_trace

WHOLE = "".join(WORDS)


@pytest.fixture(autouse=True)
def no_long_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "BACKOFF_S", 0.005)
    monkeypatch.setattr(upstreams, "PROBE_S", 0.02)


async def hold(world: World, bad: RudeEngine, **more: Any) -> asyncio.Task[Any]:
    """A call that has the engine's slot until its gate is opened."""
    task = asyncio.ensure_future(world.post(CHAT, chat(**more)))
    await until(lambda: bad.inside == 1)
    return task


def test_waiting_calls_are_served_in_the_order_of_the_policy() -> None:
    async def run() -> None:
        bad, policy = RudeEngine(gate=asyncio.Event()), Told()
        async with rude(bad), served([("A", bad.url)], policy, slots=1) as world:
            first = await hold(world, bad)
            order = [5, 2, 9, 2, 1]
            calls = []
            for at, number in enumerate(order):
                body = chat(metadata={"stage": f"s-{number}"}, user=str(at))
                calls.append(asyncio.ensure_future(world.post(CHAT, body)))
                await until(lambda at=at: len(policy.dispatched) == at + 2)  # type: ignore[misc]
            assert bad.gate is not None
            bad.gate.set()
            answers = await asyncio.gather(first, *calls)
            assert [status for status, _, _ in answers] == [200] * 6
            assert bad.most_inside == 1
            # lower first, and of equals the one that came first
            assert [body.get("user") for body in bad.bodies[1:]] == ["4", "1", "3", "0", "2"]
            assert all(float(headers["x-chimsim-waited-ms"]) >= 0 for _, _, headers in answers)

    asyncio.run(run())


@pytest.mark.parametrize("header", [*WORKFLOW_HEADERS, "metadata"])
def test_calls_of_a_workflow_are_its_stages_until_the_last(header: str) -> None:
    async def run() -> None:
        good, policy = RudeEngine(), Told()
        async with rude(good), served([("A", good.url)], policy) as world:
            for number in range(3):
                metadata = {"last": number == 2} | ({"workflow_id": "w"} if header == "metadata" else {})
                headers = {} if header == "metadata" else {header.title(): "w"}
                status, _, answered = await world.post(CHAT, chat(metadata=metadata), headers)
                assert status == 200
                assert answered["x-chimsim-workflow-id"] == "w"
                assert (answered["x-chimsim-engine"], answered["x-chimsim-model"]) == ("A/0", "A")
                assert len(world.gateway._sessions) == (number < 2)
        assert policy.dispatched == [("w", number, f"stage-{number}") for number in range(3)]
        assert policy.completed == [("w", "stop", 4, number == 2) for number in range(3)]
        assert policy.forgotten == []

    asyncio.run(run())


def test_calls_that_stand_alone_are_their_workflows_last() -> None:
    async def run() -> None:
        good, policy = RudeEngine(), Told()
        async with rude(good), served([("A", good.url)], policy) as world:
            answers = await asyncio.gather(*(world.post(CHAT, chat()) for _ in range(5)))
            assert len({headers["x-chimsim-workflow-id"] for _, _, headers in answers}) == 5
        assert [(reason, last) for _, reason, _, last in policy.completed] == [("stop", True)] * 5
        assert policy.forgotten == []

    asyncio.run(run())


def test_a_silent_workflow_is_forgotten_and_the_policy_told_once() -> None:
    async def run() -> None:
        good, policy = RudeEngine(), Told()
        limits = Limits(ttl_s=0.1)
        async with rude(good), served([("A", good.url)], policy, limits=limits) as world:
            for name in ("v", "w"):
                await world.post(CHAT, chat(metadata={"workflow_id": name}))
            await until(lambda: len(world.gateway._sessions) == 0)
            assert policy.forgotten == ["v", "w"]
            assert "chimsim_workflows 0.0" in (await world.get("/metrics"))[1]
            await world.post(CHAT, chat(metadata={"workflow_id": "w"}))
        assert policy.dispatched[-1] == ("w", 0, "stage-0")
        # the end of the gateway is the end of the workflow
        assert policy.forgotten == ["v", "w", "w"]

    asyncio.run(run())


def test_a_last_call_that_fails_has_its_workflow_forgotten() -> None:
    async def run() -> None:
        bad, policy = RudeEngine(fault="400", good=1), Told()
        async with rude(bad), served([("A", bad.url)], policy) as world:
            await world.post(CHAT, chat(metadata={"workflow_id": "w"}))
            status, _, _ = await world.post(CHAT, chat(metadata={"workflow_id": "w", "last": True}))
            assert status == 400
            assert policy.forgotten == ["w"]
        assert policy.completed == [("w", "stop", 4, False), ("w", "failed", 0, False)]
        assert policy.forgotten == ["w"]

    asyncio.run(run())


def test_named_models_go_to_their_engines_and_unknown_ones_nowhere() -> None:
    async def run() -> None:
        engines = RudeEngine("A"), RudeEngine("B")
        policy = Told()
        async with rude(*engines), served([("A", engines[0].url), ("B", engines[1].url)], policy) as world:
            for model in ("A", "B", "B", "auto"):
                status, data, headers = await world.post(CHAT, chat(model=model))
                assert status == 200
                if model != "auto":
                    assert headers["x-chimsim-model"] == json.loads(data)["model"] == model
            status, data, _ = await world.post(CHAT, chat(model="Auto"))
            assert status == 404
            error = json.loads(data)["error"]
            assert error["message"].startswith("the model 'Auto' does not exist; did you mean 'auto'?")
            assert (error["param"], error["code"]) == ("model", 404)
            _, metrics = await world.get("/metrics")
            assert 'chimsim_answers_total{status="404"} 1.0' in metrics, "refusals are counted"
            _, listed = await world.get("/v1/models")
            assert [model["id"] for model in json.loads(listed)["data"]] == ["auto", "A", "B"]
        assert [body["model"] for body in engines[1].bodies] == ["B", "B"]
        assert len(policy.dispatched) == 4

    asyncio.run(run())


def test_what_the_engine_gets_is_what_the_client_sent_but_for_what_is_the_gateways() -> None:
    async def run() -> None:
        good = RudeEngine()
        async with rude(good), served([("A", good.url)]) as world:
            await world.post(CHAT, chat(stream=True, priority=-9, tools=[{"a": 1}], temperature=0.25, seed=3))
            await world.post(CHAT, chat(stream_options=None, n=1))
        streamed, whole = good.bodies
        options = {"include_usage": True}
        assert streamed == chat(model="A", stream=True, tools=[{"a": 1}], temperature=0.25, seed=3) | {
            "stream_options": options
        }
        assert whole == chat(model="A", stream_options=None, n=1)

    asyncio.run(run())


@pytest.mark.parametrize("when", ["waiting", "streaming", "whole"])
def test_a_client_that_leaves_has_its_call_taken_back(when: str) -> None:
    async def run() -> None:
        bad, policy = RudeEngine(gate=asyncio.Event()), Told()
        async with rude(bad), served([("A", bad.url)], policy, slots=1) as world:
            if when == "waiting":
                first = await hold(world, bad)
            leaver = asyncio.ensure_future(
                world.session.post(world.url + CHAT, json=chat(stream=when == "streaming", metadata={"stage": "s-1"}))
            )
            if when == "streaming":
                reply = await leaver
                assert text_of(events_of(await reply.content.readuntil(b"\n\n"))) == WORDS[0]
                reply.close()
            else:
                await until(lambda: len(policy.dispatched) == 1 + (when == "waiting"))
                await until(lambda: when == "waiting" or bad.inside == 1)
                leaver.cancel()
            await until(lambda: world.gateway.in_flight == (when == "waiting"))
            await until(lambda: bad.left == (when != "waiting"))
            assert [reason for _, reason, _, _ in policy.completed] == ["aborted"]
            assert policy.forgotten == [policy.dispatched[-1][0]]
            assert bad.gate is not None
            bad.gate.set()
            if when == "waiting":
                assert (await first)[0] == 200
                assert len(bad.bodies) == 1
            # the slot is there for the next one
            assert (await world.post(CHAT, chat()))[0] == 200
            assert 'chimsim_answers_total{status="499"} 1.0' in (await world.get("/metrics"))[1]

    asyncio.run(run())


def test_a_client_that_leaves_with_its_whole_answer_has_had_it(tmp_path: Path) -> None:
    async def run() -> None:
        good, policy = RudeEngine(), Told()
        path = tmp_path / "t.jsonl"
        async with rude(good), served([("A", good.url)], policy, record=path) as world:
            for _ in range(20):
                async with world.session.post(world.url + CHAT, json=chat(stream=True)) as reply:
                    await reply.content.readuntil(b"data: [DONE]\n\n")
                    reply.close()
        assert [reason for _, reason, _, _ in policy.completed] == ["stop"] * 20
        assert len(load_trace(path).workflows) == 20

    asyncio.run(run())


def test_the_queue_has_a_limit_and_a_wait_has_one_too() -> None:
    async def run() -> None:
        bad, policy = RudeEngine(gate=asyncio.Event()), Told()
        limits = Limits(queued=2, wait_s=0.15)
        async with rude(bad), served([("A", bad.url)], policy, slots=1, limits=limits) as world:
            first = await hold(world, bad)
            waiting = [asyncio.ensure_future(world.post(CHAT, chat())) for _ in range(2)]
            await until(lambda: world.gateway.in_flight == 3)
            status, data, headers = await world.post(CHAT, chat())
            assert (status, headers["retry-after"]) == (503, "1")
            assert json.loads(data)["error"]["message"] == "2 calls are waiting already"
            for status, data, _ in await asyncio.gather(*waiting):
                assert status == 503
                assert json.loads(data)["error"]["message"] == "waited 0.15 s for a turn"
            assert [reason for _, reason, _, _ in policy.completed] == ["aborted"] * 2
            assert bad.gate is not None
            bad.gate.set()
            assert (await first)[0] == 200

    asyncio.run(run())


def test_the_wait_begins_anew_after_a_failure() -> None:
    async def run() -> None:
        bad, good = RudeEngine(fault="silent"), RudeEngine()
        limits = Limits(wait_s=0.2, answer_s=0.4)
        async with rude(bad, good), served([("A", bad.url), ("A", good.url)], limits=limits) as world:
            status, _, headers = await world.post(CHAT, chat())
            assert (status, headers["x-chimsim-engine"]) == (200, "A/1")

    asyncio.run(run())


def test_calls_queued_for_an_engine_that_falls_ill_go_elsewhere() -> None:
    async def run() -> None:
        bad, good = RudeEngine(fault="500", gate=asyncio.Event()), RudeEngine(gate=asyncio.Event())
        async with rude(bad, good), served([("A", bad.url), ("A", good.url)], slots=1) as world:
            await bad.down()
            calls = [asyncio.ensure_future(world.post(CHAT, chat())) for _ in range(6)]
            await until(lambda: world.gateway.healthy() == {"A/0": False, "A/1": True})
            assert (await world.get("/health"))[0] == 200
            assert 'chimsim_engine_healthy{engine="A/0"} 0.0' in (await world.get("/metrics"))[1]
            assert good.gate is not None
            good.gate.set()
            assert [status for status, _, _ in await asyncio.gather(*calls)] == [200] * 6
            assert len(good.bodies) == 6

    asyncio.run(run())


def test_no_engine_at_the_start_is_said_and_waited_for() -> None:
    async def run() -> None:
        late = RudeEngine()
        async with rude(late):
            await late.down()
            async with served([("A", late.url)]) as world:
                assert len(world.said) == 1
                assert world.said[0].startswith("engine A/0 does not answer yet: ")
                assert (await world.get("/health"))[0] == 503
                call = asyncio.ensure_future(world.post(CHAT, chat()))
                await late.up()
                assert (await call)[0] == 200
                assert (await world.get("/health"))[0] == 200

    asyncio.run(run())


def test_an_engine_that_serves_another_model_ends_it_at_the_start() -> None:
    async def run() -> None:
        other = RudeEngine("tiny-b")
        async with rude(other), served([("tiny", other.url)]):
            raise AssertionError

    with pytest.raises(ChimsimError, match=r"does not serve 'tiny'; did you mean 'tiny-b'\?"):
        asyncio.run(run())


@dataclass
class Broken(Told):
    """Fails where it is told to."""

    where: str = ""

    def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
        if self.where == "dispatch":
            raise KeyError("mine")
        return super().dispatch(now, request, cluster)

    def on_complete(
        self, now: float, request: RequestView, output_tokens: int, service_s: float, reason: str, *, last: bool
    ) -> None:
        super().on_complete(now, request, output_tokens, service_s, reason, last=last)
        if self.where == "on_complete":
            raise KeyError("mine")

    def on_forget(self, now: float, workflow_id: str) -> None:
        super().on_forget(now, workflow_id)
        if self.where == "on_forget":
            raise KeyError("mine")


@pytest.mark.parametrize("where", ["dispatch", "on_complete", "on_forget"])
def test_a_policy_that_fails_leaves_nothing_behind_and_stops_nothing(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        good, policy = RudeEngine(), Broken(where=where)
        limits = Limits(ttl_s=0.1)
        async with rude(good), served([("A", good.url)], policy, slots=1, limits=limits) as world:
            bodies = [chat(metadata={"workflow_id": f"w{number}"}) for number in range(3)]
            answers = await asyncio.gather(*(world.post(CHAT, body) for body in bodies))
            if where == "dispatch":
                assert [status for status, _, _ in answers] == [500] * 3
                assert b"policy Broken: dispatch raised KeyError" in answers[0][1]
            else:
                assert [json.loads(data)["choices"][0]["message"]["content"] for _, data, _ in answers] == [WHOLE] * 3
            await until(lambda: len(world.gateway._sessions) == 0)
            await until(lambda: len(policy.forgotten) == 3)

    asyncio.run(run())
    assert "KeyError" in caplog.text or any("KeyError" in str(getattr(r, "fields", "")) for r in caplog.records)


def test_what_a_policy_cannot_have_here_is_said_or_refused() -> None:
    async def run() -> None:
        good = RudeEngine()
        async with rude(good), served([("A", good.url)], Mlfq()) as world:
            assert any("calls of clients are not cut in pieces" in line for line in world.said)
            assert (await world.post(CHAT, chat()))[0] == 200

    asyncio.run(run())
    models = Models(("A",))
    for name, cure in (("sjf", "--length-predictor"), ("ltr", "--rank-predictor"), ("chimera", "--router")):
        with pytest.raises(ChimsimError, match=rf"reads the predictions [\w, ]+: give .*{cure}"):
            models.check(load_policy(name))
    models.check(load_policy("fcfs"))


def test_with_the_queue_in_the_engine_its_priority_is_the_policys() -> None:
    async def run() -> None:
        bad = RudeEngine(gate=asyncio.Event())
        async with rude(bad):
            engines = [("A", bad.url)]
            async with served(engines, Told(), queue="engine", scheduling="priority", slots=1) as world:
                bodies = [chat(priority=-99, metadata={"stage": f"s-{number}"}) for number in (0, 3, 2)]
                calls = [asyncio.ensure_future(world.post(CHAT, body)) for body in bodies]
                # one slot, and all of them are inside
                await until(lambda: bad.inside == 3)
                assert sorted(body["priority"] for body in bad.bodies) == [0, 2, 3]
                assert bad.gate is not None
                bad.gate.set()
                assert [status for status, _, _ in await asyncio.gather(*calls)] == [200] * 3
            with pytest.raises(ChimsimError, match="runs scheduling fcfs, which would ignore the order of policy Stj"):
                async with served(engines, load_policy("stjf"), queue="engine", models=Models(("A",), lengths="x")):
                    pass
            # A policy that can make nothing of a made-up call is found out by the first real one.
            async with served(engines, Told(), queue="engine") as world:
                status, data, _ = await world.post(CHAT, chat(metadata={"stage": "s-1"}))
                assert status == 500
                assert b"would ignore the policy's order" in data

    asyncio.run(run())


def test_what_passes_is_recorded_as_a_trace_and_its_text_only_where_asked_for(tmp_path: Path) -> None:
    async def run(path: Path, texts: bool) -> None:
        good = RudeEngine()
        async with rude(good), served([("A", good.url)], record=path, record_texts=texts) as world:
            for number, stream in enumerate((True, False, True)):
                metadata = {"workflow_id": "w", "stage": f"part {number}", "workload": "sums", "last": number == 2}
                await world.post(CHAT, chat(stream=stream, metadata=metadata))
            await world.post(COMPLETIONS, {"model": "A", "prompt": [5, 6, 7]})
            await world.post(CHAT, chat(metadata={"workflow_id": "never ended"}))

    for texts in (False, True):
        path = tmp_path / f"{texts}.jsonl"
        asyncio.run(run(path, texts))
        ours, alone, unended = load_trace(path).workflows
        assert (ours.workflow_id, ours.workload) == ("w", "sums")
        stages = ours.runs["A"].stages
        assert [stage.name for stage in stages] == ["part 0", "part 1", "part 2"]
        assert [(stage.prompt_tokens, stage.output_tokens) for stage in stages] == [(PROMPT_TOKENS, 4)] * 3
        assert [stage.output for stage in stages] == [WHOLE if texts else None] * 3
        assert [stage.prompt for stage in stages] == ["Count to four.\n" if texts else None] * 3
        assert alone.workload == "default"
        assert unended.workflow_id == "never ended"
        assert ("Count" in path.read_text()) is texts
        assert (WORDS[1] in path.read_text()) is texts


def test_keys_of_engines_come_from_the_environment_and_never_show(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("ENGINE_KEY", "upstream-secret")

    async def run() -> list[bytes]:
        bad = RudeEngine(fault="401", good=1)
        async with rude(bad), served([("A", bad.url)], key_env="ENGINE_KEY") as world:
            headers = {"Authorization": "Bearer of-the-client"}
            shown = [(await world.post(CHAT, chat(), headers))[1] for _ in range(2)]
            shown += [text.encode() for text in [(await world.get(p))[1] for p in ("/metrics", "/health")]]
        assert bad.keys == ["Bearer upstream-secret"] * 2
        return shown

    shown = asyncio.run(run())
    assert not any(b"secret" in text for text in shown)
    assert "upstream-secret" not in caplog.text
    monkeypatch.delenv("ENGINE_KEY")
    with pytest.raises(ChimsimError, match="api_key_env = 'ENGINE_KEY', and no such variable is set"):
        asyncio.run(run())


def test_prompts_are_counted_by_the_ratio_of_what_engines_counted() -> None:
    async def run() -> None:
        good = RudeEngine()
        seen: list[int] = []

        class Watching(Told):
            def dispatch(self, now: float, request: RequestView, cluster: ClusterView) -> Dispatch:
                seen.append(request.prompt_tokens)
                return super().dispatch(now, request, cluster)

        async with rude(good), served([("A", good.url)], Watching()) as world:
            body = chat(messages=[{"role": "user", "content": "x" * 699}])
            for _ in range(300):
                await world.post(CHAT, body)
            await world.post(COMPLETIONS, {"prompt": [1] * 33})
        # four characters a token at first; then, as counted, a hundred
        assert seen[0] == 175
        assert seen[-2] == PROMPT_TOKENS
        assert seen[-1] == 33

    asyncio.run(run())
