"""What the routing is to cost at most, compared with what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from benchmarks.figures import Estimate, estimate, ratio
from benchmarks.rounds import Measured

Results = Mapping[str, Mapping[str, Measured]]
Figure = Literal["cpu", "throughput", "added p50"]


@dataclass(frozen=True)
class Wanted:
    """One figure that is wanted, of the first of our set-ups that was measured.

    Args:
        title: what it is.
        work, against: the work's and the other set-up's names.
        figure: what is compared; all but throughput are to be at most the bound.
        bound: what is wanted of the ratio.
    """

    title: str
    work: str
    against: str
    figure: Figure
    bound: float

    def found(self, results: Results, ours: str) -> Estimate | None:
        """Return the ratio that was measured, or ``None`` where one of the two was not."""
        work = results.get(self.work, {})
        mine, other, alone = work.get(ours), work.get(self.against), work.get("one")
        if mine is None or other is None or mine.fault or other.fault:
            return None
        if self.figure == "cpu":
            return ratio(mine.cpu_us, other.cpu_us)
        if self.figure == "throughput":
            return ratio(mine.throughput, other.throughput)
        if alone is None or alone.fault:
            return None
        rounds = zip(mine.p50_us, other.p50_us, alone.p50_us, strict=True)
        # A round in which the other added nothing has no ratio.
        added = [(one - least) / (two - least) for one, two, least in rounds if two > least]
        return estimate(added) if added else None

    def reached(self, found: Estimate) -> bool:
        """Tell whether the median is as good as wanted, or the bound lies within the interval."""
        if self.figure == "throughput":
            return found.high >= self.bound
        return found.low <= self.bound


# What the routing may take of a worker's memory.
MEMORY_MIB = 15

WANTED = (
    Wanted("small JSON, pooled connections: CPU against HAProxy", "json-pooled", "haproxy-table", "cpu", 0.95),
    Wanted("small JSON, a connection a session: CPU against HAProxy", "json-each", "haproxy-table", "cpu", 0.85),
    Wanted("small JSON, a connection a session: CPU against stock workers", "json-each", "stock", "cpu", 1.35),
    Wanted("handled locally: CPU against stock workers", "json-home", "stock", "cpu", 1.05),
    Wanted("8 MiB reply: CPU against HAProxy", "reply-8m", "haproxy-table", "cpu", 1.1),
    Wanted("8 MiB reply: throughput against HAProxy", "reply-8m", "haproxy-table", "throughput", 0.9),
    Wanted("4 MiB request bodies: CPU against HAProxy", "upload-4m", "haproxy-table", "cpu", 0.9),
    Wanted("time that a forward adds, p50, against HAProxy's", "json-away", "haproxy-table", "added p50", 1.0),
    Wanted("20 ms of computation: throughput of 2 workers against 1", "compute", "one", "throughput", 1.85),
)
