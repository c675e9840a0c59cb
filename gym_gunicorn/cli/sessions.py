"""``gym-gunicorn sessions``: whose a session is, and whether its owner lives."""

from __future__ import annotations

import argparse
import socket
import sys
import time
from dataclasses import dataclass

from gym_gunicorn.cli.decoding import Decoded, decode
from gym_gunicorn.cli.servers import Server, Where, Worker, find
from gym_gunicorn.cli.status import not_found
from gym_gunicorn.cli.words import duration, several
from gym_gunicorn.forwarding.sockets import socket_path
from gym_gunicorn.settings import Settings

_MOST_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the owner of a session lives, and what there is to say of it."""

    lives: bool
    text: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``sessions`` alone."""
    parser.add_argument(
        "carrier",
        nargs="?",
        default="-",
        metavar="OWNER|COOKIE|TOKEN",
        help="an owner ID, a session cookie or token, or a whole Cookie or Set-Cookie field; by default, and for -, "
        "it is read from standard input, where no other user's ps can see it",
    )
    parser.add_argument(
        "--owner-key",
        default=Settings.owner_key,
        metavar="KEY",
        help="the server's SessionRouting(owner_key=...) (default: %(default)s)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Say whose session it is; return 0 where its owner lives, or 1."""
    text = arguments.carrier
    if text == "-":
        text = sys.stdin.buffer.read(_MOST_BYTES).decode("utf-8", "replace")
    carriers = decode(text, arguments.owner_key)
    if not carriers:
        print("This is no owner ID, session cookie or session token. It may be cut short, or be another framework's")
        return 1
    where = Where(arguments.sockets, arguments.pid)
    servers = find(where)
    verdicts = [_verdict(carrier, where, servers) for carrier in carriers]
    for carrier, verdict in zip(carriers, verdicts, strict=True):
        print(f"{_described(carrier)}: {verdict.text}")
    return 0 if all(verdict.lives for verdict in verdicts) else 1


def _described(carrier: Decoded) -> str:
    words = carrier.kind.capitalize().replace(" id", " ID")
    if carrier.signed is not None:
        words += f", signed {duration(max(0.0, time.time() - carrier.signed))} ago"
    return words + (", signature not checked" if carrier.kind in ("session cookie", "session token") else "")


def _verdict(carrier: Decoded, where: Where, servers: list[Server]) -> Verdict:
    if carrier.owner is None:
        return Verdict(False, _no_owner(carrier))
    owner = f"owner {carrier.owner}"
    for server in servers:
        for worker in server.workers:
            if worker.owner_id == carrier.owner:
                return _found(owner, server, worker)
    if not servers:
        return Verdict(False, f"{owner} is not found. {not_found(where)}")
    workers = several(sum(len(server.workers) for server in servers), "worker")
    return Verdict(
        False,
        f"{owner} is gone, or was never here: none of {workers} of {several(len(servers), 'running server')} has this "
        "owner ID. It has ended (a reload, max_requests, a crash), or another server made the session",
    )


def _no_owner(carrier: Decoded) -> str:
    if carrier.elsewhere:
        return (
            "names no owner where it was looked for, but holds an owner ID under another key: give the server's own "
            "owner_key as --owner-key"
        )
    return (
        "names no owner. A server without routing made it, or one with a single worker, or the session began with a "
        "WebSocket handshake: whichever worker it reaches first adopts it"
    )


def _found(owner: str, server: Server, worker: Worker) -> Verdict:
    of = f"of {_name(server)}, sockets in {server.directory}"
    pid = "" if worker.reading is None else f" (pid {worker.reading['pid']})"
    if worker.reading is None:
        if _listens(socket_path(server.directory, worker.owner_id)):
            return Verdict(True, f"{owner} lives: a worker {of}, whose figures can't be read, listens for it")
        return Verdict(False, f"{owner} is dead: nobody listens for it any more, {of}")
    if worker.process is None:
        return Verdict(False, f"{owner} is dead: its process{pid} has ended, {of}")
    if worker.reading.state == "stopping":
        return Verdict(
            False,
            f"{owner} is stopping: worker{pid} {of} finishes what it has begun; new requests of the session get 410",
        )
    words = {
        "stopped": f"is stopped by a signal, has been silent for {duration(worker.reading.silence())}, and lets wait",
        "silent": f"has been silent for {duration(worker.reading.silence())}, held up by what computes, and lets wait",
    }
    doing = words.get(worker.state, f"is {worker.state}, up {duration(worker.process.age())}")
    return Verdict(True, f"{owner} lives: worker{pid} {doing}; {of}")


def _name(server: Server) -> str:
    return " and ".join(
        f"{arbiter.name or 'gunicorn'} (arbiter {arbiter.process.pid}, {' '.join(arbiter.addresses) or 'no address'})"
        for arbiter in server.arbiters
    ) or ("a server whose arbiter is gone")


def _listens(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except BlockingIOError:
            # Its queue is full.
            return True
        except OSError:
            return False
    return True
