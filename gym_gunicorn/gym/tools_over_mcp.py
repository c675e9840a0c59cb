"""The tools of a resources server over MCP: streamable HTTP, stateless, JSON replies.

Each POST stands alone. A session is named by a signed token in a header field, which
the router reads too, so a call reaches the worker that holds the session.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import mcp_types as types
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from pydantic import ValidationError
from starlette.types import Receive, Scope, Send

from gym_gunicorn.gym.server import Handler
from gym_gunicorn.gym.tokens import SessionToken, SessionTokens, TokenError

log = logging.getLogger("uvicorn.error")


class ToolsOverMCP:
    """ASGI application that serves ``tools`` over MCP, to be run within ``running``.

    What a model can mend (an unknown tool, bad arguments, a tool's own error) comes back
    as a tool result with ``isError``; what it can't (no valid token) as a JSON-RPC error.
    """

    def __init__(self, name: str, tools: Mapping[str, Handler], tokens: SessionTokens, token_header: str) -> None:
        self._tools = tools
        self._tokens = tokens
        self._token_header = token_header
        server: Server[Any] = Server(name, on_list_tools=self._list_tools, on_call_tool=self._call_tool)
        self._manager = StreamableHTTPSessionManager(
            server,
            json_response=True,
            stateless=True,
            # It would let clients in by the name that they call this host by. A token is
            # what lets a caller in here.
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve within this context; it can be entered once."""
        async with self._manager.run():
            yield

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._manager.handle_request(scope, receive, send)

    async def _list_tools(
        self, context: ServerRequestContext[Any], parameters: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        token = self._token(context, required=False)
        return types.ListToolsResult(
            tools=[
                types.Tool(
                    name=handler.name, description=handler.description, input_schema=handler.body.model_json_schema()
                )
                for handler in self._tools.values()
                if token is None or _allows(token, handler.name)
            ]
        )

    async def _call_tool(
        self, context: ServerRequestContext[Any], parameters: types.CallToolRequestParams
    ) -> types.CallToolResult:
        token = self._token(context, required=True)
        assert token is not None
        handler = self._tools.get(parameters.name)
        if handler is None:
            return _error(f"there is no tool {parameters.name!r}; there are {', '.join(sorted(self._tools))}")
        if not _allows(token, handler.name):
            return _error(f"this session may not use the tool {handler.name!r}")
        try:
            body = handler.body.model_validate(parameters.arguments or {})
        except ValidationError as error:
            return _error(f"bad arguments for {handler.name!r}: {_reasons(error)}")
        try:
            reply = await handler.call(token.session_id, body)
        except Exception as error:
            log.exception("The tool %s failed", handler.name)
            return _error(f"the tool {handler.name!r} failed: {_reason(error)}")
        value = reply.model_dump(mode="json")
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=json.dumps(value))], structured_content=value
        )

    def _token(self, context: ServerRequestContext[Any], *, required: bool) -> SessionToken | None:
        """Return what the request's token says.

        Raises:
            MCPError: there is none though it is required, or it is not valid.
        """
        text = context.request.headers.get(self._token_header) if context.request is not None else None
        if text is None:
            if required:
                raise MCPError(
                    types.INVALID_REQUEST, f"the header {self._token_header} with a session token is missing"
                )
            return None
        try:
            return self._tokens.read(text)
        except TokenError as error:
            raise MCPError(types.INVALID_REQUEST, f"the header {self._token_header}: {error}") from None


def _allows(token: SessionToken, name: str) -> bool:
    return token.tools is None or name in token.tools


def _error(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=True)


def _reasons(error: ValidationError) -> str:
    return "; ".join(f"{'.'.join(map(str, item['loc'])) or 'arguments'}: {item['msg']}" for item in error.errors())


def _reason(error: Exception) -> str:
    detail = getattr(error, "detail", None)
    return str(detail or error or type(error).__name__)
