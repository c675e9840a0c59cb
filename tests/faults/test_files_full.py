"""The folder of the socket directory is full or read-only: at the start it is said why not, later sessions go on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.calls import (
    Journal,
    Session,
    ask,
    assert_nothing_left,
    connection_to,
    count,
    processes_of,
    session_at,
    status,
)
from tests.e2e.launching import needs
from tests.faults.files import (
    witnesses,
)
from tests.faults.scenario import in_words, scenario
from tests.gunicorn_server import CONFIG, GUNICORN, GunicornServer, gunicorn_server, is_alive, until

IN_SMALL = CONFIG.replace("{parent}", "{parent}/small")
INODES = 64

ON_A_FILE_SYSTEM = """#!/bin/sh
set -e
if [ -z "$ALONE" ]; then ALONE=yes exec unshare --mount "$0" "$@"; fi
folder=$(dirname "$2")/small
mkdir "$folder"
mount -t tmpfs -o {options} tmpfs "$folder"
{then}
"""


@pytest.fixture(autouse=True)
def can_mount() -> None:
    needs("root", "--mount")


def command(path: Path, options: str, then: str = f'exec {GUNICORN} "$@"') -> Path:
    """Write a program that starts gunicorn with a small file system of its own at ``small``, which it alone sees."""
    path.write_text(ON_A_FILE_SYSTEM.format(options=options, then=then))
    path.chmod(0o755)
    return path


def small(server: GunicornServer) -> Path:
    """The small file system, as long as the arbiter lives."""
    return Path(f"/proc/{server.pid}/root{server.parent}/small")


def mount(server: GunicornServer, *arguments: str) -> None:
    """Run ``mount`` or ``umount`` where the server sees it."""
    subprocess.run(["nsenter", "-t", str(server.pid), "-m", *arguments, str(server.parent / "small")], check=True)


def fill(server: GunicornServer) -> list[Path]:
    """Make files until no more can be made."""
    made: list[Path] = []
    try:
        for number in range(INODES + 1):
            made.append(small(server) / f"filling-{number}")
            made[-1].touch()
    except OSError:
        made.pop()
    else:
        raise AssertionError("it does not fill")
    return made


def make_full(server: GunicornServer) -> Callable[[], None]:
    made = fill(server)

    def mend() -> None:
        for path in made:
            path.unlink()

    return mend


def make_read_only(server: GunicornServer) -> Callable[[], None]:
    """Lay a read-only view over it: the kernel makes no file system read-only to which programs can write."""
    mount(server, "mount", "--bind", str(server.parent / "small"))
    mount(server, "mount", "-o", "remount,bind,ro")
    return lambda: mount(server, "umount", "--lazy")


def make_full_of_data(server: GunicornServer) -> Callable[[], None]:
    """Leave room for names and sockets, and none for a byte: what a disk is that a log has filled."""
    filling = small(server) / "filling"
    with filling.open("wb") as file:
        try:
            while True:
                os.write(file.fileno(), b"x" * 4096)
        except OSError:
            pass
    return filling.unlink


Harm = Callable[[GunicornServer], Callable[[], None]]
HARMS = pytest.mark.parametrize("harm", [make_full, make_full_of_data, make_read_only])


@contextmanager
def small_probe(tmp_path: Path, journal: Journal | None = None, *arguments: str) -> Iterator[GunicornServer]:
    """Serve the probe with two workers and the socket directory on the small file system."""
    gunicorn = command(tmp_path / "gunicorn", f"nr_inodes={INODES},size=1m")
    options = ("--keep-alive", "75", *arguments)
    env = journal.env if journal is not None else {}
    app = "tests.e2e.apps.probe:app"
    with gunicorn_server(*options, app=app, config=IN_SMALL, workers=2, gunicorn=gunicorn, env=env) as server:
        yield server


def owners(server: GunicornServer) -> set[str]:
    return {path.stem for path in small(server).glob("gym-gunicorn-*/*.sock")}


# At the start


@pytest.mark.parametrize(
    ("options", "cause"),
    [("nr_inodes=1", "No space left on device"), ("ro", "Read-only file system")],
    ids=["full", "read-only"],
)
def test_start_in_a_folder_that_can_not_be_used_names_the_folder_and_the_setting(
    options: str, cause: str, tmp_path: Path
) -> None:
    look = f'code=0; {GUNICORN} "$@" || code=$?; ls -A "$folder" > "$folder-left"; exit $code'
    gunicorn = command(tmp_path / "gunicorn", options, look)
    with gunicorn_server(config=IN_SMALL, workers=2, ready=False, gunicorn=gunicorn) as server:
        assert server.wait() != 0
        assert server.log().count(f"the socket directory can't be made in '{server.parent}/small': {cause}.") == 1
        assert "SessionRouting(directory=...)" in server.log()
        assert (server.parent / "small-left").read_text() == ""
        assert_nothing_left(server)


# While it serves


@HARMS
def test_sessions_go_on_in_a_folder_that_has_become_full_or_read_only(harm: Harm, tmp_path: Path) -> None:
    gunicorn = command(tmp_path / "gunicorn", f"nr_inodes={INODES},size=1m")
    name = f"files: {in_words(harm)} while it serves"
    with scenario(name, "--keep-alive", "75", config=IN_SMALL, gunicorn=gunicorn) as broken:
        sessions = witnesses(broken.server)
        mends: list[Callable[[], None]] = []

        async def spoil() -> None:
            mends.append(harm(broken.server))
            await asyncio.sleep(1.2)

        tally = broken.play(spoil, players=30)
        assert tally.right == tally.requests
        assert [count(broken.server, session) for session in sessions] == [2] * len(sessions)
        assert "[ERROR]" not in broken.server.log()
        mends[0]()
        broken.end()


@HARMS
def test_reload_in_a_folder_that_can_not_be_used_says_why_and_serves_as_soon_as_it_can(
    harm: Harm, tmp_path: Path
) -> None:
    with small_probe(tmp_path, None, "--graceful-timeout", "5") as server:
        old = server.workers()
        lost = [session_at(server, pid) for pid in old]
        mend = harm(server)
        server.send(signal.SIGHUP)
        cause = "Read-only file system" if harm is make_read_only else "No space left on device"
        until(lambda: cause in server.log(), "the log says what is wrong")
        until(lambda: not any(map(is_alive, old)), "the old workers are gone")
        assert is_alive(server.pid)
        mend()
        until(lambda: len(owners(server)) == 2, "new workers have sockets")
        until(lambda: server.ready_workers() >= 4, "new workers serve")
        assert [status(server, session) for session in lost] == [410, 410]
        made = [session_at(server, pid) for pid in server.workers()]
        assert [count(server, session) for session in made for _ in range(3)] == [2, 3, 4] * 2
        assert server.stop() == 0
        until(lambda: not processes_of(server), "every process has ended")


@HARMS
def test_killed_worker_is_told_of_by_410_and_replaced_as_soon_as_the_folder_can_be_used(
    harm: Harm, tmp_path: Path
) -> None:
    with small_probe(tmp_path) as server:
        dead, living = server.workers()
        lost, kept = session_at(server, dead), session_at(server, living)
        mend = harm(server)
        os.kill(dead, signal.SIGKILL)
        until(lambda: not is_alive(dead), "it is dead")
        assert [count(server, kept) for _ in range(3)] == [2, 3, 4]
        assert status(server, lost) == 410
        mend()
        until(lambda: server.ready_workers() == 3, "it is replaced")
        until(lambda: len(server.workers()) == 2, "two workers live")
        for calls, pid in enumerate(server.workers(), start=5):
            with connection_to(server, pid) as connection:
                assert count(connection, kept) == calls
        assert status(server, lost) == 410
        assert server.stop() == 0
        until(lambda: not processes_of(server), "every process has ended")


@HARMS
def test_stop_in_a_folder_that_can_not_be_used_finishes_what_is_in_flight(harm: Harm, tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with small_probe(tmp_path, journal) as server, ThreadPoolExecutor() as pool:
        owner, receiver = server.workers()
        session: Session = session_at(server, owner)
        with connection_to(server, receiver) as one, connection_to(server, owner) as other:
            forwarded = pool.submit(ask, one, "/hold?name=forwarded", session)
            local = pool.submit(ask, other, "/hold?name=local", session)
            for name in ("forwarded", "local"):
                journal.wait_for(f"hold {name} {owner}")
            harm(server)
            server.send(signal.SIGTERM)
            until(lambda: server.log().count("Stopping: SIGTERM") == 2, "both workers are stopping")
            for name in ("forwarded", "local"):
                journal.release(name)
            assert [held.result(timeout=60).json() for held in (forwarded, local)] == [{"pid": owner}] * 2
        assert server.wait() == 0
        until(lambda: not processes_of(server), "every process has ended")
        ended = {line.split()[-1] for line in journal.lines() if line.startswith("shutdown ")}
        assert ended == {str(owner), str(receiver)}, "the app has been shut down in good order"
        assert "Traceback" not in server.log()


def test_sockets_removed_while_the_folder_is_full_are_bound_again_when_there_is_room(tmp_path: Path) -> None:
    with small_probe(tmp_path) as server:
        sessions = [session_at(server, pid) for pid in server.workers()]
        before = owners(server)
        (directory,) = small(server).glob("gym-gunicorn-*")
        mend = make_full(server)
        for path in directory.glob("*.sock"):
            # There is no more room for that: whoever listens at a socket keeps its inode.
            path.unlink(missing_ok=True)
        until(lambda: "No space left on device" in server.log(), "the log says what is wrong")
        for session in sessions:
            assert status(server, session) in (200, 410)
        mend()
        until(lambda: owners(server) == before, "the sockets are there again")
        for session in sessions:
            assert count(server, session) in (2, 3)
        assert server.stop() == 0
        until(lambda: not processes_of(server), "every process has ended")


def test_sockets_removed_while_there_is_no_room_for_data_are_bound_again_at_once(tmp_path: Path) -> None:
    """A socket needs no room for data, and a session is worth more than whatever else is kept beside it."""
    with small_probe(tmp_path) as server:
        sessions = [session_at(server, pid) for pid in server.workers()]
        before = owners(server)
        (directory,) = small(server).glob("gym-gunicorn-*")
        make_full_of_data(server)
        for path in directory.iterdir():
            # Some are but beside what they are to replace.
            path.unlink(missing_ok=True)
        until(lambda: owners(server) == before, "the sockets are there again")
        for calls, pid in enumerate(server.workers(), start=2):
            with connection_to(server, pid) as connection:
                assert [count(connection, session) for session in sessions] == [calls] * 2
        assert server.stop() == 0
        until(lambda: not processes_of(server), "every process has ended")
