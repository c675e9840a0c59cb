"""A sandbox: a temporary folder and a long-lived shell in it. It needs Linux and bash.

It keeps sessions apart and leaves nothing behind, but it is no wall: commands run as the
server's user. Where they are not to be trusted, the server runs in a container.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import ClassVar

from pydantic import BaseModel

from gym_gunicorn.gym import sandbox_keeper
from gym_gunicorn.gym.sandbox_keeper import descendants, send
from gym_gunicorn.gym.sandbox_shell import Output, SandboxError, Shell, ShellEnded

log = logging.getLogger("uvicorn.error")


class Result(BaseModel):
    """What became of a command: ``exit_code`` is null where it was ended; ``truncated``: some output is missing."""

    output: str
    exit_code: int | None
    timed_out: bool
    truncated: bool


class Sandbox:
    """A folder and a shell, made by ``create``, whose commands run one after another.

    A process of its own, the keeper, guards them: it ends all that was started here and
    removes the folder when the sandbox is closed, or when this process ends.
    """

    output_limit: ClassVar[int] = 64 * 1024  # bytes of a command's output; more is dropped
    starting_time: ClassVar[float] = 30.0  # seconds that a new shell may take
    ending_time: ClassVar[float] = 3.0  # seconds for a shell to go on after a command that was ended
    closing_time: ClassVar[float] = 10.0  # seconds that `close` waits

    def __init__(self, folder: Path) -> None:
        self.folder = folder = folder.absolute()
        self._turns = asyncio.Lock()
        self._shell: Shell | None = None
        self._output = Output(self.output_limit)
        self._ended = asyncio.Event()
        self._control, control = socket.socketpair()
        with control:
            # Not a subprocess of asyncio (3.11), which kills it when it is closed or forgotten.
            self._keeper = subprocess.Popen(
                [sys.executable, "-I", "-S", sandbox_keeper.__file__, str(folder)],
                stdin=control.fileno(),
                stdout=subprocess.DEVNULL,
                # Nothing of this process's own: that may hold secrets.
                env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder), "LANG": "C.UTF-8"},
                # Out of the reach of a terminal's Ctrl-C.
                start_new_session=True,
            )
        asyncio.get_running_loop().add_reader(self._control, self._keeper_ended)

    @classmethod
    async def create(cls, root: str | Path, files: Mapping[str, str]) -> Sandbox:
        """Make a sandbox, in a new folder ``gym-sandbox-...`` in the folder ``root``.

        Args:
            files: texts by their paths in the sandbox's folder.

        Raises:
            ValueError: a path leads out of the folder.
            OSError: a file can't be written.
            SandboxError: the folder can't be made, or no shell starts in it.
        """
        paths = {path_inside(path): text for path, text in files.items()}
        sandbox = cls(Path(root) / f"gym-sandbox-{uuid.uuid4().hex}")
        try:
            await sandbox._start_shell()
            await asyncio.to_thread(_write, sandbox.folder, paths)
        except BaseException:
            await sandbox.close()
            raise
        return sandbox

    async def run(self, command: str, time_limit: float) -> Result:
        """Run a command in the shell; folder, variables and functions stay for the next one.

        Its standard input is empty. What a background job writes is in the output of the
        command that runs then, or of the next one.

        Args:
            time_limit: seconds, after which all that the command started is ended: by
                SIGINT, and by SIGKILL what goes on. A shell that then does not go on is
                replaced, and the output says so.

        Raises:
            SandboxError: the sandbox is closed, or broken.
        """
        async with self._turns:
            return await self._run(command, time_limit)

    async def check(self, command: str, time_limit: float) -> Result:
        """Run a command as ``run`` does, but in a fresh shell, in the sandbox's folder."""
        async with self._turns:
            await self._start_shell()
            self._output.take()
            return await self._run(f"bash -c {shlex.quote(command)}", time_limit)

    async def close(self) -> None:
        """End all processes and remove the folder. After ``closing_time`` this goes on without being waited for."""
        with suppress(OSError):  # it is closed
            self._control.shutdown(socket.SHUT_WR)
        try:
            async with asyncio.timeout(self.closing_time):
                await self._ended.wait()
        except TimeoutError:
            log.error("Sandbox %s is still being cleared by its keeper (pid %s)", self.folder, self._keeper.pid)
        else:
            # There only where a command has killed the keeper.
            await asyncio.to_thread(shutil.rmtree, self.folder, ignore_errors=True)

    def _keeper_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._control)
        self._control.close()
        self._output.close()
        if self._shell is not None:
            self._shell.close()
        self._keeper.wait()
        self._ended.set()

    async def _start_shell(self) -> None:
        """Have a new shell in the place of the last one."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            try:
                socket.send_fds(self._control, [b"."], [theirs.fileno(), self._output.write_end])
            except OSError as error:
                ours.close()
                raise SandboxError("the sandbox is closed") from error
        if self._shell is not None:
            self._shell.close()
        self._shell = Shell(*await asyncio.open_unix_connection(sock=ours))
        self._shell.say("PS1= PS2=; unset MAILCHECK; exec 2>&1")
        try:
            async with asyncio.timeout(self.starting_time):
                self._shell.pid = await self._shell.ask("$$")
        except (TimeoutError, ShellEnded) as error:
            raise SandboxError(f"no shell starts in {self.folder} ({error!r})") from error
        self._shell.goes_on = True

    async def _run(self, command: str, time_limit: float) -> Result:
        notes = []
        if self._ended.is_set():
            raise SandboxError("the sandbox is closed")
        if self._shell is None or not self._shell.goes_on:
            await self._start_shell()
            notes.append("[this is a new shell: the one before was ended with a call that was given up]")
        shell = self._shell
        assert shell is not None
        shell.goes_on = False
        others = {*descendants(self._keeper.pid)} - {shell.pid}
        exit_code, timed_out = None, False
        try:
            async with asyncio.timeout(time_limit):
                exit_code = await shell.run(command)
            shell.goes_on = True
        except TimeoutError:
            timed_out = True
            notes.append(f"[ended after {time_limit:g} s]")
            await self._end_command(shell, others)
        except asyncio.CancelledError:
            with suppress(SandboxError):
                await self._end_command(shell, others)
            raise
        except ShellEnded as ended:
            exit_code = ended.status if ended.status >= 0 else None
            notes.append(f"[the shell has ended: {ended}]")
        if not shell.goes_on:
            await self._start_shell()
            notes.append(
                f"[a new shell begins in {self.folder}, without the variables and functions of the one before]"
            )
        output, truncated = self._output.take()
        if output and notes and not output.endswith("\n"):
            output += "\n"
        return Result(output=output + "\n".join(notes), exit_code=exit_code, timed_out=timed_out, truncated=truncated)

    async def _end_command(self, shell: Shell, others: set[int]) -> None:
        """End all processes but the ``others``, and have the shell go on, or end it as well."""
        clock = asyncio.get_running_loop().time
        end, patience = clock() + self.ending_time, 0.05
        told: Counter[int] = Counter()

        def send_all() -> bool:
            started = {pid for pid in descendants(self._keeper.pid, others) if pid != shell.pid}
            for pid in started:
                # Twice, for one between fork and exec may miss the first.
                send(signal.SIGINT if told[pid] < 2 else signal.SIGKILL, pid)
            told.update(started)
            return bool(started)

        with suppress(ShellEnded):
            while clock() < end:
                # bash takes SIGINT for its own where what it waits for dies of it afterwards.
                send(signal.SIGINT, shell.pid)
                send_all()
                try:
                    async with asyncio.timeout(patience):
                        await shell.ask("0")
                except TimeoutError:
                    patience *= 2
                    continue
                if not send_all():
                    shell.goes_on = True
                    return
                await asyncio.sleep(0.01)
        send(signal.SIGKILL, shell.pid)
        for _ in range(100):
            if not send_all():
                return
            await asyncio.sleep(0.01)


def path_inside(path: str) -> PurePosixPath:
    """Return the path of a file in a sandbox's folder.

    Raises:
        ValueError: it is no such path.
    """
    inside = PurePosixPath(path)
    long = any(len(part.encode()) > 255 for part in inside.parts)
    if inside.is_absolute() or not inside.parts or ".." in inside.parts or "\0" in path or long:
        raise ValueError(f"{path!r} is no path of a file in the sandbox's folder")
    return inside


def _write(folder: Path, files: Mapping[PurePosixPath, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
