"""The probe, whose import a test can hold up."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.e2e.apps.journal import note

note("loading")
while (Path(os.environ["JOURNAL"]) / "loading takes long").exists():
    time.sleep(0.02)

from tests.e2e.apps.probe import app  # noqa: E402

__all__ = ["app"]
