"""A listener that is closed while a connection to it waits to be accepted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import uvloop

from gym_gunicorn.forwarding.errors import Busy, Gone
from gym_gunicorn.forwarding.links.peer import LinkPeer
from gym_gunicorn.forwarding.sockets import bind_private_socket
from gym_gunicorn.metrics.values import Figures

OWNER = "0123456789ab"


@pytest.mark.parametrize("removed", [True, False], ids=["and removed", "and served anew"])
@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop], ids=["uvloop", "asyncio"])
def test_connection_that_waited_at_a_closed_listener_was_sent_nothing(
    tmp_path: Path, loop: Callable[[], asyncio.AbstractEventLoop], removed: bool
) -> None:
    async def main() -> None:
        path = tmp_path / f"{OWNER}.sock"
        listener = bind_private_socket(str(path), 16)
        peer = LinkPeer(OWNER, str(path), 10, Figures())
        listener.accept()[0].close()
        connecting = asyncio.ensure_future(peer.connect())
        # It has called connect(2), and not been told of the outcome.
        await asyncio.sleep(0)
        path.unlink()
        other: list[socket.socket] = [] if removed else [bind_private_socket(str(path), 16)]
        listener.close()
        try:
            with pytest.raises(Gone if removed else Busy):
                await connecting
        finally:
            await peer.close()
            for one in other:
                one.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(main())
