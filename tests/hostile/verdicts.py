"""What becomes of bytes that two readers may cut into requests differently, sent both to the owner and to a sibling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from tests.difference.exchange import NO_REPLY, Configuration, Connection, Pair, Reply, request, running_pair
from tests.workers import Worker

MAX_REPLIES = 50


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Say which worker's app was asked for what, by whom."""
    body = b""
    more_body = True
    while more_body:
        message = await receive()
        body += message.get("body", b"")
        more_body = message.get("more_body", False)
    seen = {
        "by": scope["state"]["made by"],
        "method": scope["method"],
        "target": scope["raw_path"].decode("latin-1"),
        "query": scope["query_string"].decode("latin-1"),
        "body": body.decode("latin-1"),
        "cookies": [value.decode("latin-1") for name, value in scope["headers"] if name == b"cookie"],
        "headers": [[name.decode("latin-1"), value.decode("latin-1")] for name, value in scope["headers"]],
    }
    content = json.dumps(seen).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": content})


@dataclass(frozen=True)
class Verdict:
    """The replies on one connection until it was closed; of each the status, the fields, and what it answers."""

    replies: tuple[tuple[int, tuple[bytes, ...], Any], ...]

    @property
    def statuses(self) -> tuple[int, ...]:
        return tuple(status for status, _, _ in self.replies)

    @property
    def is_whole(self) -> bool:
        """Whether every reply has come to its end."""
        return all(status != 200 or isinstance(seen, dict) for status, _, seen in self.replies)

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets of the requests that a handler has answered, in their order."""
        return tuple(seen["target"] for _, _, seen in self.replies if isinstance(seen, dict))


@contextmanager
def echoing_pair(http: str) -> Iterator[Pair]:
    """A running pair of workers that echo what they are asked for."""
    with running_pair(Configuration(http), ("", "")) as pair:
        pair.begin(echo)
        yield pair


def verdict(pair: Pair, worker: Worker, data: bytes) -> Verdict:
    """Send ``data``, which must have the connection closed at its end, and return what came of it."""
    with pair.connect(worker) as connection:
        connection.send_as_taken(data)
        return Verdict(tuple(_judged(pair, worker, reply) for reply in _replies(connection)))


def _replies(connection: Connection) -> Iterator[Reply]:
    for _ in range(MAX_REPLIES):
        reply = connection.reply()
        if reply == NO_REPLY:
            return
        yield reply
    raise AssertionError("the connection is not closed")


def _judged(pair: Pair, worker: Worker, reply: Reply) -> tuple[int, tuple[bytes, ...], Any]:
    """Return what a reply says, the same for both ways: who answered is checked here, and left out."""
    if reply.status != 200 or not reply.complete:
        return reply.status, reply.fields, reply.body
    seen = json.loads(reply.body)
    by = {"app 1": pair.owner, "app 2": pair.other}[seen.pop("by")]
    # Of several cookies the last counts. (uvicorn 0.54 with httptools takes trailers for fields, if they come at once.)
    has_session = seen["cookies"][-1:] == [pair.cookie.decode()]
    assert by is (pair.owner if has_session else worker), "served by another worker than it belongs to"
    # The fields are the same, Content-Length too: the names of both apps are of one length.
    return reply.status, reply.fields, seen


def private_requests(pair: Pair) -> int:
    """Return how many requests the owner has answered on its private socket."""
    assert pair.owner.routed is not None
    return pair.owner.routed.private.state.total_requests


def forwards(pair: Pair) -> int:
    """Return how many requests the other worker has passed on."""
    assert pair.other.routed is not None
    return pair.other.routed.forwarder.finished


def victims_are_answered(pair: Pair, name: str) -> None:
    """Fail where others' requests, over the connections between workers, get anything but their own answer."""
    for number in range(3):
        target = f"/victim/{name}/{number}"
        body = f"body of {number}".encode()
        with pair.connect(pair.other) as connection:
            connection.send(request(b"POST", target.encode(), b"Content-Length: %d" % len(body), body=body))
            reply = connection.reply()
            seen = json.loads(reply.body)
            assert (reply.status, seen["target"], seen["body"]) == (200, target, body.decode())
            assert seen["by"] == "app 1"
            assert connection.is_kept()
