"""A caller that goes away at any stage of a request or its reply leaves nothing, and its session counts on."""

from __future__ import annotations

import contextlib
import re
import socket
import struct
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.e2e.calls import Session, ask, connection_to, session_at
from tests.faults.crowd import descriptors
from tests.faults.scenario import Scenario, scenario
from tests.faults.tally import Tally
from tests.gunicorn_server import GunicornServer, until

SLOW = "tests.faults.slow:app"
BODY = b"b" * 3000
REPLY = 300_000


def _close(connection: socket.socket) -> None:
    connection.close()


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _end_sending(connection: socket.socket) -> None:
    """Half-close, and read what comes until the server closes."""
    connection.shutdown(socket.SHUT_WR)
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass
    connection.close()


WAYS: list[Callable[[socket.socket], None]] = [_close, _reset, _end_sending]


def _request(session: Session, nonce: str, *, chunked: bool, query: str) -> tuple[bytes, bytes]:
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {len(BODY)}"
    lines = (
        f"POST /count{query} HTTP/1.1",
        "Host: localhost",
        f"Cookie: {session.cookie}",
        f"X-Nonce: {nonce}",
        framing,
    )
    body = b"3e8\r\n" + b"b" * 1000 + b"\r\n7d0\r\n" + b"b" * 2000 + b"\r\n0\r\n\r\n" if chunked else BODY
    return "\r\n".join((*lines, "", "")).encode(), body


@st.composite
def stages(draw: st.DrawFn) -> tuple[str, int]:
    """Draw where a caller leaves: the part of the exchange, and how many thousandths of it have passed."""
    return draw(st.sampled_from(["head", "body", "before the reply", "reply"])), draw(st.integers(0, 1000))


def _open_connections(port: int) -> int:
    """Return how many connections of a listener's processes still have."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    # Not the listener itself, and no connection that the process has closed.
    return sum(one[1].endswith(f":{port:04X}") and one[3] != "0A" and one[9] != "0" for one in fields)


class _Leaver:
    """Leaves, and then sees to it that nothing is left and that both sessions count on."""

    def __init__(self, scene: Scenario, owner: int, other: int, direct: HTTPConnection, line: HTTPConnection) -> None:
        self.scene, self.server = scene, scene.server
        self.owner, self.other, self.direct, self.line = owner, other, direct, line
        self.sessions = {"local": session_at(self.server, other), "forwarded": session_at(self.server, owner)}
        self.counted = dict.fromkeys(self.sessions, 1)
        self.tally = Tally(sessions=2)
        self.number = 0
        self.step("local")
        self.step("forwarded")
        self.before = {pid: len(descriptors(pid)) for pid in (owner, other)}

    def nonce(self, way: str) -> str:
        self.number += 1
        self.tally.requests += 1
        return f"{way}-{self.number}"

    def run(self, way: str) -> int:
        """Return how many requests of a session were run."""
        return 1 + sum(times for nonce, times in self.scene.ledger.runs().items() if nonce.startswith(way))

    def step(self, way: str) -> None:
        nonce = self.nonce(way)
        answer = ask(self.line, "/count", self.sessions[way], method="POST", headers={"X-Nonce": nonce}).json()
        self.tally.right += 1
        self.tally.answered.add(nonce)
        if not self.counted[way] < answer["count"] <= self.run(way):
            self.tally.faults.append(f"{way}: {answer['count']} after {self.counted[way]}, {self.run(way)} were run")
        self.counted[way] = answer["count"]

    def leave(self, way: str, stage: tuple[str, int], leave: Callable[[socket.socket], None], *, chunked: bool) -> None:
        part, thousandths = stage
        query = {"before the reply": "?hold=0.2", "reply": f"?size={REPLY}&stream=1"}.get(part, "")
        head, body = _request(self.sessions[way], self.nonce(way), chunked=chunked, query=query)
        self.tally.broken += 1
        with connection_to(self.server, self.other) as connection:
            sock = connection.sock
            if part == "head":
                sock.sendall(head[: len(head) * thousandths // 1001])
            elif part == "body":
                sock.sendall(head + body[: len(body) * thousandths // 1001])
            else:
                sock.sendall(head + body)
            if part == "reply":
                left = 1 + REPLY * thousandths // 1000
                while left > 0:
                    piece = sock.recv(min(left, 65536))
                    assert piece, "the reply was cut off"
                    left -= len(piece)
            leave(sock)

    def nothing_is_left(self) -> None:
        until(lambda: _open_connections(self.server.port) == 2, "both workers have closed the connections")
        for connection in (self.direct, self.line):
            until(lambda c=connection: ask(c, "/state", method="POST").json()["running"] == 0, "no handler runs")  # type: ignore[misc]
        self.step("local")
        self.step("forwarded")
        # A forward that came to its end before its caller's leaving was seen has left a kept connection.
        most = {pid: number + 2 for pid, number in self.before.items()}
        until(lambda: all(len(descriptors(pid)) <= number for pid, number in most.items()), "nothing is left open")


def test_caller_may_leave_at_any_stage() -> None:
    with scenario("callers that leave", "--keep-alive", "75", "--timeout", "120", app=SLOW, workers=2) as scene:
        server: GunicornServer = scene.server
        owner, other = server.workers()
        with connection_to(server, owner) as direct, connection_to(server, other) as line:
            leaver = _Leaver(scene, owner, other, direct, line)

            # Not made smaller: what one example leaves behind, all after it would find.
            @settings(
                max_examples=60,
                derandomize=True,
                deadline=None,
                database=None,
                phases=[Phase.explicit, Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(stage=stages(), leave=st.sampled_from(WAYS), chunked=st.booleans())
            def leaves(stage: tuple[str, int], leave: Callable[[socket.socket], None], chunked: bool) -> None:
                for way in ("local", "forwarded"):
                    leaver.leave(way, stage, leave, chunked=chunked)
                leaver.nothing_is_left()
                assert leaver.tally.faults == []

            leaves()
            for way in leaver.sessions:
                leaver.step(way)
                assert leaver.counted[way] == leaver.run(way)
            # As many were run as came whole, which not all did.
            assert leaver.tally.right < leaver.run("local") + leaver.run("forwarded") < leaver.number
        # What Starlette raises where a handler reads a body that was cut off, and nothing else.
        raised = set(re.findall(r"^[\w.]+(?:Error|Exception|Disconnect|Left|Cancelled)\b", server.log(), re.MULTILINE))
        assert raised <= {"starlette.requests.ClientDisconnect"}
        assert "never retrieved" not in server.log()
        print(leaver.tally.line())
        leaver.tally.check(scene.ledger)
        scene.tally = leaver.tally
        scene.end()
