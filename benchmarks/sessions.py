"""Sessions and connections, spread as a work wants them over the workers of a set-up."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Literal

from benchmarks.asking import ask, connect, cookies, post, receive
from benchmarks.callers import Caller, Exchange, Session
from benchmarks.servers import Server

# spread: each session's requests reach each worker equally often; home: always its owner; away: never its owner;
# fallen: connections and sessions as the kernel and the set-up bring them about.
Placement = Literal["spread", "home", "away", "fallen"]

_TRIES = 400


class Unfit(Exception):
    """A set-up can't be brought into the state that the work asks for. The message says which."""


def make_session(connection: socket.socket) -> Session:
    """Make a session over a connection, and find out who holds it."""
    top, body = ask(connection, post("/session"))
    session = Session(json.loads(body)["session_id"].encode(), cookies(top))
    session.owner = _pid(ask(connection, post("/where", session.cookie)))
    return session


def make_sessions(server: Server, total: int) -> list[Session]:
    """Make so many sessions that every worker has its part, and keep these.

    Raises:
        Unfit: after many tries a worker still has too few.
    """
    workers = server.workers
    each = -(-total // len(workers))
    held: dict[int, list[Session]] = defaultdict(list)
    makers = [connection for connection, _ in open_evenly(server, len(workers) if server.setup.shares_listener else 1)]
    with contextlib.ExitStack() as stack:
        for maker in makers:
            stack.callback(maker.close)
        for _ in range(total + _TRIES):
            for maker in makers:
                session = make_session(maker)
                assert session.owner is not None
                if not server.setup.keeps:
                    # Nobody holds it: who answered tells nothing, and it is counted with whoever has too few.
                    session.owner = min(workers, key=lambda pid: len(held[pid]))
                if len(held[session.owner]) < each:
                    held[session.owner].append(session)
            if sum(map(len, held.values())) == each * len(workers):
                # In turn, so that what is cut off leaves no worker with two less than another.
                return [session for row in zip(*held.values(), strict=True) for session in row][:total]
    raise Unfit(f"the sessions fall too unevenly: {sorted(map(len, held.values()))} where {each} each are wanted")


def open_evenly(server: Server, total: int) -> list[tuple[socket.socket, int]]:
    """Open so many connections that every worker has accepted its part; each comes with who accepted it.

    Where a proxy accepts them all, or there is one worker, they are just opened.

    Raises:
        Unfit: after many tries a worker still has too few.
    """
    if not server.setup.shares_listener:
        return [(connect(server.port), 0) for _ in range(total)]
    workers = server.workers
    each = -(-total // len(workers))
    kept: dict[int, list[socket.socket]] = {pid: [] for pid in workers}
    for _ in range(_TRIES + total):
        if all(len(connections) == each for connections in kept.values()):
            rows = zip(*([(one, pid) for one in connections] for pid, connections in kept.items()), strict=True)
            opened = [pair for row in rows for pair in row]
            for connection, _ in opened[total:]:
                connection.close()
            return opened[:total]
        # Who has enough is held up meanwhile, so that others accept.
        held_up = [connections[0] for connections in kept.values() if len(connections) == each]
        for connection in held_up:
            connection.sendall(post("/hold"))
        fresh = [connect(server.port) for _ in range(8)]
        for connection in fresh:
            connection.sendall(post("/where"))
        for connection in fresh:
            mine = kept[_pid(receive(connection))]
            if len(mine) < each:
                mine.append(connection)
            else:
                connection.close()
        for connection in held_up:
            receive(connection)
    for connections in kept.values():
        for connection in connections:
            connection.close()
    raise Unfit("the kernel gives some worker no connections")


def callers(
    server: Server, exchange: Exchange, connections: int, sessions: int, shared: bool, placement: Placement
) -> list[Caller]:
    """Return callers with their connections open and their sessions made.

    Args:
        connections: how many callers there are.
        sessions: how many sessions; 0: each caller has a nameless one, for requests that need none.
        shared: whether all connections carry all sessions' requests; otherwise each has its own part of them.
    """
    if placement == "fallen":
        opened = [(connect(server.port), 0) for _ in range(connections)]
        made = [make_session(opened[number % connections][0]) for number in range(sessions)]
    else:
        opened = open_evenly(server, connections)
        made = make_sessions(server, sessions) if sessions else [Session() for _ in opened]
    if shared:
        # So that sessions of one owner don't follow each other.
        random.Random(0).shuffle(made)
        # More callers than sessions share each among several.
        together = deque(made * -(-connections // sessions))
        queues = [together for _ in opened]
    elif sessions:
        queues = _parts(server, [acceptor for _, acceptor in opened], made, placement)
    else:
        queues = [deque([session]) for session in made]
    found = []
    for (connection, _), queue in zip(opened, queues, strict=True):
        if exchange.opens:
            exchange.open(connection, queue[0])
        found.append(Caller(connection, queue, exchange))
    return found


def largest_part(sessions: Iterable[Session]) -> int:
    """Return how many of the sessions one owner has: the one that has most."""
    return max(Counter(session.owner for session in sessions).values())


def _parts(
    server: Server, acceptors: Sequence[int], sessions: Sequence[Session], placement: Placement
) -> list[deque[Session]]:
    """Give each connection its part of the sessions, by who accepted it and who holds them."""
    workers = server.workers
    held: dict[int, deque[Session]] = {pid: deque() for pid in workers}
    for session in sessions:
        assert session.owner is not None
        held[session.owner].append(session)
    parts: list[deque[Session]] = [deque() for _ in acceptors]
    if not server.setup.shares_listener:
        placement = "spread"
    turns = Counter[int]()
    for number in range(len(sessions)):
        part = number % len(acceptors)
        acceptor = acceptors[part]
        first = workers.index(acceptor) if acceptor else number % len(workers)
        turn = turns[first]
        turns[first] += 1
        if placement == "home":
            offset = 0
        elif placement == "away":
            offset = 1 + turn % (len(workers) - 1)
        else:
            offset = turn % len(workers)
        owner = workers[(first + offset) % len(workers)]
        if held[owner]:
            parts[part].append(held[owner].popleft())
        elif placement == "spread":
            parts[part].append(max(held.values(), key=len).popleft())
    if not all(parts):
        raise Unfit("some connection is left without a session")
    return parts


def _pid(answer: tuple[bytes, bytes]) -> int:
    pid: int = json.loads(answer[1])["pid"]
    return pid
