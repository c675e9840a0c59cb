"""``scripts/bench``: what the routing costs beside the other ways to serve, and how that grows."""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from benchmarks import growth_report, report
from benchmarks.comparison import compare, picture
from benchmarks.evenness import measure
from benchmarks.growth import grow
from benchmarks.servers import NotStarted
from benchmarks.setups import again, setups
from benchmarks.works import WORKS

_ROOT = Path(__file__).resolve().parent.parent
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    all_setups = setups()
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="rounds for each work and set-up (default: 20)")
    parser.add_argument("--seconds", type=float, default=0.3, help="the length of a round (default: 0.3)")
    parser.add_argument("--works", default=",".join(WORKS), help="which, separated by commas (default: %(default)s)")
    parser.add_argument("--setups", help=f"which, separated by commas (default: {','.join(all_setups)})")
    parser.add_argument("--base", default="haproxy-table", help="what ratios are to (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="measure the base twice: what a ratio is worth")
    parser.add_argument("--out", default="", help="the folder for report, plot and figures (default: docs)")
    parser.add_argument("--quick", action="store_true", help="3 rounds of 0.15 s: whether all works, not how fast")
    parser.add_argument("--growth", action="store_true", help="how cost grows with workers, sessions, connections")
    parser.add_argument("--placement", action="store_true", help="how evenly new sessions fall on the workers")
    parser.add_argument("--sessions", type=int, default=1_000_000, help="with --growth: how many come and go")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.rounds, chosen.seconds = 3, 0.15
        chosen.sessions = min(chosen.sessions, 2000)
    if chosen.rounds < 1 or chosen.seconds <= 0 or chosen.sessions < 1:
        parser.error("--rounds, --seconds and --sessions are numbers above 0")
    default = "one,ours-framed,ours-aiohttp" if chosen.growth else ",".join(all_setups)
    names = (chosen.setups or default).split(",")
    for what, wanted, known in (
        ("set-up", [*names, chosen.base], all_setups),
        ("work", chosen.works.split(","), WORKS),
    ):
        if unknown := [name for name in wanted if name not in known]:
            parser.error(f"there is no {what} {unknown[0]!r}; there are {', '.join(known)}")
    chosen.setups = [all_setups[name] for name in names]
    chosen.works = [WORKS[name] for name in chosen.works.split(",")]
    if chosen.again:
        chosen.setups += [again(setup) for setup in chosen.setups if setup.name == chosen.base]
    chosen.out = Path(os.environ.get("BENCH_FROM", "."), chosen.out) if chosen.out else _ROOT / "docs"
    return chosen


def main() -> int:
    """Measure, print the tables, and write report, plot and figures."""
    chosen = options(sys.argv[1:])
    for signum in _ENDING:
        signal.signal(signum, _stop)
    # Thousands of connections: the servers inherit this.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    chosen.out.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            if chosen.placement:
                measure(max(1, chosen.rounds // 2), chosen.out)
                return 0
            return _grow(chosen, Path(folder)) if chosen.growth else _compare(chosen, Path(folder))
    except NotStarted as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def _stop(signum: int, frame: FrameType | None) -> None:
    """End this run and its servers, and be asked once: a second Ctrl-C would leave some of them behind."""
    for ending in _ENDING:
        signal.signal(ending, signal.SIG_IGN)
    raise KeyboardInterrupt


def _compare(chosen: argparse.Namespace, folder: Path) -> int:
    run = compare(chosen.setups, chosen.works, chosen.base, chosen.rounds, chosen.seconds, folder)
    (chosen.out / "benchmark.json").write_text(json.dumps(report.raw(run), indent=1) + "\n")
    (chosen.out / "benchmark.svg").write_text(picture(run))
    (chosen.out / "benchmark.md").write_text(report.markdown(run, "benchmark.svg"))
    print(report.terminal(run))
    faults = [result for of in run.results.values() for result in of.values() if result.fault]
    return 1 if faults else 0


def _grow(chosen: argparse.Namespace, folder: Path) -> int:
    found = grow(chosen.setups, chosen.rounds, chosen.seconds, chosen.sessions, folder)
    (chosen.out / "growth.json").write_text(json.dumps(growth_report.raw(found), indent=1) + "\n")
    (chosen.out / "growth.svg").write_text(growth_report.picture(found))
    (chosen.out / "growth.md").write_text(growth_report.markdown(found, "growth.svg"))
    print(growth_report.terminal(found))
    results = [result for of in found.axes.values() for each in of.values() for result in each.values()]
    results += [result for looks in found.passed.values() for look in looks for result in (look.old, look.fresh)]
    return 1 if found.faults or any(result.fault for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
