"""Cleaners of temporary folders: those that look at locks leave a living server alone, others are healed from."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.calls import Journal, ask, connection_to, count, probe_server, session_at, stopped
from tests.faults.cleaner import Cleaner
from tests.faults.files import (
    Sockets,
    is_held,
    remove_tree,
    the_directory,
    witnesses,
)
from tests.faults.scenario import in_words, scenario
from tests.gunicorn_server import CONFIG, is_alive, until

# The socket directory in a folder in which nothing else is.
IN_A_FOLDER = 'import os\nos.makedirs("{parent}/tmp", exist_ok=True)\n' + CONFIG.replace("{parent}", "{parent}/tmp")


def cleans_away(cleaner: Cleaner, path: Path) -> bool:
    """Clean the folder in which ``path`` is, and tell whether that is gone: nothing is old in the moment it is made."""
    cleaner.clean(path.parent)
    return not path.exists()


def the_one_in(folder: Path) -> Path:
    (directory,) = folder.glob("gym-gunicorn-*")
    return directory


def content(directory: Path) -> dict[str, int]:
    return {path.name: path.lstat().st_ino for path in directory.glob("*.sock")}


def test_the_cleaner_of_this_test_removes_what_nobody_holds_and_leaves_what_somebody_does(tmp_path: Path) -> None:
    for name in ("old", "held"):
        (tmp_path / name / "below").mkdir(parents=True)
        (tmp_path / name / "file").touch()
    descriptor = os.open(tmp_path / "held", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        young = Cleaner(age=3600)
        young.clean(tmp_path)
        assert young.removed == []
        cleaner = Cleaner()
        until(lambda: cleans_away(cleaner, tmp_path / "old"), "the old one is removed")
        assert (tmp_path / "held" / "file").exists() and (tmp_path / "held" / "below").exists()
        assert set(cleaner.locked) == {tmp_path / "held"}
    finally:
        os.close(descriptor)


def test_cleaner_leaves_the_directory_of_a_living_server_alone_and_removes_that_of_a_dead_one() -> None:
    with scenario("files: a cleaner that looks at locks", config=IN_A_FOLDER, workers=2) as broken:
        folder = broken.server.parent / "tmp"
        directory = the_one_in(folder)
        before = content(directory)
        sessions = witnesses(broken.server)

        async def clean() -> None:
            for _ in range(10):
                cleaner = Cleaner()
                await asyncio.to_thread(cleaner.clean, folder)
                assert (cleaner.locked, cleaner.removed) == ([directory], [])
                await asyncio.sleep(0.05)

        tally = broken.play(clean, players=20)
        assert tally.gone == 0
        assert content(directory) == before
        assert [count(broken.server, session) for session in sessions] == [2] * len(sessions)
        with stopped(*broken.server.workers()):
            # So that no worker sees its arbiter's death and cleans up.
            broken.server.kill()
        assert directory.exists()
        until(lambda: cleans_away(Cleaner(), directory), "it is removed")
        broken.tally.report(broken.name)


def test_cleaner_leaves_the_directory_alone_that_only_orphaned_workers_hold(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with probe_server(journal=journal, config=IN_A_FOLDER) as server, ThreadPoolExecutor() as pool:
        folder = server.parent / "tmp"
        directory = the_one_in(folder)
        workers = server.workers()
        held = []
        for pid in workers:
            with connection_to(server, pid) as connection:
                held.append(pool.submit(ask, connection, f"/hold?name={pid}"))
                journal.wait_for(f"hold {pid} {pid}")
        server.send(signal.SIGKILL)
        server.wait()
        cleaner = Cleaner()
        for _ in range(10):
            cleaner.clean(folder)
        assert set(cleaner.locked) == {directory}
        assert directory.exists() and is_held(directory)
        journal.release(str(workers[0]))
        until(lambda: not is_alive(workers[0]), "one worker is gone")
        Cleaner().clean(folder)
        assert directory.exists()
        journal.release(str(workers[1]))
        until(lambda: not is_alive(workers[1]), "the other one is gone")
        for future in held:
            assert future.exception(timeout=60) is not None or future.result().status == 200
        assert list(folder.iterdir()) == []


def test_directory_that_was_made_again_is_left_alone_by_a_cleaner_too() -> None:
    with probe_server(config=IN_A_FOLDER) as server:
        folder = server.parent / "tmp"
        directory = the_one_in(folder)
        session = session_at(server, server.workers()[0])
        remove_tree(directory)
        until(lambda: directory.exists() and len(list(directory.glob("*.sock"))) == 2, "the sockets are there again")
        # One that is made and not locked yet may be removed once more, which heals too.
        until(lambda: directory.exists() and is_held(directory), "it is locked")
        for _ in range(10):
            cleaner = Cleaner()
            cleaner.clean(folder)
            assert (cleaner.locked, cleaner.removed) == ([directory], [])
        assert count(server, session) == 2
        assert server.stop() == 0
        assert list(folder.iterdir()) == []


def test_cleaner_that_meets_each_making_of_the_directory_delays_the_healing_and_no_more() -> None:
    with scenario("files: a cleaner that looks at locks, all the time") as broken:
        sockets, sessions = Sockets.of(broken.server), witnesses(broken.server)
        cleaner = Cleaner()

        async def clean() -> None:
            await asyncio.to_thread(the_directory, sockets)
            for _ in range(200):
                for directory in broken.server.directories():
                    if not is_held(directory):
                        await asyncio.to_thread(cleaner.clean, directory)
                await asyncio.sleep(0.01)
            await asyncio.to_thread(sockets.wait)

        broken.play(clean, players=20, owners_live=True)
        assert [count(broken.server, session) for session in sessions] == [2] * len(sessions)
        sockets.assert_as_before(broken.server)
        broken.end()


def delete_old(folder: Path) -> None:
    """Delete what is older than a day, as found in crontabs: it looks at no lock."""
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (0, 0), follow_symlinks=False)
    subprocess.run(["find", str(folder), "-mtime", "+0", "-delete"], check=False, capture_output=True)


def sweep_of_old_sockets(folder: Path) -> None:
    """Delete old sockets alone."""
    for path in folder.glob("*.sock"):
        os.utime(path, (0, 0), follow_symlinks=False)
    subprocess.run(["find", str(folder), "-type", "s", "-mtime", "+0", "-delete"], check=False, capture_output=True)


@pytest.mark.parametrize("delete", [delete_old, sweep_of_old_sockets])
def test_server_heals_from_a_cleaner_that_looks_at_no_lock(delete: Callable[[Path], None]) -> None:
    with scenario(f"files: {in_words(delete)}, by find -delete") as broken:
        sockets, sessions = Sockets.of(broken.server), witnesses(broken.server)

        def clean() -> None:
            for calls in (2, 3):
                delete(sockets.directory)
                sockets.wait()
                assert [count(broken.server, session) for session in sessions] == [calls] * len(sessions)

        broken.play(lambda: asyncio.to_thread(clean), players=20, owners_live=True)
        sockets.assert_as_before(broken.server)
        broken.end()
