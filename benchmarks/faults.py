"""What a client of the gateway sees of an engine's faults: each fault, streamed and whole, with one engine and two.

    python benchmarks/faults.py

prints two tables. The first is of the gateway: the status, how the answer ended, how many tries it took, and what was
lost: a call whose client has neither a whole answer nor an error. The second is of a live replay, which streams always
and may send again what an engine began: whether the workflow was completed, or given up with its error in the report.
Engines are servers that answer with fixed words and fail as they are told to (``tests/chimsim/gateway``); pauses
between tries are those that users get. About 30 seconds.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
INACTIVITY_S, WAIT_S = 1.0, 3.0
ENDS = {"whole": "the whole answer", "error": "error", "broken": "a part, then an error event", "lost": "NOTHING"}


async def replayed(fault: str, second: bool) -> tuple[str, int]:
    """What became of a workflow of one call in a live replay, and how often it was sent."""
    from chimsim.errors import ChimsimError
    from chimsim.live.client import Client
    from chimsim.live.driver import LiveReplay
    from chimsim.live.port import Endpoint, ServerPort
    from chimsim.live.prompts import LengthPrompts
    from chimsim.replay import schedule
    from policies.fcfs import Fcfs
    from tests.chimsim.gateway.fault_matrix import DOWN_S
    from tests.chimsim.gateway.gateways import cluster_of
    from tests.chimsim.gateway.rude_engine import PROMPT_TOKENS, WORDS, RudeEngine, rude
    from tests.chimsim.worlds import TrueLengths, single_stage

    engines = [RudeEngine(fault=fault), RudeEngine()][: 1 + second]
    trace = single_stage([(PROMPT_TOKENS, len(WORDS))], arrivals=[0.0])
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(rude(*engines))
        cluster = cluster_of([(f"A/{number}", "A", engine.url) for number, engine in enumerate(engines)], slots=2)
        found = {}
        for spec in cluster.engines:
            assert spec.address is not None
            client = await stack.enter_async_context(Client(spec.address.url, inactivity_s=INACTIVITY_S))
            found[spec.name] = Endpoint(client, spec.address.served_model, token_ids=False)
        if fault in ("refuses", "restarts"):
            await engines[0].down()
        driver = LiveReplay(
            cluster, Fcfs(), TrueLengths(trace), lambda events, spec: ServerPort(events, found[spec.name]),
            LengthPrompts(0, 10, 100),
        )  # fmt: skip
        run = asyncio.ensure_future(driver.run(*schedule(trace, None, 0, None, None, 1.0, True), 0))
        if fault == "restarts":
            await asyncio.sleep(DOWN_S)
            await engines[0].up()
        try:
            (status,) = (await run).workflows["status"].astype(str)
        except ChimsimError:
            status = "the run ends: no engine"
        tries = 1 + sum(", sent again" in line for line in driver.failures)
        assert not driver._dispatcher._requests or status.startswith("the run")
    return status, tries


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from chimsim.live import driver
    from tests.chimsim.gateway.fault_matrix import FAULTS, Seen, observe_all

    logging.getLogger("chimsim.gateway").addHandler(logging.NullHandler())
    logging.getLogger("chimsim.gateway").propagate = False
    seen = asyncio.run(observe_all(INACTIVITY_S, WAIT_S, at_once=20))

    def told(one: Seen) -> str:
        end = f"{one.status}, {ENDS[one.end]}" if one.status == 200 else f"{one.status} {ENDS[one.end]}"
        return f"{end} ({one.tries} {'try' if one.tries == 1 else 'tries'})"

    table = Table(title=f"engines silent for {INACTIVITY_S:g} s are given up, calls wait {WAIT_S:g} s at most")
    for column in ("the engine ...", "answer", "with another engine of the model", "with no other", "lost"):
        table.add_column(column, no_wrap=True)
    for fault in FAULTS:
        for stream in (True, False):
            both = [seen[fault, stream, second] for second in (True, False)]
            lost = sum(one.end == "lost" for one in both)
            name = f"answers {fault}" if fault.isdigit() else fault
            table.add_row(name if stream else "", "stream" if stream else "whole", *map(told, both), str(lost))
    Console(width=140).print(table)
    driver.DOWN_S = WAIT_S

    async def all_replayed() -> list[tuple[str, int]]:
        return await asyncio.gather(*(replayed(fault, second) for fault in FAULTS for second in (True, False)))

    fates = asyncio.run(all_replayed())
    live = Table(title=f"chimsim live: a workflow of one call; an engine that is down for {WAIT_S:g} s ends the run")
    for column in ("the engine ...", "with another engine of the model", "with no other", "lost"):
        live.add_column(column, no_wrap=True)
    for at, fault in enumerate(FAULTS):
        pair = fates[2 * at : 2 * at + 2]
        lost = sum(not fate.startswith(("completed", "failed", "the run")) for fate, _ in pair)
        live.add_row(
            fault, *(f"{fate} ({tries} {'try' if tries == 1 else 'tries'})" for fate, tries in pair), str(lost)
        )
    Console(width=140).print(live)
    print(f"{len(seen)} calls, {sum(one.end == 'lost' for one in seen.values())} lost; nothing left in the gateway")


if __name__ == "__main__":
    main()
