"""How cost grows, as tables, as raw figures and as a plot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from benchmarks import plot
from benchmarks.figures import Estimate, estimate, ratio
from benchmarks.growth import Growth, Passed, memory
from benchmarks.plot import Line
from benchmarks.rounds import Measured
from benchmarks.tables import aligned, piped

# What a request may cost after all sessions, against one to a server that has had none of them.
WANTED = 1.03

Table = list[tuple[str, ...]]


def tables(growth: Growth) -> Iterator[tuple[str, Table]]:
    """Give each table with its title."""
    for axis, numbers in growth.axes.items():
        names = dict.fromkeys(name for of in numbers.values() for name in of)
        rows: Table = [("CPU a request, µs", *(f"{number:,}" for number in numbers))]
        for name in names:
            rows.append((name, *(_cost(of[name]) for of in numbers.values())))
        yield axis, rows
    for name, looks in growth.passed.items():
        rows = [
            (
                "sessions come and gone",
                "CPU a request",
                "a fresh server",
                "ratio",
                "instructions",
                "a worker",
                "the arbiter",
            )
        ]
        for look in looks:
            arbiter, worker = memory(look)
            fault = look.old.fault or look.fresh.fault
            found = fault or str(ratio(look.old.cpu_us, look.fresh.cpu_us))
            mib = (_instructions(look), f"{worker:.2f} MiB", f"{arbiter:.2f} MiB")
            rows.append((f"{look.sessions:,}", _cost(look.old), _cost(look.fresh), found, *mib))
        yield f"{name}: sessions of an app that keeps nothing", rows


def verdicts(growth: Growth) -> list[str]:
    """Say of each set-up whether its cost is what is wanted after all the sessions."""
    said = []
    for name, looks in growth.passed.items():
        if name in growth.faults:
            continue
        last = looks[-1]
        if not (last.old.fault or last.fresh.fault):
            found = ratio(last.old.cpu_us, last.fresh.cpu_us)
            reached = "reached" if found.low <= WANTED else "not reached"
            said.append(f"{name}: CPU a request after {last.sessions:,} sessions: {found}; wanted {WANTED}: {reached}")
    return said


def terminal(growth: Growth) -> str:
    """Return the report as plain text."""
    parts = [f"{title}\n{aligned(rows)}" for title, rows in tables(growth)]
    return "\n\n".join([*parts, *verdicts(growth), *_left_out(growth)])


def markdown(growth: Growth, plot_name: str) -> str:
    """Return the report as Markdown."""
    parts = [
        "# How cost grows",
        f"Made by `scripts/bench --growth`: {growth.rounds} rounds of {growth.seconds} s, in {growth.minutes:.0f} "
        f"minutes, on {growth.machine}. Small JSON in a closed loop; where nothing else is said 4 workers, 64 "
        "sessions and 16 connections, all of them busy. Medians with 90% intervals of the CPU time of all "
        "server processes.",
        "Sessions that come and go are made, have one request, and no other. The server that they come to is measured "
        "in the same rounds as a fresh one that has none of them, so that a machine that changes meanwhile does not "
        "count. *Instructions* are the ratio of those counted by `perf stat`, where it can. Memory is the "
        "proportional set size without files.",
        f"![How cost grows]({plot_name})",
    ]
    for title, rows in tables(growth):
        parts += [f"## {title[0].upper()}{title[1:]}", piped(rows)]
    parts += verdicts(growth) + _left_out(growth)
    return "\n\n".join(parts) + "\n"


def raw(growth: Growth) -> dict[str, Any]:
    """Return all figures, by round."""

    def plain(result: Measured) -> dict[str, Any]:
        values = asdict(result)
        del values["latencies"]
        return values

    return {
        "machine": growth.machine,
        "rounds": growth.rounds,
        "seconds": growth.seconds,
        "minutes": growth.minutes,
        "left_out": growth.missing,
        "faults": growth.faults,
        "axes": {
            axis: {number: {name: plain(result) for name, result in of.items()} for number, of in numbers.items()}
            for axis, numbers in growth.axes.items()
        },
        "passed": {
            name: [
                {
                    "sessions": look.sessions,
                    "old": plain(look.old),
                    "fresh": plain(look.fresh),
                    "pss": look.pss,
                    "instructions": look.instructions,
                }
                for look in looks
            ]
            for name, looks in growth.passed.items()
        },
    }


def picture(growth: Growth) -> str:
    """Return the plot."""
    panels: dict[str, list[Line]] = {}
    for axis, numbers in growth.axes.items():
        lines: dict[str, list[tuple[float, Estimate]]] = {}
        for number, of in numbers.items():
            for name, result in of.items():
                if not result.fault:
                    lines.setdefault(name, []).append((number, estimate(result.cpu_us)))
        panels[f"{axis}: µs CPU a request"] = [Line(name, points) for name, points in lines.items()]
    costs, sizes = [], []
    for name, looks in growth.passed.items():
        right = [look for look in looks if not (look.old.fault or look.fresh.fault)]
        costs.append(Line(name, [(look.sessions, ratio(look.old.cpu_us, look.fresh.cpu_us)) for look in right]))
        for role, title in enumerate(("the arbiter", "a worker")):
            points = [(look.sessions, memory(look)[role]) for look in looks]
            sizes.append(Line(f"{name}, {title}", [(number, Estimate(size, size, size)) for number, size in points]))
    if costs:
        panels["sessions come and gone: CPU against a fresh server"] = costs
        panels["sessions come and gone: MiB"] = sizes
    return plot.growth("How cost grows; medians and 90% intervals", panels)


def _cost(result: Measured) -> str:
    if result.fault:
        return f"no figure: {result.fault[:60]}"
    found = estimate(result.cpu_us)
    return f"{found.median:.0f} ({found.low:.0f}–{found.high:.0f})"  # noqa: RUF001  # a range


def _instructions(look: Passed) -> str:
    """Return the ratio of the instructions a request."""
    return "not counted" if look.instructions is None else f"{look.instructions[0] / look.instructions[1]:.3f}"


def _left_out(growth: Growth) -> list[str]:
    said = [f"{title} is left out: {reason}" for title, reason in growth.missing.items()]
    return said + [f"{name}, sessions come and go: {fault}" for name, fault in growth.faults.items()]
