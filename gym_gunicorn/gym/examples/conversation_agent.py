"""An agent that keeps a conversation in memory across requests: ``/chat`` adds a turn to the session's own.

``MODEL_URL`` is the model server's.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import defaultdict
from typing import Any

from pydantic import BaseModel

from gym_gunicorn.gym import AgentServer, EpisodeError
from gym_gunicorn.gym.server import Handler


class Turn(BaseModel):
    message: str
    model: str = "default"


class Answer(BaseModel):
    """``turns`` counts the caller's messages so far, this one included."""

    message: str
    turns: int


class ConversationAgent(AgentServer):
    name = "conversation_agent"

    def __init__(self, secret_key: str, *, resources_url: str, model_url: str) -> None:
        super().__init__(secret_key, resources_url=resources_url, model_url=model_url)
        self.conversations: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        # A turn waits for the one before it: a conversation has an order.
        self.turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        Handler.of(self.chat).add_to(self.app)

    async def chat(self, session_id: str, body: Turn) -> Answer:
        """Add the caller's message, ask the model with the whole conversation, and keep its answer."""
        async with self.turns[session_id], self.episode() as episode:
            conversation = [*self.conversations[session_id], {"role": "user", "content": body.message}]
            reply = await episode.ask_model("/v1/chat/completions", {"model": body.model, "messages": conversation})
            try:
                message = reply["choices"][0]["message"]["content"]
            except (KeyError, IndexError, TypeError):
                raise EpisodeError("model", 200, f"a reply without a message: {json.dumps(reply)[:1000]}") from None
            # Kept only now: a turn that failed can be tried again.
            self.conversations[session_id] = [*conversation, {"role": "assistant", "content": message}]
            users = [turn for turn in conversation if turn["role"] == "user"]
            return Answer(message=message, turns=len(users))


app = ConversationAgent(
    secret_key=os.environ.get("SESSION_SECRET", "change-me"),
    resources_url=os.environ.get("RESOURCES_URL", "http://127.0.0.1:8000"),
    model_url=os.environ.get("MODEL_URL", "http://127.0.0.1:8001"),
).app
