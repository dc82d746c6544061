"""``chimsim live``: cells of a grid replayed on running engines, into the same results folder as a sweep's.

One cell after the other, for the engines are the same; a cell that is there is not run again. What a live cell needs
beyond a simulated one (endpoints, what is sent, the number of the repeat) is part of its configuration.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any, Literal, cast

from chimsim.errors import ChimsimError
from chimsim.feeds import predictor_for, times_for, trace_named
from chimsim.grid import Cell, make_policy
from chimsim.live.driver import LiveReplay
from chimsim.live.endpoints import endpoints
from chimsim.live.port import Endpoint, ServerPort
from chimsim.live.prompts import LengthPrompts, Prompts, TextPrompts
from chimsim.metrics import summarise
from chimsim.records import RunResult
from chimsim.replay import Oversize, Queue, schedule
from chimsim.results import (
    Results,
    cell_is_whole,
    digest,
    folder_lock,
    json_bytes,
    live_notes,
    open_folder,
    read_manifest,
    write_cell,
    write_file,
    write_summary,
)

Workload = Literal["lengths", "text"]
WORKLOADS = ("lengths", "text")
SETTLE_S = 1.0
"""Between two cells: engines finish what was aborted."""
LATE_S = 0.05
"""A client that dispatches arrivals later than this on average is too slow for the rate."""


@dataclass(frozen=True, slots=True)
class LiveCell:
    """A cell to be replayed on engines; ``cell`` is the simulation it corresponds to."""

    cell: Cell
    repeat: int
    workload: Workload
    max_tokens: int | None

    @property
    def config(self) -> dict[str, Any]:
        """All that decides what is sent, and where."""
        engines = {e.name: e.address.url for e in self.cell.cluster.engines if e.address is not None}
        live = {
            "repeat": self.repeat, "workload": self.workload, "max_tokens": self.max_tokens, "engines": engines,
            "simulated": self.cell.name,
        }  # fmt: skip
        return {**self.cell.config, "live": live}

    @property
    def name(self) -> str:
        """The cell's content hash."""
        return digest(self.config)[:32]

    @property
    def axes(self) -> dict[str, Any]:
        """Its columns in the summary."""
        return {**self.cell.axes, "repeat": self.repeat}


def live_cells(cells: list[Cell], repeats: int, workload: Workload, max_tokens: int | None) -> list[LiveCell]:
    """Every cell so often; policies take turns, so that a slow drift of the engines hits all alike."""
    return [LiveCell(cell, repeat, workload, max_tokens) for repeat in range(repeats) for cell in cells]


Watch = Callable[[LiveCell, LiveReplay], None]
"""Hears of a running cell about once a second."""


def run_live(
    cells: list[LiveCell],
    manifest: Mapping[str, Any],
    out: Path,
    *,
    launch: bool = False,
    inactivity_s: float = 120.0,
    command: tuple[str, ...] = (),
    say: Callable[[str], None] = lambda text: None,
    watch: Watch | None = None,
) -> Results:
    """Replay all cells that the folder does not hold yet, then write the summary.

    Raises `ChimsimError` for bad input and engines that fail for good; the finished cells stay.
    """
    entries = [{"hash": cell.name, "axes": cell.axes} for cell in cells]
    manifest = {**manifest, "cells": entries, "live": True}
    started = time.time()
    with folder_lock(out):
        open_folder(out, manifest)
        missing = [cell for cell in cells if not cell_is_whole(out, cell.name)]
        notes = live_notes(out)

        def keep(name: str, noted: Mapping[str, Any]) -> None:
            """What a result cannot hold: kept cell by cell, for a run may be interrupted."""
            notes[name] = noted
            run = {"command": list(command), "started_at": started, "wall_s": time.time() - started, "cells": notes}
            write_file(out / "live.json", json_bytes(run))

        if missing:
            asyncio.run(_run_all(missing, out, launch, inactivity_s, say, watch, keep))
        write_summary(out, read_manifest(out)["cells"])
    return Results(out)


async def _run_all(
    missing: list[LiveCell],
    out: Path,
    launch: bool,
    inactivity_s: float,
    say: Callable[[str], None],
    watch: Watch | None,
    keep: Callable[[str, Mapping[str, Any]], None],
) -> None:
    cluster = missing[0].cell.cluster
    async with endpoints(cluster, launch=launch, logs=out, inactivity_s=inactivity_s, say=say) as found:
        if any(live.cell.queue == "engine" for live in missing):
            say("with --queue engine the servers must run --scheduling-policy priority: fcfs ignores an order silently")
        for name, endpoint in found.items():
            if not endpoint.token_ids:
                say(f"engine {name} takes no token ids: lengths are approximate, and nobody yields there")
        for number, live in enumerate(missing):
            if number:
                await asyncio.sleep(SETTLE_S)
            for endpoint in found.values():
                await endpoint.look()
                endpoint.first = endpoint.metrics
            round_trips_s = [await endpoint.round_trip_s() for endpoint in found.values()]
            result, driver = await run_cell_live(live, found, watch)
            summary = dict(summarise(result, goodput=live.cell.goodput))
            if not any(endpoint.told_cached for endpoint in found.values()):
                summary["prefix_hit_rate"] = None
            write_cell(out, live.name, live.config, result, summary)
            mean_late_s = driver.lag.total_s / max(driver.lag.arrivals, 1)
            noted = {
                "versions": {name: endpoint.version for name, endpoint in found.items()},
                "round_trip_s": sum(round_trips_s) / len(round_trips_s),
                "client_lag_mean_s": mean_late_s,
                "client_lag_worst_s": driver.lag.worst_s,
                "failures": driver.failures,
            }
            keep(live.name, noted)
            if mean_late_s > LATE_S:
                say(
                    f"warning: the client was {1e3 * mean_late_s:.0f} ms late on average ({live.cell.title}): it is "
                    "overloaded, and its latencies are too long"
                )
            if driver.failures:
                say(f"{len(driver.failures)} tries failed (sent again, or given up); the first: {driver.failures[0]}")


async def run_cell_live(
    live: LiveCell, found: Mapping[str, Endpoint], watch: Watch | None = None
) -> tuple[RunResult, LiveReplay]:
    """One replay; its records, and the driver that made them."""
    cell = live.cell
    trace = trace_named(cell.trace)
    times = times_for(cell.arrivals, trace, cell.workflows, cell.rps)
    order, instants = schedule(
        trace, cell.rps if times is None else None, cell.seed, times, cell.workflows, cell.burstiness, True
    )
    low = max(endpoint.token_range[0] for endpoint in found.values())
    high = min(endpoint.token_range[1] for endpoint in found.values())
    if low >= high:
        raise ChimsimError("the engines' vocabularies have no range of token ids in common that could be found")
    prompts: Prompts = TextPrompts()
    if live.workload == "lengths":
        prompts = LengthPrompts(SystemRandom().getrandbits(48), low, high)
    driver = LiveReplay(
        cell.cluster,
        make_policy(cell.policy, cell.knobs, cell.seed),
        predictor_for(cell.feed, cell.trace, cell.cluster.models, cell.seed),
        lambda events, spec: ServerPort(events, found[spec.name]),
        prompts,
        queue=cast(Queue, cell.queue),
        look_ahead=cell.look_ahead,
        oversize=cast(Oversize, cell.oversize),
        max_tokens=live.max_tokens,
        on_sample=None if watch is None else lambda replay: watch(live, replay),
    )
    return await driver.run(order, instants, cell.warmup), driver
