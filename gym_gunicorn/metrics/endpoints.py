"""Paths that a server answers for its operators, outside the app: its health, its metrics. Both are off unless set."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gym_gunicorn.metrics.values import Reading, read_all

# Seconds after which a worker whose loop does not go round is not counted on.
SILENT = 5.0

Answer = Callable[[], Response]


class OperatorPaths:
    """ASGI application that answers GET and HEAD on some paths itself, and has ``app`` answer the rest.

    Args:
        answers: what is answered, by the whole path, below the server's ``root_path``.
    """

    def __init__(self, app: ASGIApp, answers: dict[str, Answer]) -> None:
        self.app = app
        self.answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = None
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            answer = self.answers.get(scope["path"].removeprefix(scope.get("root_path", "")))
        await (self.app if answer is None else answer())(scope, receive, send)


def health(directory: str) -> Response:
    """Answer 200 while some worker of the socket directory takes new sessions, and 503 when none does."""
    workers, _ = read_all(directory)
    serving = sum(takes_sessions(worker) for worker in workers)
    return PlainTextResponse(
        f"{serving} of {len(workers)} workers take new sessions\n",
        200 if serving else 503,
        {"cache-control": "no-store"},
    )


def own_health(is_alive: Callable[[], bool]) -> Response:
    """Answer 200 while this worker, which is not routed, is not told to stop."""
    alive = is_alive()
    return PlainTextResponse(
        "serving\n" if alive else "stopping\n", 200 if alive else 503, {"cache-control": "no-store"}
    )


def takes_sessions(worker: Reading) -> bool:
    """Tell whether a worker serves, and has shown it of late."""
    return worker.state == "serving" and worker.silence() < SILENT


def metrics(directory: str) -> Response:
    """Answer with the figures of the whole server in Prometheus' text format."""
    # Needs the extra "metrics".
    from gym_gunicorn.metrics.prometheus import CONTENT_TYPE, render

    return Response(render(*read_all(directory)), media_type=CONTENT_TYPE, headers={"cache-control": "no-store"})
