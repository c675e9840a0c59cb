"""The harness: a running pair of workers, a caller that writes raw bytes, an app that notes what it sees.

The pair runs in a thread with an event loop of its own, so that a test can be a plain
function with blocking sockets. ``FORWARDERS`` is the one place where another forwarder
is put under the whole suite.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import email.utils
import itertools
import os
import re
import socket
import ssl
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import uvloop
from starlette.middleware.sessions import SessionMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gym_gunicorn.forwarding.forwarder import Forwarder
from gym_gunicorn.forwarding.http.forwarder import AiohttpForwarder
from gym_gunicorn.forwarding.links.forwarder import FramedForwarder
from gym_gunicorn.forwarding.links.server import LinkServer
from tests.workers import Worker, running, socket_directory, until

FORWARDERS: Mapping[str, Callable[[str, int], Forwarder]] = {"aiohttp": AiohttpForwarder, "framed": FramedForwarder}

# Seconds. Nothing waits that long unless something is broken.
PATIENCE = 60.0

# Stands for the session cookie in the bytes of a request.
COOKIE = b"<the session cookie>"

_MAX_FORWARDS = 1000
_SESSION_PATH = b"/harness/session"
_PROBE_PATH = b"/harness/probe"
_PROBE = b"GET " + _PROBE_PATH + b" HTTP/1.1\r\nHost: probe\r\n\r\n"

_T = TypeVar("_T")


@dataclass(frozen=True)
class Configuration:
    """How both workers of a pair are served. ``server`` is passed on to uvicorn's ``Config``."""

    http: str = "httptools"
    tls: bool = False
    unix: bool = False
    forwarder: str = "aiohttp"
    server: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __str__(self) -> str:
        return "-".join(
            [
                self.forwarder,
                self.http,
                "tls" if self.tls else "plain",
                "unix" if self.unix else "tcp",
                *(f"{name}={value or None}" for name, value in self.server.items()),
            ]
        )


# h11 is what serves where httptools is not installed, and so is asyncio's own loop without uvloop.
_LOOPS: Mapping[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "httptools": uvloop.new_event_loop,
    "h11": asyncio.new_event_loop,
}

BOTH_PROTOCOLS: Sequence[Configuration] = [
    Configuration(http, forwarder=forwarder) for forwarder in FORWARDERS for http in ("httptools", "h11")
]
MATRIX: Sequence[Configuration] = [
    Configuration(http, tls, unix, forwarder)
    for forwarder in FORWARDERS
    for http in ("httptools", "h11")
    for tls in (False, True)
    for unix in (False, True)
]


# What the app does


def answer(
    status: int = 200,
    headers: Iterable[tuple[bytes, bytes]] = ((b"content-type", b"text/plain"), (b"content-length", b"4")),
    chunks: Sequence[bytes] = (b"seen",),
    *,
    read: bool = True,
) -> ASGIApp:
    """Return a handler that reads the request's body, where ``read`` is true, and replies with ``chunks``."""
    header_list = list(headers)

    async def handler(scope: Scope, receive: Receive, send: Send) -> None:
        more_body = read
        while more_body:
            message = await receive()
            more_body = message.get("more_body", False)
        await send({"type": "http.response.start", "status": status, "headers": list(header_list)})
        for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return handler


@dataclass
class Seen:
    """One call of the handler: ``app`` is whose, ``body`` is what it has read of the request's body."""

    app: str
    scope: dict[str, Any]
    body: bytearray = field(default_factory=bytearray)
    complete: bool = False
    disconnected: bool = False
    events: list[Message] = field(default_factory=list)
    ended: str | None = None


class Board:
    """What the test and the apps of a pair tell each other."""

    def __init__(self) -> None:
        self.handler: ASGIApp = answer()
        self.seen: list[Seen] = []


class RecordingApp:
    """Notes each call on the board, and answers as the board's handler does."""

    def __init__(self, name: str, board: Board) -> None:
        self.name = name
        self.board = board

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        elif scope["raw_path"].endswith(_SESSION_PATH):
            scope["session"]["made by"] = self.name
            await answer(204, (), ())(scope, receive, send)
        elif scope["raw_path"].endswith(_PROBE_PATH):
            await answer(200, [(b"content-length", b"5")], [b"probe"])(scope, receive, send)
        else:
            await self._recorded(scope, receive, send)

    async def _recorded(self, scope: Scope, receive: Receive, send: Send) -> None:
        seen = Seen(self.name, copy.deepcopy({key: value for key, value in scope.items() if key != "session"}))
        self.board.seen.append(seen)

        async def receive_noted() -> Message:
            message = await receive()
            if message["type"] == "http.request":
                seen.body += message.get("body", b"")
                seen.complete = not message.get("more_body", False)
            elif message["type"].startswith("websocket."):
                seen.events.append(dict(message))
            seen.disconnected = seen.disconnected or message["type"].endswith(".disconnect")
            return message

        try:
            await self.board.handler(scope, receive_noted, send)
        except BaseException as error:
            seen.ended = type(error).__name__
            raise
        seen.ended = "returned"

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        scope["state"].update({"made by": self.name})
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})


class Gate:
    """What a handler waits at until the test opens it."""

    def __init__(self, pair: Pair) -> None:
        self._loop = pair.loop
        self._event = asyncio.Event()

    def open(self) -> None:
        self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self) -> None:
        await self._event.wait()


# What the caller does


@dataclass(frozen=True)
class Reply:
    """A reply as it came. ``fields`` are the lines of the header list, ``complete`` tells whether its body ended.

    ``interim`` are the status lines of the informational replies before it.
    """

    status_line: bytes
    fields: tuple[bytes, ...] = ()
    body: bytes = b""
    complete: bool = True
    interim: tuple[bytes, ...] = ()

    @property
    def status(self) -> int:
        return int(self.status_line.split()[1]) if self.status_line else 0

    def values(self, name: bytes) -> list[bytes]:
        """Return the values of the fields of that name, in their order."""
        pairs = (line.partition(b":") for line in self.fields)
        return [value.strip() for key, _, value in pairs if key.lower() == name.lower()]


NO_REPLY = Reply(b"", complete=False)


class Connection:
    """A caller's connection to ``worker``, on which a test writes what it likes."""

    def __init__(self, pair: Pair, worker: Worker, receive_buffer: int | None = None) -> None:
        self.worker = worker
        family = socket.AF_UNIX if isinstance(worker.address, str) else socket.AF_INET
        raw = socket.socket(family)
        if family == socket.AF_INET:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_buffer is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.settimeout(PATIENCE)
        self._pair = pair
        self._buffer = bytearray()
        self._socket: socket.socket = raw
        try:
            raw.connect(worker.address)
            if pair.configuration.tls:
                self._socket = _tls_client().wrap_socket(raw, server_hostname="localhost")
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    @property
    def address(self) -> Any:
        return self._socket.getsockname()

    def send(self, data: bytes) -> None:
        """Write ``data``, with the session cookie in its place."""
        self._socket.sendall(data.replace(COOKIE, self._pair.cookie))

    def send_as_taken(self, data: bytes) -> None:
        """Write ``data`` as far as the server takes it."""
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            self.send(data)

    def leave(self) -> None:
        """Close the connection."""
        self._socket.close()

    def reset(self) -> None:
        """Break the connection off, as a caller's machine that has lost it does."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._socket.close()

    def end_sending(self) -> None:
        """Close the sending half of the connection."""
        self._socket.shutdown(socket.SHUT_WR)

    def reply(self, method: bytes = b"GET") -> Reply:
        """Read one reply to a request of that method."""
        head = self.head()
        if head == NO_REPLY:
            return head
        body, complete = self._body(head, method)
        return dataclasses.replace(head, body=body, complete=complete)

    def head(self) -> Reply:
        """Read one reply as far as its body."""
        interim: list[bytes] = []
        while True:
            head = self._until(b"\r\n\r\n")
            if head is None:
                return NO_REPLY
            status_line, *fields = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
            reply = Reply(status_line, tuple(map(_without_date, fields)), interim=tuple(interim))
            if reply.status >= 200 or reply.status == 101:
                return reply
            interim.append(status_line)

    def read(self, count: int) -> bytes:
        """Read ``count`` bytes, or less where the connection ends."""
        while len(self._buffer) < count and self._fill():
            pass
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        return data

    def rest(self) -> bytes:
        """Read what comes until the connection ends."""
        while self._fill():
            pass
        return self.read(len(self._buffer))

    def is_kept(self) -> bool:
        """Tell whether the server answers one more request on this connection, and has sent nothing unasked."""
        self.send_as_taken(_PROBE)
        reply = self.reply()
        if reply == NO_REPLY:
            return False
        assert (reply.status, reply.body, reply.interim) == (200, b"probe", ()), f"unasked: {reply}"
        return True

    def _fill(self) -> bool:
        try:
            data = self._socket.recv(2**18)
        except (ConnectionError, ssl.SSLError):
            return False
        self._buffer += data
        return bool(data)

    def _until(self, end: bytes) -> bytes | None:
        while (place := self._buffer.find(end)) < 0:
            if not self._fill():
                return None
        return self.read(place + len(end))

    def _body(self, reply: Reply, method: bytes) -> tuple[bytes, bool]:
        if method == b"HEAD" or reply.status in (101, 204, 304):
            return b"", True
        if reply.values(b"transfer-encoding") == [b"chunked"]:
            return self._chunks()
        if lengths := reply.values(b"content-length"):
            body = self.read(int(lengths[0]))
            return body, len(body) == int(lengths[0])
        return self.rest(), True

    def _chunks(self) -> tuple[bytes, bool]:
        body = bytearray()
        while (line := self._until(b"\r\n")) is not None:
            size = int(line, 16)
            chunk = self.read(size + 2)
            if len(chunk) < size + 2:
                return bytes(body + chunk), False
            body += chunk[:size]
            if size == 0:
                return bytes(body), True
        return bytes(body), False


HTTP_DATE = re.compile(rb"\w{3}, \d\d[ -]\w{3}[ -]\d{4} \d\d:\d\d:\d\d GMT")
"""A date in a reply's field (RFC 9110, 5.6.7): that of ``Date``, and that of a cookie which expires now."""


def _without_date(line: bytes) -> bytes:
    """Return a field with the time of the exchange, but no other date, taken out."""

    def masked(match: re.Match[bytes]) -> bytes:
        with contextlib.suppress(ValueError):
            if abs(email.utils.parsedate_to_datetime(match[0].decode()).timestamp() - time.time()) < 3600:
                return b"<now>"
        return match[0]

    return HTTP_DATE.sub(masked, line)


def _tls_client() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


# One case, both ways


def request(
    method: bytes = b"GET",
    target: bytes = b"/",
    *fields: bytes,
    body: bytes = b"",
    version: bytes = b"HTTP/1.1",
    host: bytes | None = b"Host: example.org",
) -> bytes:
    """Return the bytes of a request that carries the session cookie. ``fields`` are lines."""
    lines = [b" ".join((method, target, version)), *([] if host is None else [host]), b"Cookie: " + COOKIE, *fields]
    return b"".join(line + b"\r\n" for line in lines) + b"\r\n" + body


@dataclass(frozen=True)
class Case:
    """The same bytes, to be sent both ways.

    Args:
        name: what is special about it.
        request: the bytes.
        status: the statuses of the replies, or what they are for each protocol; 0 is no reply.
        handler: what the app does.
        methods: the methods of the requests in ``request``.
    """

    name: str
    request: bytes
    status: int | tuple[int, ...] | Mapping[str, int | tuple[int, ...]] = 200
    handler: ASGIApp = field(default_factory=answer)
    methods: tuple[bytes, ...] | None = None

    def __str__(self) -> str:
        return self.name

    def statuses(self, configuration: Configuration) -> tuple[int, ...]:
        status = self.status if isinstance(self.status, int | tuple) else self.status[configuration.http]
        return status if isinstance(status, tuple) else (status,)


@dataclass(frozen=True)
class Outcome:
    """What a caller can tell of its exchange, and what the handlers saw of it."""

    replies: tuple[Reply, ...]
    kept: bool
    seen: tuple[dict[str, Any], ...]

    @property
    def statuses(self) -> tuple[int, ...]:
        return tuple(reply.status for reply in self.replies)


@dataclass
class Pair:
    """Two running workers: ``owner`` holds the session of ``cookie``, ``other`` forwards to it."""

    configuration: Configuration
    loop: asyncio.AbstractEventLoop
    board: Board
    owner: Worker
    other: Worker
    directory: str
    cookie: bytes = b""
    _ended: asyncio.Event = field(default_factory=asyncio.Event)
    _tasks: Counter[str] = field(default_factory=Counter)

    @property
    def ways(self) -> tuple[Worker, Worker]:
        """The worker to send a request to straight, and the one to have it forwarded by."""
        return self.owner, self.other

    def connect(self, worker: Worker, receive_buffer: int | None = None) -> Connection:
        return Connection(self, worker, receive_buffer)

    def call(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        """Run ``coroutine`` on the workers' event loop and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)

    def begin(self, handler: ASGIApp) -> list[Seen]:
        """Have the apps answer with ``handler`` from now on, and return the list that its calls are noted in."""
        self.board.handler = handler
        self.board.seen = []
        return self.board.seen

    def outcome(self, case: Case, worker: Worker) -> Outcome:
        """Send ``case`` to ``worker`` and return what came of it."""
        seen = self.begin(case.handler)
        methods = case.methods or (case.request.split(b" ", 1)[0],)
        with self.connect(worker) as connection:
            connection.send(case.request)
            replies = tuple(connection.reply(method) for method in methods)
            kept = connection.is_kept()
            return Outcome(replies, kept, self.facts(seen, connection))

    def both_outcomes(self, case: Case) -> tuple[Outcome, Outcome]:
        """Send ``case`` both ways and return what came of it, directly and forwarded."""
        direct, forwarded = (self.outcome(case, worker) for worker in self.ways)
        return direct, forwarded

    def facts(self, seen: Iterable[Seen], connection: Connection) -> tuple[dict[str, Any], ...]:
        """Return what handlers saw, with what differs from connection to connection checked and named."""
        return tuple(self._facts(one, connection) for one in seen)

    def _facts(self, seen: Seen, connection: Connection) -> dict[str, Any]:
        listener = connection.worker.address
        server = (listener, None) if isinstance(listener, str) else listener
        caller = None if isinstance(listener, str) else connection.address
        facts: dict[str, Any] = {**seen.scope, "app": seen.app, "body": bytes(seen.body), "events": seen.events}
        facts["server"] = "the listener's" if facts["server"] == server else facts["server"]
        facts["client"] = "the caller's" if facts["client"] == caller else facts["client"]
        return facts

    def left_behind(self) -> dict[str, int]:
        """Count what is still going on in either worker."""
        return self.call(self._left_behind())

    async def _left_behind(self) -> dict[str, int]:
        left: Counter[str] = _tasks() - self._tasks
        for name, worker in (("owner", self.owner), ("other", self.other)):
            assert worker.routed is not None
            left[f"{name}: requests"] = len(worker.server.server_state.tasks)
            left[f"{name}: connections"] = len(worker.server.server_state.connections)
            left[f"{name}: forwarded requests"] = len(worker.routed.private.state.tasks)
            left[f"{name}: siblings' connections in use"] = sum(
                connection.cycle is not None and not connection.cycle.response_complete
                for connection in worker.routed.private.state.connections
                if not isinstance(connection, asyncio.StreamReaderProtocol) and hasattr(connection, "cycle")
            )
            left[f"{name}: siblings' links in use"] = sum(
                connection.is_busy()
                for connection in cast("set[object]", worker.routed.private.state.connections)
                if isinstance(connection, LinkServer)
            )
            left[f"{name}: forwards in flight"] = in_flight(worker.routed.forwarder)
        return dict(+left)

    def nothing_is_left(self) -> None:
        """Wait until nothing of what the callers began is left in either worker."""
        deadline = time.monotonic() + PATIENCE
        while left := self.left_behind():
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.01)


def _tasks() -> Counter[str]:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    return Counter(f"task {getattr(task.get_coro(), '__qualname__', task)}" for task in others)


def in_flight(forwarder: Forwarder) -> int:
    """Count the exchanges in flight. A forwarder of another kind is taken apart here too."""
    if isinstance(forwarder, FramedForwarder):
        return forwarder._peers.in_flight + forwarder._http._peers.in_flight
    assert isinstance(forwarder, AiohttpForwarder)
    return forwarder._peers.in_flight


def handlers_end(seen: Sequence[Seen]) -> None:
    """Wait until all calls of the handler have ended."""
    eventually(lambda: all(one.ended for one in seen), "the handler's end")


def handlers_call(seen: Sequence[Seen]) -> None:
    """Wait until the handler has been called."""
    eventually(lambda: seen, "the handler's call")


def eventually(condition: Callable[[], object], what: str) -> None:
    """Wait for ``condition``, and fail with ``what`` where it does not come true in time."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.005)


@contextlib.contextmanager
def running_pair(configuration: Configuration, certificate: tuple[str, str]) -> Iterator[Pair]:
    """Run a pair of workers in a thread. ``certificate`` are the files of a certificate and its key."""
    ready: Future[Pair] = Future()
    # Callers here answer no pings, and may be slow.
    # h11's limit of 16 KiB counts what has come so far, so that it would depend on how the bytes are cut.
    config = {"h11_max_incomplete_event_size": 2**20, "ws_ping_interval": None, **configuration.server}
    if configuration.tls:
        config["ssl_certfile"], config["ssl_keyfile"] = certificate

    def run() -> None:
        try:
            with asyncio.Runner(loop_factory=_LOOPS[configuration.http]) as runner:
                runner.run(_serve(configuration, config, ready))
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    thread = threading.Thread(target=run, name=str(configuration))
    thread.start()
    try:
        pair = ready.result(PATIENCE)
        pair.cookie = new_session(pair)
        # What leads to the owner is opened with the first request for it.
        assert pair.outcome(Case("warm-up", request()), pair.other).statuses == (200,)
        pair.call(_note_tasks(pair))
        pair.nothing_is_left()
        yield pair
    finally:
        if ready.done() and ready.exception() is None:
            pair = ready.result()
            pair.loop.call_soon_threadsafe(pair._ended.set)
        thread.join()


def new_session(pair: Pair) -> bytes:
    """Have the owner make a session and return its cookie."""
    with pair.connect(pair.owner) as connection:
        connection.send(b"GET " + _SESSION_PATH + b" HTTP/1.1\r\nHost: harness\r\n\r\n")
        (cookie,) = connection.reply().values(b"set-cookie")
    return cookie.split(b";")[0]


async def _note_tasks(pair: Pair) -> None:
    await until(lambda: not any(worker.server.server_state.connections for worker in pair.ways))
    pair._tasks = _tasks()


async def _serve(configuration: Configuration, config: dict[str, Any], ready: Future[Pair]) -> None:
    board = Board()
    numbers = itertools.count(1)
    with socket_directory() as directory:

        def worker() -> contextlib.AbstractAsyncContextManager[Worker]:
            number = next(numbers)
            app = SessionMiddleware(RecordingApp(f"app {number}", board), secret_key="difference")
            listener = _listener(os.path.join(directory, f"public-{number}") if configuration.unix else None)
            return running(app, directory, listener=listener, http=configuration.http, **config)

        async with worker() as owner, worker() as other:
            for one in (owner, other):
                assert one.routed is not None
                forwarder = FORWARDERS[configuration.forwarder](directory, _MAX_FORWARDS)
                one.routed.forwarder = one.routed.router.forwarder = forwarder
            # The first tick of a server sets what it adds to each reply.
            await until(lambda: all(one.server.server_state.default_headers for one in (owner, other)))
            pair = Pair(configuration, asyncio.get_running_loop(), board, owner, other, directory)
            ready.set_result(pair)
            await pair._ended.wait()


def _listener(path: str | None) -> socket.socket:
    if path is None:
        # asyncio (3.11) sets TCP_NODELAY only where the protocol is named, and uvloop everywhere.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        listener.bind(("127.0.0.1", 0))
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
    listener.listen(1024)
    return listener
