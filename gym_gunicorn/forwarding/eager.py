"""Starts a coroutine at once, and makes a task of it only if it has to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Generator
from typing import Any


def start(coroutine: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> asyncio.Task[None] | None:
    """Run ``coroutine`` up to where it first waits; return the task that goes on with it, or ``None`` if it has ended.

    Most requests' bodies are there when they are asked for, and a task costs more than
    passing one on. Python 3.12 has this as ``asyncio.Task(eager_start=True)``.

    Raises:
        Exception: whatever the coroutine raises before it waits.
    """
    try:
        waits_for = coroutine.send(None)
    except StopIteration:
        return None
    return loop.create_task(_go_on(_Started(coroutine, waits_for)))


class _Started:
    """Awaits a coroutine that has begun, and waits for ``waits_for``."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        while True:
            try:
                try:
                    value = yield waits_for
                except BaseException as error:
                    waits_for = self._coroutine.throw(error)
                else:
                    waits_for = self._coroutine.send(value)
            except StopIteration:
                return


async def _go_on(started: _Started) -> None:
    await started
