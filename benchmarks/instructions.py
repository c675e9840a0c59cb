"""Counts the instructions that a request takes, where this machine's processor and kernel let ``perf stat``.

They don't change with the clock rate and with what else runs, so a small growth shows that times hide.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence

from benchmarks.callers import Caller, drive
from benchmarks.servers import Server


def per_request(server: Server, callers: Sequence[Caller], seconds: float, event: str = "instructions") -> float | None:
    """Return how often the event happened for each request, in all of the server's processes.

    Returns:
        The number, or ``None`` where it can't be counted.
    """
    perf = shutil.which("perf")
    if perf is None:
        return None
    pids = ",".join(map(str, server.roles))
    # The shell's line says that counting has begun, and it ends when it is sent one.
    command = [perf, "stat", "-x", ",", "-e", event, "-p", pids, "--", "sh", "-c", "echo; read line"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, process_group=0) as process:
        assert process.stdout is not None
        requests = 0
        try:
            if process.stdout.readline():
                requests = drive(callers, seconds).requests
        finally:
            _, said = process.communicate(b"\n")
    found = re.search(rb"^([\d.]+),", said, re.MULTILINE)
    return float(found[1]) / requests if found and requests else None
