"""Resources servers: what an environment keeps for a rollout, between seed, tool calls and verification."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel
from starlette.requests import Request
from starlette.routing import Route

from gym_gunicorn.gym.server import GymServer, Handler
from gym_gunicorn.gym.tokens import SessionTokens
from gym_gunicorn.gym.tools_over_mcp import ToolsOverMCP
from gym_gunicorn.sessions.discovery import Declaration
from gym_gunicorn.sessions.stamp import session_owner

M = TypeVar("M", bound=Callable[..., Any])


def tool(method: M) -> M:
    """Mark a method of a resources server as a tool: a POST route, and a tool over MCP where these are exposed.

    Its name and docstring are what a model reads.
    """
    setattr(method, "is_tool", True)  # noqa: B010  # functions may have attributes
    return method


class ResourcesServer(GymServer):
    """Serves ``/seed_session``, ``/verify`` and a POST route for each tool.

    A subclass writes ``seed_session``, ``verify`` and its tools as
    ``async def name(self, session_id: str, body: Model) -> Model``. A body that is not
    of its model gets 422 with the field's name.

    With ``expose_tools_over_mcp`` the same tools are served on ``mcp_path``, and the
    reply of ``/seed_session`` has a key ``mcp`` that tells a client how to reach them
    with a signed token and no cookies.
    """

    expose_tools_over_mcp: ClassVar[bool] = False
    mcp_path: ClassVar[str] = "/mcp"
    token_header: ClassVar[str] = "X-Gym-Session-Token"
    token_salt: ClassVar[str] = "gym-gunicorn-session-token"

    def __init__(self, secret_key: str) -> None:
        super().__init__(secret_key)
        self.tools = {handler.name: handler for handler in self._find_tools()}
        Handler.of(self._required("seed_session")).add_to(self.app, finish=self._seeded)
        Handler.of(self._required("verify")).add_to(self.app)
        for handler in self.tools.values():
            handler.add_to(self.app)
        self.tokens = SessionTokens(secret_key, self.token_salt)
        self._mcp: ToolsOverMCP | None = None
        if self.expose_tools_over_mcp:
            self._mcp = ToolsOverMCP(self.name, self.tools, self.tokens, self.token_header)
            # Not a mount, which would redirect to the path with a slash at its end.
            self.app.router.routes.append(Route(self.mcp_path, self._mcp))

    def tools_for(self, session_id: str, body: BaseModel) -> Sequence[str] | None:
        """Return the names of the tools that a session may use over MCP, ``None`` for all.

        ``body`` is that of ``/seed_session``. For a subclass to override.
        """
        return None

    def declaration(self) -> Declaration:
        if not self.expose_tools_over_mcp:
            return Declaration(routed=self.routed)
        return Declaration(
            routed=self.routed,
            token_header=self.token_header,
            token_salt=self.token_salt,
            token_path=self.mcp_path,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(super().running())
            if self._mcp is not None:
                await stack.enter_async_context(self._mcp.running())
            yield

    def _required(self, name: str) -> Callable[..., Any]:
        method = getattr(self, name, None)
        if method is None:
            raise TypeError(
                f"{type(self).__name__} needs `async def {name}(self, session_id: str, body: Model) -> Model`"
            )
        found: Callable[..., Any] = method
        return found

    def _find_tools(self) -> list[Handler]:
        # Of the class: a property of it may need what its __init__ has not made yet.
        methods = inspect.getmembers(type(self), inspect.isfunction)
        return [Handler.of(getattr(self, name)) for name, method in methods if getattr(method, "is_tool", False)]

    def _seeded(self, request: Request, session_id: str, body: BaseModel, reply: BaseModel) -> dict[str, Any]:
        answer: dict[str, Any] = reply.model_dump(mode="json")
        if self.expose_tools_over_mcp:
            allowed = self.tools_for(session_id, body)
            token = self.tokens.mint(session_id, tools=allowed, owner=session_owner(request.scope))
            answer["mcp"] = {
                "server_name": self.name,
                "url_path": self.mcp_path,
                "transport": "streamable_http",
                "headers": {self.token_header: token},
            }
        return answer
