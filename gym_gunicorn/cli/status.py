"""``gym-gunicorn status``: what the workers of this user's servers do."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from types import FrameType

from gym_gunicorn.cli.servers import Server, Where, Worker, find

_MEANINGS = """\
stamped    sessions that the worker stamped or adopted since it started
active     requests in progress
local      requests that were handled by the worker that they reached
forwarded  requests that the worker sent to their sessions' owners
received   requests that it took from other workers
gone       410s that it answered
errors     requests that a living owner did not answer: busy (503), broken (502), truncated
loop lag   how late its event loop was of late; where it stands still, since when
PSS        its memory, with what it shares with others counted by its part
The row "ended" is of all workers that have ended.
"""

# Changes where a key of the JSON goes or gets another meaning; not where one is added.
VERSION = 1

_FIGURES = ("stamped", "active", "local", "forwarded", "received", "gone", "busy", "broken", "truncated")
_MORE_FIGURES = ("websockets", "connections", "sent_bytes", "received_bytes")
_TOTALS = (*(name for name in _FIGURES if name != "active"), "websockets", "sent_bytes", "received_bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``status`` alone."""
    parser.epilog = _MEANINGS
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--json", action="store_true", help="for scripts: one line of JSON, with keys that stay")
    parser.add_argument("--watch", action="store_true", help="look again and again, as top does, until Ctrl-C")
    parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="between two looks of --watch (default: 1)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Show the servers; return 0 where there is one, or 1."""
    where = Where(arguments.sockets, arguments.pid)
    if arguments.watch:
        _watch(where, arguments.interval, arguments.json)
        return 0
    servers = find(where)
    if arguments.json:
        print(json.dumps(as_json(servers)))
    elif servers:
        from gym_gunicorn.cli.table import console, table

        screen = console()
        screen.print(table(servers, screen.width))
    if not servers:
        print(not_found(where), file=sys.stderr)
    return 0 if servers else 1


def not_found(where: Where) -> str:
    """Return the line that says where no server was found."""
    advice = "" if where.sockets or where.pid else ". --sockets names another folder, --pid a process"
    return f"No running server of this user with session routing in {where}{advice}"


def as_json(servers: list[Server]) -> dict[str, object]:
    """Return what there is to know of the servers, under keys that stay."""
    return {"version": VERSION, "servers": [_server(server) for server in servers]}


def _server(server: Server) -> dict[str, object]:
    sums = server.sums()
    return {
        "directory": server.directory,
        "arbiters": [
            {
                "pid": arbiter.process.pid,
                "name": arbiter.name,
                "addresses": list(arbiter.addresses),
                "workers": arbiter.workers,
                "reloads": arbiter.reloads,
                "placement": arbiter.placement,
                "version": arbiter.version,
                "age_seconds": round(arbiter.process.age(), 3),
            }
            for arbiter in server.arbiters
        ],
        "unevenness": server.unevenness(),
        "totals": {name: sums[name] for name in _TOTALS},
        "workers": [_worker(worker) for worker in server.workers],
    }


def _worker(worker: Worker) -> dict[str, object]:
    reading, process = worker.reading, worker.process
    facts: dict[str, object] = {
        "owner": worker.owner_id,
        "pid": None if reading is None else reading["pid"],
        "arbiter": None if process is None else process.parent,
        "state": worker.state,
        "age_seconds": None if process is None else round(process.age(), 3),
        "pss_bytes": None if process is None else process.pss,
        "rss_bytes": None if process is None else process.rss,
        "silence_seconds": None if reading is None else round(reading.silence(), 3),
        "loop_lag_seconds": None if reading is None else reading["lag"] / 1e9,
        "errors": None if reading is None else worker.errors,
    }
    facts.update({name: None if reading is None else reading[name] for name in (*_FIGURES, *_MORE_FIGURES)})
    return facts


def _watch(where: Where, interval: float, as_lines: bool) -> None:
    # So that the terminal is as it was after that, too.
    before = signal.signal(signal.SIGTERM, _end)
    try:
        if as_lines:
            while True:
                print(json.dumps(as_json(find(where))), flush=True)
                time.sleep(interval)
        from gym_gunicorn.cli.table import watch

        watch(where, interval)
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError("must be a number of seconds from 0.1 to 3600")
    return value
