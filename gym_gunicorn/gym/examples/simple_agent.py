"""The simple agent: lets a model call tools until it stops.

``RESOURCES_URL`` and ``MODEL_URL`` are the resources server's and the model server's.
"""

from __future__ import annotations

import json
import os
from typing import Any

from pydantic import BaseModel, Field, Json, ValidationError

from gym_gunicorn.gym import AgentServer, Episode, EpisodeError
from gym_gunicorn.gym.agent import RunReply, RunRequest


class SimpleRequest(RunRequest):
    """``input`` is what the model is asked, ``tools`` what it may call, as OpenAI's Responses API has them."""

    input: str | list[dict[str, Any]]
    tools: list[dict[str, Any]] = Field(default_factory=list)
    model: str = "default"
    max_steps: int = Field(default=20, ge=1, le=1000)


class SimpleAgent(AgentServer):
    name = "simple_agent"

    async def run(self, session_id: str, body: SimpleRequest) -> RunReply:  # type: ignore[override]  # a narrower body
        """Seed the session, let the model call tools until it stops, verify."""
        return await super().run(session_id, body)

    async def play(self, episode: Episode, body: RunRequest) -> None:
        assert isinstance(body, SimpleRequest)
        text = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else list(body.input)
        offered = {tool.get("name") for tool in body.tools}
        for _ in range(body.max_steps):
            reply = await episode.ask_model("/v1/responses", {"model": body.model, "input": text, "tools": body.tools})
            output = reply.get("output")
            if not isinstance(output, list):
                raise EpisodeError("model", 200, f"a reply without output: {json.dumps(reply)[:1000]}")
            text += output
            calls = [
                _call(item) for item in output if not isinstance(item, dict) or item.get("type") == "function_call"
            ]
            if not calls:
                return
            for call in calls:
                if call.name not in offered:
                    raise EpisodeError("model", 200, f"it calls {call.name!r}, which is none of its tools")
                result = await episode.call_tool(call.name, call.arguments)
                text.append({"type": "function_call_output", "call_id": call.call_id, "output": json.dumps(result)})
        raise EpisodeError("model", None, f"it had not stopped after {body.max_steps} steps")


class ToolCall(BaseModel):
    """A tool call as OpenAI's Responses API has it; a model writes the arguments as JSON."""

    name: str
    call_id: str
    arguments: Json[dict[str, Any]]


def _call(item: object) -> ToolCall:
    """Return the tool call that an item of a model's output is.

    Raises:
        EpisodeError: it is none.
    """
    try:
        return ToolCall.model_validate(item)
    except ValidationError:
        raise EpisodeError("model", 200, f"no tool call that can be made: {json.dumps(item)[:1000]}") from None


app = SimpleAgent(
    secret_key=os.environ.get("SESSION_SECRET", "change-me"),
    resources_url=os.environ.get("RESOURCES_URL", "http://127.0.0.1:8000"),
    model_url=os.environ.get("MODEL_URL", "http://127.0.0.1:8001"),
).app
