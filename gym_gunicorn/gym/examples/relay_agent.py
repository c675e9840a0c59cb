"""The relay agent: plays the tool calls that the request lists, in their order.

``RESOURCES_URL`` is the resources server's.
"""

from __future__ import annotations

import os
from typing import Any

from pydantic import BaseModel, Field

from gym_gunicorn.gym import AgentServer, Episode
from gym_gunicorn.gym.agent import RunReply, RunRequest


class Call(BaseModel):
    tool: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class RelayRequest(RunRequest):
    calls: list[Call]


class RelayAgent(AgentServer):
    name = "relay_agent"

    async def run(self, session_id: str, body: RelayRequest) -> RunReply:  # type: ignore[override]  # a narrower body
        """Seed the session, make the listed tool calls, verify."""
        return await super().run(session_id, body)

    async def play(self, episode: Episode, body: RunRequest) -> None:
        assert isinstance(body, RelayRequest)
        for call in body.calls:
            await episode.call_tool(call.tool, call.arguments)


app = RelayAgent(
    secret_key=os.environ.get("SESSION_SECRET", "change-me"),
    resources_url=os.environ.get("RESOURCES_URL", "http://127.0.0.1:8000"),
).app
