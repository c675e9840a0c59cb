"""Starts the processes that load configuration and app, and brings back what they found."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from gym_gunicorn.cli.diagnosis.facts import Failure, Inspection, inspection_from


def load(arguments: Sequence[str], seconds: float) -> Inspection:
    """Load what gunicorn would load for ``arguments``, in a process of its own, for at most ``seconds``.

    What it prints is dropped: nobody knows what is in it. What it starts ends with it.
    """
    with tempfile.TemporaryFile() as report:
        # -P: gunicorn's command does not have the working directory on the import path either,
        # before it puts it there itself.
        command = [sys.executable, "-P", "-B", "-m", f"{__package__}.inspection", str(report.fileno()), *arguments]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[report.fileno()],
            start_new_session=True,
        )
        try:
            in_time = _has_ended(process, seconds)
        finally:
            # Before it is waited for, so that the number of its group can't be another's by now.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status = process.wait()
        report.seek(0)
        text = report.read()
    if in_time and status == 0 and text:
        with contextlib.suppress(ValueError):
            return inspection_from(json.loads(text))
    return Inspection(failure=Failure("application", _ending(status if in_time else None, seconds)))


def _has_ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait until a process has ended, and tell whether it has in time; it is not reaped, where the platform can."""
    deadline = time.monotonic() + seconds
    while not _is_dead(process):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def _is_dead(process: subprocess.Popen[bytes]) -> bool:
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _ending(status: int | None, seconds: float) -> str:
    if status is None:
        return f"it was not loaded within {seconds:g} seconds"
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"the process that loads it was ended by {name}"
    return f"the process that loads it ended by itself, with status {status}"
