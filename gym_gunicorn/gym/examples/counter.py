"""A counter: the smallest environment that keeps state. ``/seed_session``, two tools, ``/verify``; also over MCP."""

from __future__ import annotations

import os

from fastapi import HTTPException
from pydantic import BaseModel, Field

from gym_gunicorn.gym import ResourcesServer, tool


class Seed(BaseModel):
    initial_count: int = 0


class Increment(BaseModel):
    count: int = Field(description="How much to add.")


class Nothing(BaseModel):
    pass


class Success(BaseModel):
    success: bool = True


class Count(BaseModel):
    count: int


class Verify(BaseModel):
    expected_count: int


class Reward(BaseModel):
    reward: float


class CounterServer(ResourcesServer):
    name = "counter"
    expose_tools_over_mcp = True

    def __init__(self, secret_key: str) -> None:
        super().__init__(secret_key)
        self.counts: dict[str, int] = {}

    async def seed_session(self, session_id: str, body: Seed) -> Success:
        self.counts[session_id] = body.initial_count
        return Success()

    @tool
    async def increment_counter(self, session_id: str, body: Increment) -> Success:
        """Add to the counter."""
        self.counts[session_id] = self._count(session_id) + body.count
        return Success()

    @tool
    async def get_counter_value(self, session_id: str, body: Nothing) -> Count:
        """Read the counter."""
        return Count(count=self._count(session_id))

    async def verify(self, session_id: str, body: Verify) -> Reward:
        return Reward(reward=1.0 if self.counts.pop(session_id, None) == body.expected_count else 0.0)

    def _count(self, session_id: str) -> int:
        if session_id not in self.counts:
            raise HTTPException(404, "this session was not seeded, or is verified already")
        return self.counts[session_id]


app = CounterServer(secret_key=os.environ.get("SESSION_SECRET", "change-me")).app
