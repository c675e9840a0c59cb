"""The kinds of work that are measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.callers import Caller, Exchange
from benchmarks.content import KIB, MIB, PATTERN
from benchmarks.exchanges import (
    CreateExchange,
    EchoExchange,
    EventsExchange,
    JsonExchange,
    ReplyExchange,
)
from benchmarks.servers import Server
from benchmarks.sessions import Placement, callers


@dataclass(frozen=True)
class Work:
    """One kind of work.

    Args:
        name: what ``--works`` calls it.
        title: what the report calls it.
        exchange: makes what each caller does.
        connections: how many callers there are, each with one request in flight at a time.
        sessions: how many sessions they have together; 0: the requests need none.
        shared: whether all connections carry all sessions.
        placement: see ``sessions.Placement``.
        workers: how many workers there are, in set-ups of more than one.
        base: the set-up that the others are compared with, where that isn't the run's.
        longer: how many times as long its rounds are, where few requests fit into a short one.
    """

    name: str
    title: str
    exchange: Callable[[], Exchange]
    connections: int
    sessions: int
    shared: bool = True
    placement: Placement = "spread"
    workers: int = 4
    base: str = ""
    longer: float = 1

    def callers(self, server: Server) -> list[Caller]:
        """Return the callers, ready to begin."""
        return callers(server, self.exchange(), self.connections, self.sessions, self.shared, self.placement)


def _json() -> JsonExchange:
    return JsonExchange("/count", b'{"text": "a small question"}', b',"echo":"a small question"')


def _upload(size: int) -> Callable[[], Exchange]:
    return lambda: JsonExchange("/upload", PATTERN[:size], b',"same":true')


WORKS = {
    work.name: work
    for work in (
        Work("json-pooled", "small JSON, sessions share a pool of connections", _json, 16, 64),
        Work("json-each", "small JSON, a connection a session", _json, 32, 32, shared=False),
        Work("json-home", "small JSON, each connection at its session's owner", _json, 16, 16, False, "home"),
        Work("json-away", "small JSON, each request forwarded, one at a time", _json, 1, 16, False, "away"),
        Work(
            "as-they-fall", "small JSON, 200 sessions and 16 connections as they fall", _json, 16, 200, True, "fallen"
        ),
        Work("upload-256k", "request bodies of 256 KiB", _upload(256 * KIB), 8, 16),
        Work("upload-4m", "request bodies of 4 MiB", _upload(4 * MIB), 4, 16, longer=2),
        Work("reply-64k", "replies of 64 KiB", lambda: ReplyExchange(64 * KIB), 16, 64),
        Work("reply-8m", "replies of 8 MiB", lambda: ReplyExchange(8 * MIB), 4, 16, longer=2),
        Work("events", "a streamed reply of 1,000 events", EventsExchange, 8, 16, longer=2),
        Work("websocket", "WebSocket echo", EchoExchange, 16, 16, shared=False),
        Work("create", "session creation", CreateExchange, 16, 0, shared=False),
        Work(
            "compute",
            "a handler that computes for 20 ms",
            lambda: JsonExchange("/compute"),
            8,
            16,
            workers=2,
            base="one",
        ),
    )
}
