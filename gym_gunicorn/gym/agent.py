"""Agent servers: play an episode against a resources server and a model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from fastapi import HTTPException
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gym_gunicorn.disconnect import CancelOnDisconnect
from gym_gunicorn.gym.server import GymServer, Handler

# Seconds. gunicorn's servers close idle connections after `keepalive`, two by default: a
# client that keeps them longer sends requests into connections that are being closed.
KEEP_ALIVE = 1.0


class EpisodeError(Exception):
    """A step of an episode failed. ``where`` is the server and path, ``status`` its answer or ``None``."""

    def __init__(self, where: str, status: int | None, detail: str) -> None:
        super().__init__(f"{where}: {detail if status is None else f'{status}: {detail}'}")
        self.where = where
        self.status = status


class RunRequest(BaseModel):
    """What ``/run`` takes: the bodies of ``/seed_session`` and ``/verify``, and whatever an agent wants besides."""

    model_config = ConfigDict(extra="allow")

    seed: dict[str, Any] = Field(default_factory=dict)
    verify: dict[str, Any] = Field(default_factory=dict)


class RunReply(BaseModel):
    """What ``/run`` returns: the reply of ``/verify``, with its reward."""

    model_config = ConfigDict(extra="allow")

    reward: float


class Episode:
    """One rollout's way to a resources server and a model server.

    It keeps the resources server's cookies, as a client must whose session lives there.
    """

    def __init__(self, http: aiohttp.ClientSession, resources_url: str, model_url: str | None) -> None:
        self._http = http
        self._resources_url = resources_url.rstrip("/")
        self._model_url = None if model_url is None else model_url.rstrip("/")

    async def seed(self, body: dict[str, Any]) -> dict[str, Any]:
        """Begin the session."""
        return await self._post(self._resources_url, "/seed_session", body)

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call a tool of the resources server.

        Raises:
            EpisodeError: what is asked for is no tool's name, or is a step that is the agent's
                own: a model must not seed or verify its episode.
        """
        if not name.isidentifier() or name in ("seed_session", "verify"):
            raise EpisodeError("the tool call", None, f"{name!r} is no tool")
        return await self._post(self._resources_url, f"/{name}", arguments)

    async def verify(self, body: dict[str, Any]) -> dict[str, Any]:
        """Have the session verified; the reply has its ``reward``."""
        return await self._post(self._resources_url, "/verify", body)

    async def ask_model(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post to the model server: ``/v1/responses`` or ``/v1/chat/completions``."""
        if self._model_url is None:
            raise EpisodeError("model", None, "this agent was given no model_url")
        return await self._post(self._model_url, path, body)

    async def _post(self, url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Post JSON, and return the JSON object that answers it.

        Raises:
            EpisodeError: another status than 200, no JSON object, or no answer at all.
        """
        where = f"{url}{path}"
        try:
            async with self._http.post(where, json=body) as response:
                text = await response.text()
        except (aiohttp.ClientError, OSError) as error:
            raise EpisodeError(where, None, f"no answer ({error or type(error).__name__})") from error
        if response.status != 200:
            raise EpisodeError(where, response.status, text[:1000])
        try:
            answer = json.loads(text)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise EpisodeError(where, response.status, f"not a JSON object: {text[:1000]}")
        return answer


class AgentServer(GymServer):
    """Serves ``/run``: plays one episode and returns the verified reply with its reward.

    A subclass writes ``play``. A step that fails ends the episode: the answer is 410
    where the environment's session is gone, and 502 for anything else, with the step and
    what it was answered.

    Args:
        secret_key: what this server's own sessions are signed with.
        resources_url: the base URL of the resources server.
        model_url: the base URL of the model server, for agents that ask one.
    """

    def __init__(self, secret_key: str, *, resources_url: str, model_url: str | None = None) -> None:
        super().__init__(secret_key)
        self.resources_url = resources_url
        self.model_url = model_url
        self._connector: aiohttp.TCPConnector | None = None
        self.app.add_middleware(CancelOnDisconnect)
        if type(self).play is not AgentServer.play:
            Handler.of(self.run).add_to(self.app)

    async def play(self, episode: Episode, body: RunRequest) -> None:
        """Play the episode, between seed and verify."""
        raise NotImplementedError(f"{type(self).__name__} needs `async def play(self, episode, body)`")

    async def run(self, session_id: str, body: RunRequest) -> RunReply:
        """Play one episode: seed the session, play, verify."""
        async with self.episode() as episode:
            await episode.seed(body.seed)
            await self.play(episode, body)
            verified = await episode.verify(body.verify)
            try:
                return RunReply.model_validate(verified)
            except ValidationError:
                raise EpisodeError(
                    f"{self.resources_url}/verify", 200, f"a reply without a reward: {json.dumps(verified)[:1000]}"
                ) from None

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[Episode]:
        """A new episode with cookies of its own, over connections that all episodes share.

        Raises:
            HTTPException: a step of the episode failed.
        """
        assert self._connector is not None, "the server is not running"
        async with aiohttp.ClientSession(
            connector=self._connector,
            connector_owner=False,
            # Servers are often addressed by IP address, and their cookies count all the same.
            cookie_jar=aiohttp.CookieJar(unsafe=True),
            # A model may take its time; gunicorn and the servers set the limits.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
        ) as http:
            try:
                yield Episode(http, self.resources_url, self.model_url)
            except EpisodeError as error:
                lost = error.status == 410 and error.where.startswith(self.resources_url.rstrip("/"))
                raise HTTPException(410 if lost else 502, str(error)) from error

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with super().running():
            self._connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
            try:
                yield
            finally:
                await self._connector.close()
