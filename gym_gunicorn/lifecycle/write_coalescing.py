"""Sends the head of a reply and what is at hand of its body in one write: one system call and one packet, not two."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, cast

# Bytes up to which copying is cheaper than a system call.
_SMALL = 65536


def in_one_write(protocol: type[asyncio.Protocol]) -> type[asyncio.Protocol]:
    """Return a protocol class of uvicorn's whose replies leave in one write where they can.

    uvicorn (0.54) writes head and body one after the other, and uvloop (0.23) sends each at once.
    """

    class OneWriteProtocol(protocol):  # type: ignore[valid-type, misc]  # a class known at run time only
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(OneWrite(cast(asyncio.Transport, transport)))

    return OneWriteProtocol


class OneWrite(asyncio.Transport):
    """A transport that holds what begins as the head of a reply does, until the next write or turn of the event loop.

    All else goes on to ``transport`` as it comes.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        super().__init__()
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._held = b""
        # What is called for each request, without a step in between.
        self.is_closing = transport.is_closing  # type: ignore[method-assign]
        self.get_extra_info = transport.get_extra_info  # type: ignore[method-assign]
        self.pause_reading = transport.pause_reading  # type: ignore[method-assign]
        self.resume_reading = transport.resume_reading  # type: ignore[method-assign]

    def write(self, data: Any) -> None:
        held, self._held = self._held, b""
        if held:
            if type(data) is bytes and len(data) < _SMALL:
                self._transport.write(held + data)
            else:
                # What is no bytes may be refused.
                self._transport.write(held)
                self._transport.write(data)
        elif type(data) is bytes and data[:5] == b"HTTP/" and len(data) < _SMALL:
            self._held = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def _flush(self) -> None:
        if self._held:
            held, self._held = self._held, b""
            # Closing is not closed: what is written may still be sent, after what is left of the reply before.
            # uvloop (0.23) raises where it is closed.
            with contextlib.suppress(RuntimeError):
                self._transport.write(held)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        self._held = b""
        self._transport.abort()

    def get_write_buffer_size(self) -> int:
        return len(self._held) + self._transport.get_write_buffer_size()

    # The rest of a transport's methods

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        self._flush()
        self._transport.write_eof()

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._transport.get_write_buffer_limits()

    def is_reading(self) -> bool:
        return self._transport.is_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._transport.get_protocol()
