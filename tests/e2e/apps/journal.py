"""What an app under test notes down for the test, and waits for from it.

``$JOURNAL`` is a folder: the app's processes append lines to ``lines`` in it, and the
test makes a file in it to release a handler that waits for that name.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path


def note(*words: object) -> None:
    """Append a line, which ends with this process's pid."""
    if folder := os.environ.get("JOURNAL"):
        line = " ".join(map(str, (*words, os.getpid()))) + "\n"
        with open(os.path.join(folder, "lines"), "a") as lines:
            lines.write(line)


async def released(name: str) -> None:
    """Wait until the test releases ``name``."""
    path = Path(os.environ["JOURNAL"]) / name
    while not path.exists():  # noqa: ASYNC110  # the event is another process's
        await asyncio.sleep(0.02)
