"""Finds the running servers of this user by their socket directories, and reads what these hold."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from gym_gunicorn.cli.processes import Process, open_paths, process
from gym_gunicorn.lifecycle import arbiter_record
from gym_gunicorn.lifecycle.socket_directory import PREFIX
from gym_gunicorn.metrics.values import SUFFIX as FIGURES
from gym_gunicorn.metrics.values import Reading, read_all, sums
from gym_gunicorn.owner import is_owner_id
from gym_gunicorn.settings import Settings

# From how many times the mean on, and from how many sessions on, owners are said to be uneven; with few
# sessions chance alone makes them so.
UNEVEN = 1.5
_FEW = 20

# Seconds without a turn of its event loop after which a worker is said to be silent.
SILENT = 2.0

_SOCKET = ".sock"

# What an arbiter says of itself is a few hundred bytes.
_MOST_BYTES = 64 * 1024
_MOST_LETTERS = 200


@dataclass(frozen=True, slots=True)
class Where:
    """Where to look: ``sockets`` is a socket directory or the folder of some, ``pid`` an arbiter's or a worker's."""

    sockets: str | None = None
    pid: int | None = None

    def __str__(self) -> str:
        if self.pid is not None:
            return f"process {self.pid}" + ("" if self.sockets is None else f", {self.sockets}")
        if self.sockets is not None:
            return self.sockets
        return os.path.join(Settings.directory, PREFIX + "*")


@dataclass(frozen=True, slots=True)
class RunningArbiter:
    """What an arbiter says of itself. Each is ``None`` or empty where it is not to be read."""

    process: Process
    name: str | None
    addresses: tuple[str, ...]
    workers: int | None
    reloads: int | None
    placement: str | None
    version: str | None


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker: ``reading`` is ``None`` where its figures can't be read, ``process`` where it has ended."""

    owner_id: str
    reading: Reading | None
    process: Process | None

    @property
    def state(self) -> str:
        """Return "starting", "serving", "stopping", "silent", "stopped", "dead" or "unknown"."""
        if self.reading is None:
            return "unknown"
        if self.process is None:
            return "dead"
        if self.process.stopped:
            return "stopped"
        # While an app is loaded, and while requests are finished, there may be no loop that goes round.
        return "silent" if self.reading.state == "serving" and self.reading.silence() > SILENT else self.reading.state

    @property
    def errors(self) -> int:
        """Return how many requests it could not have answered by an owner that lives."""
        return 0 if self.reading is None else sum(self.reading[name] for name in ("busy", "broken", "truncated"))


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, or two of them, one of which has started the other (SIGUSR2), in one socket directory.

    ``workers`` are sorted by their age, the oldest first, ``total`` is of those that have ended.
    """

    directory: str
    arbiters: tuple[RunningArbiter, ...]
    workers: tuple[Worker, ...]
    total: Reading | None

    @property
    def pids(self) -> set[int]:
        """Return its processes."""
        workers = {worker.process.pid for worker in self.workers if worker.process is not None}
        return workers | {arbiter.process.pid for arbiter in self.arbiters}

    @property
    def readings(self) -> list[Reading]:
        """Return the figures that can be read."""
        return [worker.reading for worker in self.workers if worker.reading is not None]

    def sums(self) -> dict[str, int]:
        """Return its counters, those of ended workers included."""
        return sums(self.readings, self.total)

    def unevenness(self) -> float | None:
        """Return by how many times the worker with the most stamped sessions exceeds the mean: 1 is even."""
        stamped = [reading["stamped"] for reading in self.readings]
        return max(stamped) * len(stamped) / sum(stamped) if sum(stamped) else None

    def wants_placement(self) -> bool:
        """Tell whether new sessions fall so unevenly that they had better be placed, and nobody places them yet."""
        uneven = self.unevenness()
        many = sum(reading["stamped"] for reading in self.readings) >= _FEW
        placed = any(arbiter.placement not in (None, "local") for arbiter in self.arbiters)
        return uneven is not None and uneven > UNEVEN and many and not placed


def find(where: Where) -> list[Server]:
    """Return the running servers there."""
    if where.pid is not None:
        # Every arbiter and worker has its directory open.
        opened = [path for path in open_paths(where.pid) if os.path.basename(path).startswith(PREFIX)]
        if opened:
            return [server for path in opened if (server := _server(path)) is not None]
    servers = [server for path in sorted(set(_candidates(where))) if (server := _server(path)) is not None]
    return servers if where.pid is None else [server for server in servers if where.pid in server.pids]


def _candidates(where: Where) -> Iterator[str]:
    parent = os.path.realpath(where.sockets or Settings.directory)
    if where.sockets is not None:
        yield parent
    with contextlib.suppress(OSError):
        yield from (os.path.join(parent, name) for name in os.listdir(parent) if name.startswith(PREFIX))


def _server(path: str) -> Server | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.geteuid() not in (0, os.fstat(descriptor).st_uid):
            return None
        names = os.listdir(descriptor)
        owners = {stem for name in names for stem, end in [os.path.splitext(name)] if end in (FIGURES, _SOCKET)}
        owners = {owner for owner in owners if is_owner_id(owner)}
        arbiters = tuple(_arbiters(path, descriptor, names))
        # Last, since a directory that has just been made, and is about to be locked, is empty.
        if not (owners or arbiters) or not _is_held(descriptor):
            return None
    except OSError:
        return None
    finally:
        os.close(descriptor)
    readings, total = read_all(path)
    workers = [_worker(reading) for reading in readings]
    # Without figures, or with figures of another release, or with a file that is cut short.
    known = {worker.owner_id for worker in workers}
    workers += [Worker(owner, None, None) for owner in sorted(owners - known) if _is_there(path, owner)]
    return Server(path, arbiters, tuple(workers), total)


def _is_held(descriptor: int) -> bool:
    """Tell whether somebody holds a lock on an open directory."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def _is_there(directory: str, owner_id: str) -> bool:
    """Tell whether a worker has left something still: not the one that has ended since the names were read."""
    return any(os.path.lexists(os.path.join(directory, owner_id + suffix)) for suffix in (FIGURES, _SOCKET))


def _worker(reading: Reading) -> Worker:
    assert reading.owner_id is not None
    found = process(reading["pid"])
    there = found is not None and found.was_there(reading["beat"])
    return Worker(reading.owner_id, reading, found if there else None)


def _arbiters(path: str, directory: int, names: list[str]) -> Iterator[RunningArbiter]:
    """Yield the arbiters that live, the oldest first."""
    found = [_arbiter(path, directory, name) for name in names if name.endswith(arbiter_record.SUFFIX)]
    yield from sorted(
        (arbiter for arbiter in found if arbiter is not None),
        key=lambda arbiter: (arbiter.process.start, arbiter.process.pid),
    )


def _arbiter(path: str, directory: int, name: str) -> RunningArbiter | None:
    stem = name.removesuffix(arbiter_record.SUFFIX)
    if not (stem.isascii() and stem.isdecimal() and len(stem) < 20):
        return None
    running = process(int(stem))
    if running is None:
        return None
    try:
        facts = json.loads(_content(directory, name))
    except (OSError, ValueError, RecursionError):
        facts = None
    if not isinstance(facts, dict):
        facts = {}
    # Its pid may be another's by now; where what it says can't be read, what it has open tells.
    if facts.get("start") != running.start and ("start" in facts or path not in open_paths(running.pid)):
        return None
    addresses = facts.get("addresses")
    return RunningArbiter(
        running,
        _text(facts.get("name")),
        tuple(text for item in addresses[:20] if (text := _text(item))) if isinstance(addresses, list) else (),
        _number(facts.get("workers")),
        _number(facts.get("reloads")),
        _text(facts.get("placement")),
        _text(facts.get("version")),
    )


def _content(directory: int, name: str) -> bytes:
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(name, flags, dir_fd=directory)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{name} is no file")
        return os.read(descriptor, _MOST_BYTES)
    finally:
        os.close(descriptor)


def _text(value: object) -> str | None:
    """Return what can be shown on a terminal, whoever wrote it."""
    if not isinstance(value, str):
        return None
    return "".join(letter if letter.isprintable() else "?" for letter in value[:_MOST_LETTERS])


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None
