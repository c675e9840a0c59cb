"""An app that loads much."""

from __future__ import annotations

import gc
import os

from fastapi import FastAPI

app = FastAPI()
# Some 35 MiB of objects that the garbage collector looks at.
loaded: list[list[int]] = [[] for _ in range(500_000)]


@app.get("/collect")
def collect() -> int:
    """Look for garbage among all objects; return this worker's pid."""
    gc.collect()
    return os.getpid()
