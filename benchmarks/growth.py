"""The second mode, how cost grows: with workers, sessions alive, connections, and with sessions that have been."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks import accounts
from benchmarks.asking import WrongAnswer
from benchmarks.callers import Caller, Session, drive
from benchmarks.exchanges import ComeAndGoExchange, HeldExchange
from benchmarks.instructions import per_request
from benchmarks.progress import Progress
from benchmarks.rounds import Measured, measure
from benchmarks.servers import Server, served
from benchmarks.sessions import Unfit, open_evenly
from benchmarks.setups import Setup
from benchmarks.works import Work

WORKERS = (2, 4, 8, 16)
SESSIONS = (1, 64, 1024, 10_000)
CONNECTIONS = (1, 16, 256, 2000)

# Of what does not grow.
USUAL = Work("usual", "small JSON, sessions share a pool of connections", HeldExchange, 16, 64)

# How long the passing sessions run between two looks at the progress.
_SPELL_SECONDS = 2.0

# How long a passing session takes about, measured in rounds.
_SESSION_STEPS = 0.0005


@dataclass
class Passed:
    """What a server was like after so many sessions had come and gone.

    Attributes:
        sessions: how many, or a few more.
        old: the server that they came to.
        fresh: one that has had none of them, measured in the same rounds.
        pss: memory of each process of the old one in bytes, that of files left out, the arbiter's first.
        instructions: of the old and of the fresh server, a request; ``None`` where they can't be counted.
    """

    sessions: int
    old: Measured
    fresh: Measured
    pss: list[int]
    instructions: tuple[float, float] | None = None


@dataclass
class Growth:
    """All that was measured: what grows, to which number, and what each set-up did then."""

    machine: str
    rounds: int
    seconds: float
    minutes: float = 0.0
    axes: dict[str, dict[int, dict[str, Measured]]] = field(default_factory=dict)
    passed: dict[str, list[Passed]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    faults: dict[str, str] = field(default_factory=dict)


def grow(setups: Sequence[Setup], rounds: int, seconds: float, sessions: int, folder: Path) -> Growth:
    """Measure how the set-ups' cost grows; ``sessions`` come to and go from each of ours."""
    began = time.monotonic()
    growth = Growth(accounts.machine(), rounds, seconds)
    growth.missing = {setup.title.format(workers=4): setup.missing for setup in setups if setup.missing}
    present = [setup for setup in setups if not setup.missing]
    several = [setup for setup in present if not setup.one]  # One worker does not become more.
    ours = [setup for setup in present if setup.is_ours]
    steps = rounds * (len(several) * len(WORKERS) + len(present) * (len(SESSIONS) + len(CONNECTIONS)))
    steps += len(ours) * 2 * rounds * len(_looks(sessions))
    progress = Progress(steps + len(ours) * sessions * _SESSION_STEPS)
    for title, reason in growth.missing.items():
        progress.say(f"{title} is left out: {reason}")
    growth.axes["workers"] = {}
    for number in WORKERS:
        work = replace(USUAL, name=f"{number} workers", workers=number)
        with contextlib.ExitStack() as stack:
            servers = [stack.enter_context(served(one, number, folder / f"{one.name}-{number}")) for one in several]
            growth.axes["workers"][number] = measure(work, servers, rounds, seconds, progress)
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(served(setup, 4, folder / setup.name)) for setup in present]
        growth.axes["sessions alive"] = {
            number: measure(
                replace(USUAL, name=f"{number} sessions", sessions=number), servers, rounds, seconds, progress
            )
            for number in SESSIONS
        }
        growth.axes["connections"] = {
            number: measure(
                replace(USUAL, name=f"{number} connections", connections=number), servers, rounds, seconds, progress
            )
            for number in CONNECTIONS
        }
    for setup in ours:
        growth.passed[setup.name] = []
        try:
            for passed in _passing(setup, rounds, seconds, sessions, folder, progress):
                growth.passed[setup.name].append(passed)
        except (WrongAnswer, Unfit, ProcessLookupError) as error:
            growth.faults[setup.name] = f"{type(error).__name__}: {error}"
            progress.say(growth.faults[setup.name])
    progress.say("")
    growth.minutes = (time.monotonic() - began) / 60
    return growth


def _looks(sessions: int) -> list[int]:
    """Return after how many sessions a server is looked at."""
    return [0, *(number for number in (1000, 10_000, 100_000, 1_000_000) if number < sessions), sessions]


def _passing(
    setup: Setup, rounds: int, seconds: float, sessions: int, folder: Path, progress: Progress
) -> Iterator[Passed]:
    """Let sessions come to a server and go, and compare it on the way with one that has had none."""
    with contextlib.ExitStack() as stack:
        old = stack.enter_context(served(setup, 4, folder / f"{setup.name}-old"))
        fresh = stack.enter_context(served(setup, 4, folder / f"{setup.name}-fresh"))
        # By other names, since they are the same set-up.
        old.setup, fresh.setup = replace(setup, name="old"), replace(setup, name="fresh")
        come = 0
        for look in _looks(sessions):
            if come < look:
                come += _pass(old, look - come, progress)
            results = measure(USUAL, [old, fresh], rounds, seconds, progress)
            sizes = old.pss("Pss_Anon")
            pss = [sizes[pid] for pid in old.roles]
            counts = [_instructions(server, 3 * seconds) for server in (old, fresh)]
            both = (counts[0], counts[1]) if counts[0] and counts[1] else None
            yield Passed(look, results["old"], results["fresh"], pss, both)


def _instructions(server: Server, seconds: float) -> float | None:
    """Return how many instructions a request takes, where that can be counted."""
    callers = USUAL.callers(server)
    try:
        return per_request(server, callers, seconds)
    finally:
        for caller in callers:
            caller.close()


def _pass(server: Server, sessions: int, progress: Progress) -> int:
    """Let so many sessions, or a few more, come to the server and go, and return how many did."""
    connections = open_evenly(server, 32)
    callers = [Caller(one, deque([Session()]), ComeAndGoExchange()) for one, _ in connections]
    come = 0.0
    spell = _SPELL_SECONDS if sessions > 10_000 else 0.05
    try:
        while come < sessions:
            # Of two requests each.
            now = drive(callers, spell).requests / 2
            come += now
            progress.step(f"{server.title}: sessions come and go", now * _SESSION_STEPS)
    finally:
        for caller in callers:
            caller.close()
    return int(come)


def memory(passed: Passed) -> tuple[float, float]:
    """Return the arbiter's and the median worker's memory in MiB."""
    arbiter, *workers = passed.pss
    return arbiter / 2**20, statistics.median(workers) / 2**20
