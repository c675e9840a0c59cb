"""Measures: short rounds, in each of which every set-up has its turn, in another order each time."""

from __future__ import annotations

import contextlib
import random
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.asking import WrongAnswer
from benchmarks.callers import Caller, Load, drive
from benchmarks.figures import quantile
from benchmarks.progress import Progress
from benchmarks.servers import Server
from benchmarks.sessions import Unfit, largest_part
from benchmarks.works import Work

# For what a server still does after its last answer has left.
_AFTERWARDS_SECONDS = 0.005

# How many rounds connections and sessions are kept.
_STINT_ROUNDS = 4


@dataclass
class Measured:
    """What one set-up did with one work.

    Attributes:
        fault: what went wrong, or an empty string; then there is no speed to be told.
        cpu_us: CPU time of all server processes a request, in microseconds, by round.
        throughput: requests a second, by round.
        p50_us: the median time to an answer, by round.
        generator: the share of a core that the load generator took, by round.
        latencies: the time to each answer of all rounds, in nanoseconds.
        requests: how many requests there were.
        stale: how many of the answers came from a worker that lacks the session's state.
        largest: how many of the sessions one worker had, where they fell as they fell, each time they were made.
        memory: the median worker's proportional set size when all rounds were over, in bytes.
    """

    title: str
    fault: str = ""
    cpu_us: list[float] = field(default_factory=list)
    throughput: list[float] = field(default_factory=list)
    p50_us: list[float] = field(default_factory=list)
    generator: list[float] = field(default_factory=list)
    latencies: array[int] = field(default_factory=lambda: array("q"))
    requests: int = 0
    stale: int = 0
    largest: list[int] = field(default_factory=list)
    memory: int = 0

    def add(self, load: Load, cpu_ns: int) -> None:
        """Add a round."""
        self.cpu_us.append(cpu_ns / load.requests / 1e3)
        self.throughput.append(load.requests / load.wall_ns * 1e9)
        self.p50_us.append(quantile(sorted(load.latencies), 0.5) / 1e3)
        self.generator.append(load.generator_ns / load.wall_ns)
        self.latencies.extend(load.latencies)
        self.requests += load.requests
        self.stale += load.stale

    def quantiles_ms(self) -> tuple[float, float, float]:
        """Return p50, p99 and p99.9 of the time to an answer over all rounds, in milliseconds."""
        ordered = sorted(self.latencies)
        p50, p99, p999 = (quantile(ordered, share) / 1e6 for share in (0.5, 0.99, 0.999))
        return p50, p99, p999


def measure(
    work: Work, servers: Sequence[Server], rounds: int, seconds: float, progress: Progress
) -> dict[str, Measured]:
    """Measure a work on all set-ups, and return what each did by its name.

    Every few rounds connections and sessions are made anew: which thread of a proxy a connection has come to, say,
    would otherwise be the same in all rounds, and no interval would show it.
    """
    results = {server.name: Measured(server.title) for server in servers}
    for first in range(0, rounds, _STINT_ROUNDS):
        with contextlib.ExitStack() as stack:
            callers: dict[str, list[Caller]] = {}
            for server in servers:
                result = results[server.name]
                if not result.fault:
                    with _faults(work, result, server, progress):
                        callers[server.name] = work.callers(server)
                        stack.callback(_close, callers[server.name])
                        if work.placement == "fallen":
                            result.largest.append(largest_part(callers[server.name][0].sessions))
                        # Unmeasured: pools fill, caches warm.
                        drive(callers[server.name], min(seconds, 0.2))
            stint = range(first, min(first + _STINT_ROUNDS, rounds))
            measure_callers(work, servers, callers, stint, seconds, progress, results)
    for server in servers:
        result = results[server.name]
        if not result.fault:
            with _faults(work, result, server, progress):
                result.memory = server.worker_pss()
    return results


def measure_callers(
    work: Work,
    servers: Sequence[Server],
    callers: Mapping[str, Sequence[Caller]],
    rounds: range,
    seconds: float,
    progress: Progress,
    results: dict[str, Measured],
) -> None:
    """Measure with callers that are there, and add what came of it to the results."""
    for number in rounds:
        for server in random.Random(number).sample(list(servers), len(servers)):
            result = results[server.name]
            progress.step(f"{work.name}, round {number + 1}: {server.title}", work.longer)
            if not result.fault:
                with _faults(work, result, server, progress):
                    result.add(*one_round(server, callers[server.name], seconds * work.longer))
    for name, result in results.items():
        if result.fault:
            # What a run with a wrong answer was fast at is of no interest.
            results[name] = Measured(result.title, fault=result.fault)


def one_round(server: Server, callers: Sequence[Caller], seconds: float) -> tuple[Load, int]:
    """Return the load of one round, and the CPU time in nanoseconds that it cost all of the server's processes."""
    before = server.cpu_ns()
    load = drive(callers, seconds)
    time.sleep(_AFTERWARDS_SECONDS)
    cpu = server.cpu_ns() - before
    if load.stale and server.setup.keeps:
        raise WrongAnswer(f"{load.stale} of {load.requests} answers came from a worker that lacks the session")
    return load, cpu


@contextlib.contextmanager
def _faults(work: Work, result: Measured, server: Server, progress: Progress) -> Iterator[None]:
    try:
        yield
    except (WrongAnswer, Unfit, ProcessLookupError, OSError, ValueError) as error:
        result.fault = f"{type(error).__name__}: {error}"
        progress.say(f"{work.name}, {server.title}: {result.fault}")


def _close(callers: Sequence[Caller]) -> None:
    for caller in callers:
        caller.close()
