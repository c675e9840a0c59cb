"""The probe, which can't be imported where ``$BREAK`` is set."""

from __future__ import annotations

import os

if os.environ.get("BREAK"):
    raise RuntimeError("the app can't be loaded")

from tests.e2e.apps.probe import app

__all__ = ["app"]
