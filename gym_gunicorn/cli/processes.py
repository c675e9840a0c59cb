"""What Linux tells of a process (proc(5)), for who has nothing but its pid."""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PSS = re.compile(rb"^Pss:\s+(\d+) kB$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Process:
    """A process that has not ended.

    ``start`` is in clock ticks since the boot. ``stopped``: by a signal or a debugger.
    ``pss`` and ``rss`` are bytes of memory: what it shares with others counted by its part,
    and in full; ``pss`` is ``None`` where this user may not know it.
    """

    pid: int
    parent: int
    start: int
    stopped: bool
    pss: int | None
    rss: int

    def age(self) -> float:
        """Return for how many seconds it has been there."""
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self.start / _TICKS)

    def was_there(self, monotonic_ns: int) -> bool:
        """Tell whether it had been started by a moment of the monotonic clock: if not, its pid was another's then."""
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic() + monotonic_ns / 1e9
        return self.start / _TICKS <= since_boot


def process(pid: int) -> Process | None:
    """Return what there is to know of a process, or ``None`` where there is none, or only a zombie."""
    try:
        stat = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
        state, parent, start, pages = stat[0], int(stat[1]), int(stat[19]), int(stat[21])
    except (OSError, ValueError, IndexError):
        return None
    if state in b"ZXx":
        return None
    pss = None
    with contextlib.suppress(OSError):
        found = _PSS.search(_read(f"/proc/{pid}/smaps_rollup"))
        pss = None if found is None else int(found[1]) * 1024
    return Process(pid, parent, start, state in b"Tt", pss, pages * _PAGE)


def open_paths(pid: int) -> list[str]:
    """Return the paths of what a process has open, as far as this user may know."""
    paths = []
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                paths.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return sorted(set(paths))


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
