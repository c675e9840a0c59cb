"""The load: callers in a closed loop, each with a connection, and one request in flight on it.

One thread, one epoll and no framework, since the machine's cores are there for the servers: what
a request costs here is a system call to send, one to receive and a few comparisons.
"""

from __future__ import annotations

import gc
import select
import socket
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from benchmarks.asking import WrongAnswer

# An answer that takes longer will not come.
_PATIENCE_SECONDS = 60

Verdict = Literal["", "right", "stale"]


@dataclass(eq=False)
class Session:
    """A session of the app: what its caller sends and expects.

    Attributes:
        name: the app's ID of it.
        cookie: the value of the Cookie field.
        owner: the process that holds it; ``None`` where any may answer.
        count: how many requests were counted in it.
        request: the bytes of its request, made once.
    """

    name: bytes = b""
    cookie: bytes = b""
    owner: int | None = None
    count: int = 0
    request: bytes = b""


class Exchange(Protocol):
    """One request and its answer, as a kind of work asks for it."""

    # The bytes that an answer may have at most, with its head.
    capacity: int
    # What follows each session's request: a large body.
    body: bytes
    # What is asked for first, and answered, when a connection is new.
    opens: bool

    def open(self, connection: socket.socket, session: Session) -> None:
        """Prepare a new connection for the session's exchanges."""

    def request(self, session: Session) -> bytes:
        """Return what is sent before the body."""

    def verdict(self, caller: Caller, session: Session) -> Verdict:
        """Judge what was received: nothing yet, right, or complete but of a worker that lacks the session's state.

        Raises:
            WrongAnswer: it is anything else.
        """


@dataclass
class Load:
    """What one run of the callers came to. Times in nanoseconds."""

    wall_ns: int = 0
    generator_ns: int = 0
    stale: int = 0
    latencies: array[int] = field(default_factory=lambda: array("q"))

    @property
    def requests(self) -> int:
        return len(self.latencies)


class Caller:
    """A connection, and the sessions whose requests it carries: it takes the first, and puts it back as the last.

    Callers that share a deque share the sessions.
    """

    def __init__(self, connection: socket.socket, sessions: deque[Session], exchange: Exchange) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.sessions = sessions
        self.exchange = exchange
        self.buffer = bytearray(exchange.capacity)
        self._view = memoryview(self.buffer)
        # Of the exchange in flight
        self.session = sessions[0]
        self.began = 0
        self.filled = 0
        self.needed = 0
        self.unsent: memoryview | None = None

    def begin(self, now: int) -> None:
        """Send the next request, or as much of it as there is room for."""
        self.session = session = self.sessions.popleft()
        self.began = now
        self.filled = self.needed = 0
        request, body = self.exchange.request(session), self.exchange.body
        if not body:
            sent, length = self.connection.send(request), len(request)
        else:
            sent, length = self.connection.sendmsg((request, body)), len(request) + len(body)
        if sent < length:
            at = sent - len(request)
            self.unsent = memoryview(body)[at:] if at >= 0 else memoryview(request[sent:] + body)

    def go_on_sending(self) -> None:
        """Send more of the request."""
        if self.unsent is not None:
            self.unsent = self.unsent[self.connection.send(self.unsent) :] or None

    def receive(self) -> Verdict:
        """Take what has come; when the answer is complete, its session is free for the next."""
        room = self._view[self.filled :] if self.filled else self._view
        received = self.connection.recv_into(room)
        if not received:
            raise WrongAnswer(f"the connection ended after {bytes(self.buffer[: min(self.filled, 300)])!r}")
        self.filled += received
        verdict = self.exchange.verdict(self, self.session)
        if verdict:
            self.sessions.append(self.session)
        return verdict

    def close(self) -> None:
        self.connection.close()


def drive(callers: Sequence[Caller], seconds: float) -> Load:
    """Let the callers ask for so long, and wait for the answers to what they have asked.

    Raises:
        WrongAnswer: at the first answer that is wrong, or does not come.
    """
    load = Load()
    gc.disable()
    try:
        with select.epoll() as epoll:
            _drive(callers, seconds, load, epoll)
    except OSError as error:
        raise WrongAnswer(f"a connection broke: {error}") from None
    finally:
        gc.enable()
    return load


def _drive(callers: Sequence[Caller], seconds: float, load: Load, epoll: select.epoll) -> None:
    by_number = {caller.connection.fileno(): caller for caller in callers}
    both = select.EPOLLIN | select.EPOLLOUT
    for number in by_number:
        epoll.register(number, select.EPOLLIN)
    now_ns, latencies = time.perf_counter_ns, load.latencies
    generator = time.process_time_ns()
    began = now_ns()
    end = began + int(seconds * 1e9)
    for number, caller in by_number.items():
        caller.begin(now_ns())
        if caller.unsent is not None:
            epoll.modify(number, both)
    active = len(callers)
    while active:
        events = epoll.poll(_PATIENCE_SECONDS)
        if not events:
            raise WrongAnswer(f"{active} answers did not come within {_PATIENCE_SECONDS} s")
        for number, event in events:
            caller = by_number[number]
            if event & select.EPOLLOUT:
                caller.go_on_sending()
                if caller.unsent is None:
                    epoll.modify(number, select.EPOLLIN)
            if not event & ~select.EPOLLOUT:
                continue
            verdict = caller.receive()
            if verdict:
                now = now_ns()
                latencies.append(now - caller.began)
                load.stale += verdict == "stale"
                if now >= end:
                    active -= 1
                    continue
                caller.begin(now)
                if caller.unsent is not None:
                    epoll.modify(number, both)
    load.wall_ns = now_ns() - began
    load.generator_ns = time.process_time_ns() - generator
