"""What a routed worker is made of: the router around its app, its private server, its forwarder."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from itsdangerous import URLSafeSerializer
from starlette.middleware.sessions import SessionMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from gym_gunicorn.forwarding.cancelled import AnswerCancelled
from gym_gunicorn.forwarding.errors import Gone
from gym_gunicorn.forwarding.forwarder import Forwarder
from gym_gunicorn.forwarding.http.forwarder import AiohttpForwarder
from gym_gunicorn.forwarding.links.forwarder import FramedForwarder
from gym_gunicorn.forwarding.private.app import PrivateApp
from gym_gunicorn.forwarding.private.server import PrivateServer
from gym_gunicorn.forwarding.sockets import bind_private_socket, socket_path
from gym_gunicorn.metrics.endpoints import Answer, OperatorPaths, health, metrics
from gym_gunicorn.metrics.values import SECRET, STATE, STOPPING, Figures
from gym_gunicorn.placement import Policy, balanced
from gym_gunicorn.problems import SERVER_STOPPING, SESSION_GONE, Problem
from gym_gunicorn.routing.balancer import Balancer
from gym_gunicorn.routing.router import PROBLEMS, Placed, SessionRouter, is_below
from gym_gunicorn.sessions.carriers import SessionCookie, SessionToken
from gym_gunicorn.sessions.discovery import Declaration, find_cors, find_declaration, find_sessions, session_middleware
from gym_gunicorn.sessions.fingerprint import fingerprint
from gym_gunicorn.sessions.stamp import SessionStamp, with_owner
from gym_gunicorn.settings import Settings, Way

# A session middleware, and the requests that get to it: None for all.
_Placed = tuple[SessionMiddleware, Callable[[Scope], bool] | None]


_WAYS: dict[Way, Callable[[str, int, Figures], Forwarder]] = {"framed": FramedForwarder, "aiohttp": AiohttpForwarder}
_POLICIES: dict[str, Policy | None] = {"local": None, "balanced": balanced}


@dataclass
class Routed:
    """A routed worker's parts. ``app`` is what its public server serves."""

    owner_id: str
    app: AnswerCancelled
    router: SessionRouter
    private: PrivateServer
    private_app: PrivateApp
    forwarder: Forwarder
    figures: Figures
    _moved: int = 0

    async def begin_stop(self) -> None:
        """Take no more from siblings that would need a new connection, and end their WebSockets."""
        self.figures.values[STATE] = STOPPING
        self.app.stopping = self.private_app.app.stopping = True
        self.private.stop_accepting()
        await self.private_app.close_websockets()

    def moved_requests(self) -> int:
        """Return by how many more requests, since the last call, this worker handled than it received."""
        # A WebSocket is no request to uvicorn, but travels as one.
        received = self.private.state.total_requests - self.private_app.websockets_served
        moved = received - self.forwarder.finished
        change, self._moved = moved - self._moved, moved
        return change


def route(
    app: ASGIApp,
    *,
    owner_id: str,
    directory: str,
    settings: Settings,
    backlog: int,
    log: logging.Logger,
    figures: Figures | None = None,
) -> Routed | None:
    """Bind the private socket of the worker ``owner_id`` and put a router around ``app``.

    ``directory`` is the socket directory, ``backlog`` how many connections may wait at
    the private socket, ``figures`` where the worker counts. Returns ``None`` where there
    is nothing to route by.

    Raises:
        OSError: the private socket can't be bound.
    """
    found = list(find_sessions(app))
    middlewares: list[_Placed]
    declaration = find_declaration(app)
    tokens = declaration if settings.token_header is None else settings
    problems = dict(PROBLEMS)
    if settings.secret_key is not None:
        given = session_middleware(settings.secret_key, settings.session_cookie, settings.max_age)
        middlewares = [(given, None)]
    else:
        middlewares = [(session.middleware, session.applies if session.routes else None) for session in found]
    if not middlewares:
        return None
    figures = figures or Figures()
    outermost, _ = middlewares[-1]
    figures.values[SECRET] = fingerprint(outermost.signer, outermost.session_cookie)
    path = socket_path(directory, owner_id)
    listener = bind_private_socket(path, backlog)
    make_stamp = partial(
        SessionStamp,
        owner_id=owner_id,
        owner_key=settings.owner_key,
        session_id_key=settings.session_id_key,
        count=figures.stamped,
    )
    for session in found:
        session.place_stamp(make_stamp)
    if not found:
        app = with_owner(app, owner_id, figures.stamped)
    if settings.expire_lost_cookie:
        gone = SESSION_GONE
        for middleware, _ in middlewares:
            gone = gone.with_header(b"set-cookie", _expired_cookie(middleware))
        problems[Gone] = gone
    around = find_cors(app)

    def answering(problem: Problem) -> ASGIApp:
        if tokens.token_header is None:
            return around(problem)
        return around(_below(tokens.token_path, problem.as_json_rpc(), problem))

    forwarder = _WAYS[settings.forwarder](directory, settings.max_forwards, figures)
    policy = settings.placement if callable(settings.placement) else _POLICIES[settings.placement]
    router = SessionRouter(
        app,
        owner_id=owner_id,
        carriers=_carriers(middlewares, tokens, settings),
        forwarder=forwarder,
        log=log,
        local_paths=settings.local_paths,
        problems={kind: answering(problem) for kind, problem in problems.items()},
        figures=figures,
        placement=None if policy is None else Balancer(owner_id, directory, figures, policy),
        placement_paths=settings.placement_paths,
    )
    stopping = answering(SERVER_STOPPING)
    # Within what makes the caller's scope: the CORS fields are for its Origin.
    private_app = PrivateApp(AnswerCancelled(app, stopping), figures, owner_id)
    answers: dict[str, Answer] = {}
    if settings.health_path is not None:
        answers[settings.health_path] = partial(health, directory)
    if settings.metrics_path is not None:
        answers[settings.metrics_path] = partial(metrics, directory)
    return Routed(
        owner_id=owner_id,
        app=AnswerCancelled(OperatorPaths(router, answers) if answers else router, stopping),
        router=router,
        private=PrivateServer(private_app, owner_id, listener, path),
        private_app=private_app,
        forwarder=forwarder,
        figures=figures,
    )


def _carriers(middlewares: list[_Placed], tokens: Declaration | Settings, settings: Settings) -> list[Placed]:
    """Return where requests name their owner, the deciding one first."""
    carriers = [
        Placed(
            SessionCookie(middleware.signer, middleware.session_cookie, middleware.max_age, settings.owner_key),
            applies,
        )
        for middleware, applies in middlewares
    ]
    if tokens.token_header is not None:
        middleware, _ = middlewares[-1]
        serializer = URLSafeSerializer(middleware.signer.secret_key, tokens.token_salt)
        token = SessionToken(serializer, tokens.token_header, settings.token_session_id_key)
        carriers = [Placed(token, partial(is_below, tokens.token_path)), *carriers, Placed(token)]
    return carriers


def _below(prefix: str, there: ASGIApp, elsewhere: ASGIApp) -> ASGIApp:
    """Return what answers requests below the path ``prefix`` with one app, and others with the other."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await (there if is_below(prefix, scope) else elsewhere)(scope, receive, send)

    return answer


def _expired_cookie(middleware: SessionMiddleware) -> bytes:
    """Return the Set-Cookie field with which a session middleware expires its cookie."""
    expires = "expires=Thu, 01 Jan 1970 00:00:00 GMT"
    return f"{middleware.session_cookie}=null; path={middleware.path}; {expires}; {middleware.security_flags}".encode()
