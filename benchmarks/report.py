"""What was measured, as tables: on the terminal, in Markdown, and as raw figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.figures import ratio
from benchmarks.rounds import Measured
from benchmarks.tables import aligned, piped
from benchmarks.wanted import MEMORY_MIB, WANTED, Results
from benchmarks.works import WORKS

HEADINGS = (
    "set-up",
    "CPU a request",
    "ratio",
    "requests/s",
    "ratio",
    "p50",
    "p99",
    "p99.9",
    "right",
    "load",
    "memory",
)

_MEANING = """\
A ratio is the median of the rounds' ratios to the set-up marked with 1, with the interval that holds the true median
with 90% (from order statistics). *CPU a request* is the time of all threads of all server processes, proxies
and arbiters included; p50, p99 and p99.9 are milliseconds to an answer, over all rounds; *right* is the share of
answers from a worker that holds the session; *load* is the share of a core that the load generator took;
*memory* is a worker's proportional set size in MiB after this work and those above it, in the order in which they
were done. Every answer is checked to the byte, the session's state included. A set-up with a wrong answer has no
speed; only stock workers, which can't be right, are timed all the same."""


@dataclass
class Run:
    """A whole run.

    Attributes:
        base: the set-up that ratios are to, where a work has no other.
        missing: the titles of the set-ups that were left out, and why.
    """

    machine: str
    versions: str
    rounds: int
    seconds: float
    minutes: float
    base: str
    missing: dict[str, str]
    results: Results

    def base_of(self, work: str) -> str:
        """Return the set-up that this work's ratios are to: the wanted one, or else the first that was right."""
        measured = self.results[work]
        right = [name for name, result in measured.items() if not result.fault]
        for name in (WORKS[work].base or self.base, *right):
            if name in right:
                return name
        return ""


def rows(run: Run, work: str) -> list[tuple[str, ...]]:
    """Return a work's table, a row for each set-up."""
    base = run.results[work].get(run.base_of(work))
    found: list[tuple[str, ...]] = []
    for result in run.results[work].values():
        if result.fault or base is None:
            reason = " ".join(result.fault.split())[:150]
            found.append((result.title, f"no speed: {reason}"))
            continue
        p50, p99, p999 = result.quantiles_ms()
        same = result is base
        found.append(
            (
                result.title,
                _time(_median(result.cpu_us)),
                "1" if same else str(ratio(result.cpu_us, base.cpu_us)),
                f"{_median(result.throughput):,.0f}"
                if _median(result.throughput) >= 100
                else f"{_median(result.throughput):.1f}",
                "1" if same else str(ratio(result.throughput, base.throughput)),
                _ms(p50),
                _ms(p99),
                _ms(p999),
                f"{1 - result.stale / result.requests:.0%}",
                f"{_median(result.generator):.0%}",
                f"{result.memory / 2**20:.1f}",
            )
        )
    return found


def wanted_rows(run: Run) -> list[tuple[str, ...]]:
    """Return what is wanted, and what was found, for each of our set-ups."""
    found: list[tuple[str, ...]] = []
    for wanted in WANTED:
        for name in run.results.get(wanted.work, {}):
            if name.startswith("ours-") and (estimate := wanted.found(run.results, name)) is not None:
                bound = f"{wanted.bound} or {'more' if wanted.figure == 'throughput' else 'less'}"
                title = run.results[wanted.work][name].title
                reached = "yes" if wanted.reached(estimate) else "no"
                found.append((wanted.title, bound, title, str(estimate), reached))
    return found + list(_memory_rows(run))


def terminal(run: Run) -> str:
    """Return the report as plain text."""
    parts = []
    for work in run.results:
        parts.append(f"{WORKS[work].title}{_spread(run, work)}\n{aligned([HEADINGS, *rows(run, work)])}")
    if wanted := wanted_rows(run):
        parts.append(aligned([("wanted", "ratio", "set-up", "found", "reached"), *wanted]))
    parts += [f"{title} is left out: {reason}" for title, reason in run.missing.items()]
    return "\n\n".join(parts)


def markdown(run: Run, plot: str) -> str:
    """Return the report as Markdown; ``plot`` is the plot's file name."""
    parts = [
        "# Benchmark",
        f"Made by `scripts/bench`: {run.rounds} shuffled rounds of {run.seconds} s (of slow works up to five times as "
        f"long) for each work and set-up, in {run.minutes:.0f} minutes, on {run.machine}, all on the loopback "
        f"interface; {run.versions}.",
        _MEANING,
        f"![CPU a request, as a ratio]({plot})",
    ]
    if wanted := wanted_rows(run):
        parts += ["## Wanted", piped([("work", "wanted", "set-up", "found", "reached"), *wanted])]
    for work in run.results:
        parts += [f"## {WORKS[work].title[0].upper()}{WORKS[work].title[1:]}"]
        if spread := _spread(run, work):
            parts.append(spread.strip(" ;") + ".")
        parts.append(piped([HEADINGS, *rows(run, work)]))
    if run.missing:
        parts += ["## Left out", "\n".join(f"- {title}: {reason}" for title, reason in run.missing.items())]
    return "\n\n".join(parts) + "\n"


def raw(run: Run) -> dict[str, Any]:
    """Return all figures, by round; of the single answers' times the quantiles."""

    def plain(result: Measured) -> dict[str, Any]:
        values = asdict(result) | {"latencies": None}
        del values["latencies"]
        if not result.fault:
            values["p50_ms"], values["p99_ms"], values["p99.9_ms"] = result.quantiles_ms()
        return values

    return {
        "machine": run.machine,
        "versions": run.versions,
        "rounds": run.rounds,
        "seconds": run.seconds,
        "minutes": run.minutes,
        "base": {work: run.base_of(work) for work in run.results},
        "left_out": run.missing,
        "works": {work: {name: plain(result) for name, result in of.items()} for work, of in run.results.items()},
    }


def _spread(run: Run, work: str) -> str:
    """Return how unevenly sessions fell, where they fell as they fell."""
    said = []
    for result in run.results[work].values():
        if result.largest:
            low, high = min(result.largest), max(result.largest)
            said.append(f"{result.title} {low if low == high else f'{low} to {high}'}")
    return f"; sessions on the worker with most: {', '.join(said)}" if said else ""


def _memory_rows(run: Run) -> Iterator[tuple[str, ...]]:
    """Compare the memory of our workers with a stock worker's, at the end of each work that both have done."""
    of = {work: results for work, results in run.results.items() if "stock" in results}
    for name in dict.fromkeys(name for results in of.values() for name in results if name.startswith("ours-")):
        # What a worker takes depends on all that it has done before.
        if not all(name in results and not results[name].fault for results in of.values()):
            continue
        more = [(results[name].memory - results["stock"].memory) / 2**20 for results in of.values()]
        yield (
            "memory of the routing in a worker: beyond a stock worker's, after each work",
            f"{MEMORY_MIB} MiB or less",
            next(iter(of.values()))[name].title,
            f"{_median(more):.1f} MiB ({min(more):.1f} to {max(more):.1f})",
            "yes" if max(more) <= MEMORY_MIB else "no",
        )


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]


def _time(microseconds: float) -> str:
    return f"{microseconds:.0f} µs" if microseconds < 10_000 else f"{microseconds / 1000:.1f} ms"


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.2f}" if milliseconds < 10 else f"{milliseconds:.0f}"
