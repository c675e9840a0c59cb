"""What a worker counts: in one small memory-mapped file of its own in the socket directory.

Written in place, with no lock and no system call; whoever reads it copies the whole
file, so that neither a writer nor a truncated file can hurt a reader. All values are
unsigned 64-bit numbers in the machine's order, which one store changes as a whole.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gym_gunicorn.owner import is_owner_id

SUFFIX = ".figures"
TOTAL = "total"

# Changes with the meaning or the order of what follows: a file of another release is not read.
_FORMAT = int.from_bytes(b"GymFig\x00\x01", "big")

# Seconds, as upper bounds of the buckets in which the time that a forward adds is counted;
# one bucket more is for all that is longer.
ADDED_BOUNDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_FACTS = ("format", "pid", "started", "beat", "state", "generation", "secret", "active", "connections", "lag")
_COUNTERS = (
    *("stamped", "local", "forwarded", "received", "websockets", "sent_bytes", "received_bytes"),
    *("gone", "busy", "broken", "truncated", "added_ns"),
    *(f"added_{number}" for number in range(len(ADDED_BOUNDS) + 1)),
)
# The fact of a total that says, as a number, whose figures were added to it last.
_FOLDED = "pid"

_PLACES = {name: place for place, name in enumerate((*_FACTS, *_COUNTERS))}
_FIRST_COUNTER = len(_FACTS)
_FILE = struct.Struct(f"={len(_PLACES)}Q")

# Places of the values in a file.
FORMAT, PID, STARTED, BEAT, STATE, GENERATION, SECRET, ACTIVE, CONNECTIONS, LAG = range(_FIRST_COUNTER)
STAMPED, LOCAL, FORWARDED, RECEIVED, WEBSOCKETS = (
    _PLACES[name] for name in ("stamped", "local", "forwarded", "received", "websockets")
)
SENT_BYTES, RECEIVED_BYTES = _PLACES["sent_bytes"], _PLACES["received_bytes"]
GONE, BUSY, BROKEN, TRUNCATED = (_PLACES[name] for name in ("gone", "busy", "broken", "truncated"))
ADDED_NS, ADDED = _PLACES["added_ns"], _PLACES["added_0"]

STARTING, SERVING, STOPPING = range(3)
STATES = ("starting", "serving", "stopping")


class Figures:
    """One worker's own figures, to be written.

    ``values[LOCAL] += 1`` counts. ``values`` is another one after ``restore``: keep the
    ``Figures``, not its ``values``.

    Args:
        path: of the file, or ``None`` for figures that nobody else reads.

    Raises:
        OSError: the file can't be made, or there is no room for it.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path
        self._map = _new_map(path)
        self.values = memoryview(self._map).cast("Q")
        self.values[FORMAT] = _FORMAT
        self.values[PID] = os.getpid()
        self.values[STARTED] = time.time_ns()
        self.values[BEAT] = time.monotonic_ns()

    def serve(self) -> None:
        """Note that the worker serves from now on."""
        self.values[BEAT] = time.monotonic_ns()
        self.values[STATE] = SERVING

    def beat(self, interval: float) -> None:
        """Note that the event loop goes round, which it is to do every ``interval`` seconds, and how late it is."""
        values, now = self.values, time.monotonic_ns()
        late = max(0, now - values[BEAT] - int(interval * 1e9))
        # The worst is remembered for about a second, so that who looks once a second sees it.
        values[LAG] = max(late, values[LAG] * 3 // 4)
        values[BEAT] = now

    def reading(self, owner_id: str) -> Reading:
        """Return what the figures of the worker ``owner_id`` are now."""
        return Reading(owner_id, tuple(self.values))

    def stamped(self) -> None:
        """Count a session that is stamped."""
        self.values[STAMPED] += 1

    def added(self, nanoseconds: int) -> None:
        """Count how much longer a reply took because it was forwarded."""
        values = self.values
        values[ADDED + bisect_left(ADDED_BOUNDS, nanoseconds / 1e9)] += 1
        values[ADDED_NS] += nanoseconds

    def restore(self) -> None:
        """Make the file again where somebody has removed it.

        Raises:
            OSError: it can't be made.
        """
        if self.path is None or os.path.lexists(self.path):
            return
        before = self.values
        self._map = _new_map(self.path)
        self.values = memoryview(self._map).cast("Q")
        self.values[:] = before


@dataclass(frozen=True, slots=True)
class Reading:
    """What a file of figures held when it was read.

    ``owner_id`` is ``None`` for the total of the workers that have ended, which has
    counters, and of the facts the secret and the generation of the one that was added last.
    """

    owner_id: str | None
    values: tuple[int, ...]

    def __getitem__(self, name: str) -> int:
        """Return a value by its name: "pid", "local", "gone", ..."""
        return self.values[_PLACES[name]]

    @property
    def state(self) -> str:
        """Return "starting", "serving" or "stopping"."""
        number = self.values[STATE]
        return STATES[number] if number < len(STATES) else "unknown"

    def silence(self) -> float:
        """Return for how many seconds the worker's event loop has not gone round."""
        return max(0.0, (time.monotonic_ns() - self.values[BEAT]) / 1e9)

    @property
    def folded(self) -> int:
        """Return, of a total, whose figures were added to it last: the owner ID as a number."""
        return self[_FOLDED]

    def counters(self) -> dict[str, int]:
        """Return what only ever grows, by its name."""
        return dict(zip(_COUNTERS, self.values[_FIRST_COUNTER:], strict=True))


def figures_path(directory: str, owner_id: str) -> str:
    """Return the path of the figures of the worker ``owner_id``."""
    return os.path.join(directory, owner_id + SUFFIX)


def read_all(directory: str) -> tuple[list[Reading], Reading | None]:
    """Read the figures of all workers in a socket directory, oldest first, and the total of those that have ended.

    What is cut short, of another release or unreadable is left out.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return [], None
    try:
        while True:
            total = read(descriptor, TOTAL)
            workers = _read_workers(descriptor)
            # What an arbiter was adding to the total meanwhile would be counted twice, or not at all.
            if read(descriptor, TOTAL) == total:
                folded = None if total is None else total.folded
                return [reading for reading in workers if int(reading.owner_id or "0", 16) != folded], total
    except OSError:
        return [], None
    finally:
        os.close(descriptor)


def _read_workers(directory: int) -> list[Reading]:
    owners = [name.removesuffix(SUFFIX) for name in os.listdir(directory) if name.endswith(SUFFIX)]
    readings = [read(directory, owner) for owner in owners if is_owner_id(owner)]
    return sorted((reading for reading in readings if reading is not None), key=lambda reading: reading["started"])


def sums(workers: Sequence[Reading], total: Reading | None) -> dict[str, int]:
    """Return the counters of a whole server, by name: of its workers, and of those that have ended."""
    readings = [*workers, total] if total is not None else workers
    return {name: sum(reading[name] for reading in readings) for name in _COUNTERS}


def read(directory: int, stem: str) -> Reading | None:
    """Read one file of an open socket directory: an owner's, or ``TOTAL``; ``None`` where there is none to be read."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        descriptor = os.open(stem + SUFFIX, flags, dir_fd=directory)
    except OSError:
        return None
    try:
        return unpack(None if stem == TOTAL else stem, os.read(descriptor, _FILE.size + 1))
    except OSError:
        return None
    finally:
        os.close(descriptor)


def unpack(owner_id: str | None, data: bytes) -> Reading | None:
    """Return what a file holds, or ``None`` where it is cut short or of another release."""
    if len(data) != _FILE.size:
        return None
    values = _FILE.unpack(data)
    return Reading(owner_id, values) if values[FORMAT] == _FORMAT else None


def pack(secret: int, generation: int, folded: int, counters: Mapping[str, int]) -> bytes:
    """Return what a file of a total holds: see ``gym_gunicorn.metrics.totals``."""
    facts = {"format": _FORMAT, _FOLDED: folded, "secret": secret, "generation": generation}
    values = {**facts, **{name: value % 2**64 for name, value in counters.items()}}
    return _FILE.pack(*(values.get(name, 0) for name in _PLACES))


def _new_map(path: str | None) -> mmap.mmap:
    if path is None:
        return mmap.mmap(-1, _FILE.size)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Whatever the umask left of it; and with room, or a store would end the process (SIGBUS).
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, _FILE.size)
        return mmap.mmap(descriptor, _FILE.size)
    except BaseException:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)
