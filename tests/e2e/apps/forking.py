"""An app that forks a child while it is imported."""

from __future__ import annotations

import os
import signal

from tests.e2e.apps.journal import note
from tests.e2e.apps.probe import app

__all__ = ["app"]

_child = os.fork()
if _child == 0:
    for _signum in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(_signum, signal.SIG_IGN)
    while True:
        signal.pause()
note(f"forked {_child}")
