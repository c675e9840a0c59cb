"""What processes cost, from the operating system's accounting."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterable
from pathlib import Path


def cpu_ns(pids: Iterable[int]) -> int:
    """Return the CPU time in nanoseconds that all threads of the processes have taken since they began.

    From each process's CPU-time clock, which Linux lets others read: /proc/<pid>/stat counts in hundredths of a
    second, too coarse for a short round.

    Raises:
        ProcessLookupError: one of the processes is not there any more.
    """
    total = 0
    for pid in pids:
        try:
            # What clock_getcpuclockid(3) computes: the process's number, and 2 for CPUCLOCK_SCHED.
            total += time.clock_gettime_ns((~pid << 3) | 2)
        except OSError:
            raise ProcessLookupError(f"the process {pid} has ended") from None
    return total


def pss_bytes(pid: int, kind: str = "Pss") -> int:
    """Return the process's proportional set size: its own memory, and its part of what it shares.

    ``kind`` "Pss_Anon" leaves files out, of which its part grows when another process that has the same libraries ends.
    """
    found = re.search(rf"^{kind}:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    return int(found[1]) * 1024 if found else 0


def family(pid: int) -> list[int]:
    """Return the process, its children, and theirs: each before its children."""
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            found += family(int(child))
    return found


def machine() -> str:
    """Return in a line what this is measured on."""
    model = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cores = len(os.sched_getaffinity(0))
    kernel = f"{platform.system()} {platform.release()}"
    return f"{cores} cores ({model[1] if model else platform.machine()}), {kernel}, Python {platform.python_version()}"
