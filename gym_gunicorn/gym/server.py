"""What the Gym servers have in common: an app, a session, a lifespan."""

from __future__ import annotations

import inspect
import json
import re
import typing
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import Request
from starlette.responses import Response

from gym_gunicorn.sessions.discovery import Declaration


class GymServer:
    """A server whose ``app`` is what gunicorn serves: ``module:server.app``.

    A subclass says with ``routed`` whether it keeps state for its sessions. Where it
    does not, its app has no session middleware, and its workers no private sockets.

    Args:
        secret_key: what sessions are signed with: one for all workers of the server.
            A server that is not routed needs none.
    """

    routed: ClassVar[bool] = True
    name: ClassVar[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "name" not in cls.__dict__:
            cls.name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self, secret_key: str | None = None) -> None:
        self.app = FastAPI(title=self.name, lifespan=self._lifespan)
        self.app.state.gym_gunicorn = self.declaration()
        self.app.add_exception_handler(RequestValidationError, _explain)
        if self.routed:
            if not secret_key:
                raise ValueError(f"{type(self).__name__}(secret_key=...) needs a secret, the same in all workers")
            self.secret_key = secret_key
            # A name of its own: servers on one host share their callers' cookies.
            self.app.add_middleware(
                SessionMiddleware, secret_key=secret_key, session_cookie=f"{self.name}_session", same_site="lax"
            )

    def declaration(self) -> Declaration:
        """Return what the app says of itself to the server that routes it."""
        return Declaration(routed=self.routed)

    async def startup(self) -> None:
        """Called once in each worker before it serves; for a subclass to fill in."""

    async def shutdown(self) -> None:
        """Called once in each worker after it has served; for a subclass to fill in."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """What lives as long as the worker serves; a subclass that overrides it enters ``super().running()``."""
        yield

    @asynccontextmanager
    async def _lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        async with self.running():
            await self.startup()
            try:
                yield
            finally:
                await self.shutdown()


async def _explain(request: Request, error: Exception) -> Response:
    """Answer 422 with the fields' names and what is wrong with them, and nothing of what was sent.

    FastAPI's own handler (0.165) repeats the input, and fails where JSON or UTF-8 can't
    hold it: NaN, Infinity, half of a surrogate pair.
    """
    assert isinstance(error, RequestValidationError)
    detail = [{key: item[key] for key in ("type", "loc", "msg")} for item in error.errors()]
    return Response(json.dumps({"detail": detail}), 422, media_type="application/json")


def session_id_of(request: Request) -> str:
    """Return the ID of the request's session, which is made on first use."""
    session_id: str = request.session.setdefault("session_id", uuid.uuid4().hex)
    return session_id


@dataclass(frozen=True)
class Handler:
    """A method of a server that takes a session ID and a body, and returns a reply.

    ``body`` and ``reply`` are the pydantic models of its annotations.
    """

    name: str
    description: str
    method: Callable[..., Any]
    body: type[BaseModel]
    reply: type[BaseModel]

    @classmethod
    def of(cls, method: Callable[..., Any]) -> Handler:
        """Read a method's annotations.

        Raises:
            TypeError: it does not take ``(session_id: str, body: Model)`` or does not return a model.
        """
        name = method.__name__
        try:
            hints = typing.get_type_hints(method)
        except NameError as error:
            raise TypeError(f"{method.__qualname__}: {error}; its models must be at the top of a module") from error
        parameters = list(inspect.signature(method).parameters)
        body, reply = hints.get("body"), hints.get("return")
        if (
            parameters != ["session_id", "body"]
            or not inspect.iscoroutinefunction(method)
            or not (_is_model(body) and _is_model(reply))
        ):
            raise TypeError(
                f"{method.__qualname__} must be `async def {name}(self, session_id: str, body: Model) -> Model`, "
                "with pydantic models"
            )
        return cls(name, inspect.getdoc(method) or "", method, body, reply)

    async def call(self, session_id: str, body: BaseModel) -> BaseModel:
        """Call the method and return its reply."""
        reply: BaseModel = await self.method(session_id, body)
        return reply

    def add_to(self, app: FastAPI, finish: Callable[[Request, str, BaseModel, BaseModel], Any] | None = None) -> None:
        """Serve the method at POST ``/<name>``; ``finish`` may make another answer of request, ID, body and reply."""

        async def endpoint(request: Request, body: BaseModel) -> Any:
            session_id = session_id_of(request)
            reply = await self.call(session_id, body)
            return reply if finish is None else finish(request, session_id, body, reply)

        # FastAPI reads what to validate from here.
        keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
        endpoint.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # functions may have one
            [
                inspect.Parameter("request", keyword, annotation=Request),
                inspect.Parameter("body", keyword, annotation=self.body),
            ]
        )
        app.add_api_route(
            f"/{self.name}",
            endpoint,
            methods=["POST"],
            name=self.name,
            description=self.description,
            response_model=self.reply if finish is None else None,
        )


def _is_model(hint: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(hint, type) and issubclass(hint, BaseModel)
