"""A sandbox's shell, and the pipe that its commands write to, as the worker has them."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import uuid
from contextlib import suppress


class SandboxError(Exception):
    """A sandbox can't be made, or is closed, or a command has ended its keeper."""


class ShellEnded(Exception):
    """A shell has ended. ``status`` is its exit status, or the negative number of the signal that ended it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"exit status {status}" if status >= 0 else signal.Signals(-status).name)
        self.status = status


class Shell:
    """One bash, which reads its commands from a socket, and answers over it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count()
        self.pid = 0
        self.goes_on = False

    def say(self, line: str) -> None:
        if not self._writer.is_closing():
            self._writer.write(line.encode() + b"\n")

    async def run(self, command: str) -> int:
        """Run a command and return its exit status."""
        # Sourced, because an interactive bash comments on what it reads; with redirections
        # that take the socket out of the command's reach.
        end = uuid.uuid4().hex
        self.say(f"\\builtin source /dev/fd/99 </dev/null 99<<'{end}'\n{command}\n{end}")
        return await self.ask("$?")

    async def ask(self, parameter: str) -> int:
        """Return the value of a parameter of the shell, when it has done what it was told before.

        Raises:
            ShellEnded: the shell has ended.
            SandboxError: the sandbox has.
        """
        # Numbered, for there may be late answers to those who no longer wait for them.
        number = next(self._numbers)
        self.say(f"\\builtin echo {number} {parameter} >&0")
        with suppress(ConnectionError):
            while line := await self._reader.readline():
                kind, value = line.split()
                if kind == b"ended":
                    raise ShellEnded(int(value))
                if int(kind) == number:
                    return int(value)
        raise SandboxError("the sandbox is closed")

    def close(self) -> None:
        self._writer.close()


class Output:
    """The pipe that all output of a sandbox goes to: ``take`` returns what came since the last time."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._collected = bytearray()
        self._truncated = False
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        asyncio.get_running_loop().add_reader(self._read_end, self._read)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            # As much as a pipe holds.
            data = os.read(self._read_end, 65536)
            room = self._limit - len(self._collected)
            self._collected += data[:room]
            self._truncated |= len(data) > room

    def take(self) -> tuple[str, bool]:
        """Return the output, and whether some of it was dropped."""
        # What ended processes have written is in the pipe by now.
        self._read()
        taken = self._collected.decode(errors="replace"), self._truncated
        self._collected.clear()
        self._truncated = False
        return taken

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)
        os.close(self.write_end)
