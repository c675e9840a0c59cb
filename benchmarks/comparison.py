"""The first mode: all set-ups side by side, work by work."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks import accounts, plot
from benchmarks.figures import Estimate, ratio
from benchmarks.progress import Progress
from benchmarks.report import Run
from benchmarks.rounds import Measured, measure
from benchmarks.servers import NotStarted, served
from benchmarks.setups import Setup
from benchmarks.works import WORKS, Work


def compare(
    setups: Sequence[Setup], works: Sequence[Work], base: str, rounds: int, seconds: float, folder: Path
) -> Run:
    """Measure the works on the set-ups, those that are missing left out; ``folder`` holds what servers write."""
    began = time.monotonic()
    present = [setup for setup in setups if not setup.missing]
    missing = {setup.title.format(workers=4): setup.missing for setup in setups if setup.missing}
    progress = Progress(sum(work.longer * rounds * len(_taking_part(present, work)) for work in works))
    for title, reason in missing.items():
        progress.say(f"{title} is left out: {reason}")
    results: dict[str, dict[str, Measured]] = {}
    for workers in sorted({work.workers for work in works}, reverse=True):
        group = [work for work in works if work.workers == workers]
        with contextlib.ExitStack() as stack:
            servers = []
            failed: dict[str, Measured] = {}
            for setup in present:
                if not any(setup in _taking_part([setup], work) for work in group):
                    continue
                progress.step(f"starting {setup.title.format(workers=workers)}", 0)
                try:
                    servers.append(stack.enter_context(served(setup, workers, folder / f"{setup.name}-{workers}")))
                except NotStarted as error:
                    failed[setup.name] = Measured(setup.title.format(workers=workers), fault=f"not started: {error}")
                    progress.say(str(error))
            for work in group:
                parts = [server for server in servers if server.setup in _taking_part(present, work)]
                results[work.name] = measure(work, parts, rounds, seconds, progress) | failed
    progress.say("")
    ordered = {work.name: results[work.name] for work in works}
    minutes = (time.monotonic() - began) / 60
    return Run(accounts.machine(), versions(), rounds, seconds, minutes, base, missing, ordered)


def versions() -> str:
    """Return the versions of what is measured."""
    names = ("gym-gunicorn", "gunicorn", "uvicorn", "starlette", "aiohttp", "uvloop", "httptools")
    return ", ".join(f"{name} {version(name)}" for name in names)


def picture(run: Run) -> str:
    """Return the plot of the ratios of CPU time a request."""
    panels: dict[str, dict[str, Estimate]] = {}
    for work, results in run.results.items():
        base = results.get(run.base_of(work))
        if base is not None:
            panels[f"{WORKS[work].title} (1: {base.title})"] = {
                result.title: ratio(result.cpu_us, base.cpu_us) for result in results.values() if not result.fault
            }
    return plot.ratios("CPU a request of all server processes, as a ratio; median and 90% interval", panels)


def _taking_part(setups: Sequence[Setup], work: Work) -> list[Setup]:
    return [setup for setup in setups if not setup.only or work.name in setup.only]
