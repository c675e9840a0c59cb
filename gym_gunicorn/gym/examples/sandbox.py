"""A sandbox: files and a long-lived shell for each session. ``/seed_session``, one tool, ``/verify``; also over MCP.

The sandboxes' folders are made in ``SANDBOX_ROOT``, or else where temporary files go.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from typing import Annotated, ClassVar

from fastapi import HTTPException
from pydantic import AfterValidator, BaseModel, Field

from gym_gunicorn.gym import ResourcesServer, tool
from gym_gunicorn.gym.sandbox import Result, Sandbox, path_inside
from gym_gunicorn.gym.sandbox_shell import SandboxError

FilePath = Annotated[str, AfterValidator(lambda path: str(path_inside(path)))]
# NUL can't be said to a shell.
Command = Annotated[str, Field(pattern=r"^[^\x00]*$")]


class Seed(BaseModel):
    """``check`` is the shell command that tells, with exit status 0, that the task is done."""

    files: dict[FilePath, str] = Field(default_factory=dict)
    check: Command


class Success(BaseModel):
    success: bool = True


class RunCommand(BaseModel):
    command: Command = Field(description="What bash is to run. Its standard input is empty.")
    time_limit: float = Field(default=30.0, gt=0, le=600, description="Seconds, after which the command is killed.")


class Nothing(BaseModel):
    pass


class Reward(BaseModel):
    """``output`` is the check's."""

    reward: float
    output: str


class SandboxServer(ResourcesServer):
    """``root`` is the folder in which the sandboxes' folders are made."""

    name = "sandbox"
    expose_tools_over_mcp = True
    check_time_limit: ClassVar[float] = 60.0  # seconds

    def __init__(self, secret_key: str, *, root: str) -> None:
        super().__init__(secret_key)
        self.root = root
        self.sandboxes: dict[str, Sandbox] = {}
        self.checks: dict[str, str] = {}

    async def seed_session(self, session_id: str, body: Seed) -> Success:
        try:
            sandbox = await Sandbox.create(self.root, body.files)
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise HTTPException(422, f"files: a path is that of a file and of a folder ({error})") from error
        replaced = self.sandboxes.get(session_id)
        self.sandboxes[session_id], self.checks[session_id] = sandbox, body.check
        if replaced is not None:
            await replaced.close()
        return Success()

    @tool
    async def run_command(self, session_id: str, body: RunCommand) -> Result:
        """Run a command in the session's shell. Its folder, variables and functions stay for the next command."""
        if session_id not in self.sandboxes:
            raise HTTPException(404, "this session was not seeded, or is verified already")
        try:
            return await self.sandboxes[session_id].run(body.command, body.time_limit)
        except SandboxError as error:
            raise HTTPException(404, str(error)) from error

    async def verify(self, session_id: str, body: Nothing) -> Reward:
        if session_id not in self.sandboxes:
            raise HTTPException(404, "this session was not seeded, or is verified already")
        sandbox, check = self.sandboxes.pop(session_id), self.checks.pop(session_id)
        try:
            result = await sandbox.check(check, self.check_time_limit)
        except SandboxError as error:
            raise HTTPException(404, str(error)) from error
        finally:
            await sandbox.close()
        return Reward(reward=1.0 if result.exit_code == 0 else 0.0, output=result.output)

    async def shutdown(self) -> None:
        await asyncio.gather(*(sandbox.close() for sandbox in self.sandboxes.values()))


app = SandboxServer(
    secret_key=os.environ.get("SESSION_SECRET", "change-me"),
    root=os.environ.get("SANDBOX_ROOT") or tempfile.gettempdir(),
).app
