"""Socket directories as the command finds them: running servers, what others left, and what nobody meant."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gym_gunicorn.cli.processes import process
from gym_gunicorn.cli.servers import Server, Where, find
from gym_gunicorn.cli.status import as_json
from gym_gunicorn.cli.table import console, table
from gym_gunicorn.lifecycle import arbiter_record
from gym_gunicorn.lifecycle.socket_directory import SocketDirectory
from gym_gunicorn.metrics.totals import fold
from gym_gunicorn.metrics.values import BEAT, PID, SERVING, STAMPED, STATE, STOPPING, Figures, figures_path
from gym_gunicorn.owner import new_owner_id
from tests.fuzz.strategies import fuzzed
from tests.gunicorn_server import until
from tests.workers import socket_directory


@pytest.fixture
def directory() -> Iterator[SocketDirectory]:
    """A socket directory that this process holds."""
    with socket_directory() as parent:
        made = SocketDirectory.create(parent, os.geteuid(), os.getegid())
        try:
            yield made
        finally:
            made.let_go()


def worker(directory: SocketDirectory, **values: int) -> tuple[str, Figures]:
    """A worker of that directory: this process."""
    owner = new_owner_id()
    figures = Figures(figures_path(directory.path, owner))
    figures.values[STATE] = SERVING
    for name, value in values.items():
        figures.values[{"pid": PID, "state": STATE, "stamped": STAMPED, "beat": BEAT}[name]] = value
    return owner, figures


def found(directory: SocketDirectory) -> Server:
    (server,) = find(Where(directory.path))
    return server


def said(directory: SocketDirectory, **facts: object) -> None:
    arbiter_record.write(
        directory.descriptor, {"pid": os.getpid(), "start": arbiter_record.start_of(os.getpid()), **facts}
    )


def shown(server: Server) -> str:
    screen = console()
    with screen.capture() as capture:
        screen.print(table([server], screen.width))
    json.dumps(as_json([server]))
    return capture.get()


def test_directory_that_somebody_holds_is_a_server(directory: SocketDirectory) -> None:
    owner, _ = worker(directory)
    assert [one.owner_id for one in found(directory).workers] == [owner]


def test_directory_that_nobody_holds_is_none(directory: SocketDirectory) -> None:
    worker(directory)
    directory.let_go()
    assert find(Where(directory.path)) == []


def test_empty_directory_is_no_server_and_its_lock_is_not_touched(directory: SocketDirectory) -> None:
    assert find(Where(directory.path)) == []


def test_looking_takes_no_lock_that_lasts(directory: SocketDirectory) -> None:
    worker(directory)
    path = directory.path
    directory.let_go()
    find(Where(path))
    other = SocketDirectory(path, os.open(path, os.O_RDONLY))
    assert other.leave()


@pytest.mark.parametrize(
    ("values", "state"),
    [
        ({}, "serving"),
        ({"state": 0}, "starting"),
        ({"state": STOPPING}, "stopping"),
        ({"beat": 1}, "dead"),
        ({"pid": 2**22 + 1}, "dead"),
        ({"pid": 2**64 - 1}, "dead"),
        ({"state": 99}, "unknown"),
    ],
)
def test_worker_has_a_state(directory: SocketDirectory, values: dict[str, int], state: str) -> None:
    worker(directory, **values)
    server = found(directory)
    assert [one.state for one in server.workers] == [state]
    shown(server)


def test_worker_that_was_heard_of_before_its_process_was_started_is_another(directory: SocketDirectory) -> None:
    child = subprocess.Popen(["sleep", "600"])
    try:
        started = process(child.pid)
        assert started is not None
        worker(directory, pid=child.pid, beat=time.monotonic_ns() - int((started.age() + 60) * 1e9))
        assert found(directory).workers[0].state == "dead"
    finally:
        child.kill()
        child.wait()


def test_worker_whose_loop_stands_still_is_silent(directory: SocketDirectory) -> None:
    # Its process is to be older than what it was last heard of.
    until(lambda: (there := process(os.getpid())) is not None and there.age() > 4, "this process is older than that")
    _, figures = worker(directory)
    figures.values[BEAT] = time.monotonic_ns() - int(3.1e9)
    assert found(directory).workers[0].state == "silent"
    assert re.search(r"silent \d+ s", shown(found(directory)))


def test_worker_is_not_silent_while_it_loads_its_app(directory: SocketDirectory) -> None:
    _, figures = worker(directory, state=0)
    figures.values[BEAT] = time.monotonic_ns() - 10**7
    assert found(directory).workers[0].state == "starting"


def test_unevenness_is_the_most_stamped_over_the_mean(directory: SocketDirectory) -> None:
    kept = [worker(directory, stamped=stamped) for stamped in (0, 10, 20)]
    assert found(directory).unevenness() == 2.0
    assert "2.0 times the mean" in shown(found(directory))
    del kept


BALANCED = 'SessionRouting(placement="balanced")'


def test_balanced_is_named_where_sessions_are_left_where_they_land_and_fall_unevenly(
    directory: SocketDirectory,
) -> None:
    kept = [worker(directory, stamped=stamped) for stamped in (2, 10, 20)]
    said(directory, placement="local")
    assert f"1.9 times the mean; {BALANCED} evens new sessions out" in shown(found(directory))
    del kept


def test_balanced_is_named_where_the_arbiter_does_not_say_who_places(directory: SocketDirectory) -> None:
    kept = [worker(directory, stamped=stamped) for stamped in (2, 10, 20)]
    assert found(directory).arbiters == ()
    assert BALANCED in shown(found(directory))
    said(directory, placement=3)
    assert BALANCED in shown(found(directory))
    del kept


@pytest.mark.parametrize("placement", ["balanced", "own"])
def test_balanced_is_not_named_where_sessions_are_placed_already(directory: SocketDirectory, placement: str) -> None:
    kept = [worker(directory, stamped=stamped) for stamped in (2, 10, 20)]
    said(directory, placement=placement)
    assert "1.9 times the mean" in shown(found(directory))
    assert BALANCED not in shown(found(directory))
    del kept


@pytest.mark.parametrize("stamped", [(10, 10, 19), (2, 2, 15)], ids=["even enough", "too few to tell"])
def test_balanced_is_not_named_without_need(directory: SocketDirectory, stamped: tuple[int, ...]) -> None:
    kept = [worker(directory, stamped=number) for number in stamped]
    said(directory, placement="local")
    assert "times the mean" in shown(found(directory))
    assert BALANCED not in shown(found(directory))
    del kept


def test_server_without_sessions_is_neither_even_nor_uneven(directory: SocketDirectory) -> None:
    kept = [worker(directory), worker(directory)]
    assert found(directory).unevenness() is None
    del kept


def test_files_that_are_nobodys_are_passed_over(directory: SocketDirectory) -> None:
    owner, _ = worker(directory)
    for name in (
        "README",
        "x.figures",
        "total.sock",
        ".figures",
        "1.arbiter~",
        "-1.arbiter",
        "²3.arbiter",
        "a.arbiter",
    ):
        Path(directory.path, name).write_text("x")
    assert [one.owner_id for one in found(directory).workers] == [owner]
    assert found(directory).arbiters == ()


@pytest.mark.parametrize("kind", ["empty", "short", "long", "garbage", "folder", "pipe", "link", "no right to read"])
def test_figures_that_can_not_be_read_are_shown_as_such(directory: SocketDirectory, kind: str) -> None:
    owner, _ = worker(directory)
    spoilt = new_owner_id()
    path = Path(figures_path(directory.path, spoilt))
    whole = Path(figures_path(directory.path, owner)).read_bytes()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to("/etc/passwd")
    else:
        path.write_bytes({"empty": b"", "short": whole[:-1], "long": whole + b"x"}.get(kind, os.urandom(len(whole))))
    server = found(directory)
    assert {one.owner_id: one.state for one in server.workers} == {owner: "serving", spoilt: "unknown"}
    assert "no figures" in shown(server)


@pytest.mark.parametrize("kind", ["pipe", "socket", "link", "folder", "empty", "large"])
def test_arbiter_file_that_is_none_is_survived(directory: SocketDirectory, kind: str) -> None:
    owner, _ = worker(directory)
    path = Path(directory.path, f"{os.getpid()}.arbiter")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    else:
        path.write_bytes(b"" if kind == "empty" else b"[" * 10_000_000)
    server = found(directory)
    assert [one.owner_id for one in server.workers] == [owner]
    # This process has the directory open, so that it may well be the arbiter.
    assert [one.process.pid for one in server.arbiters] == [os.getpid()]
    assert f"arbiter {os.getpid()}" in shown(server)


def test_pid_that_is_another_processs_by_now_is_no_arbiter(directory: SocketDirectory) -> None:
    worker(directory)
    said(directory, start=1)
    assert found(directory).arbiters == ()
    assert "No arbiter is left" in shown(found(directory))


def test_unreadable_words_of_a_process_that_has_nothing_to_do_with_it_are_no_arbiter(
    directory: SocketDirectory,
) -> None:
    worker(directory)
    Path(directory.path, f"{os.getppid()}.arbiter").write_text("no JSON")
    assert found(directory).arbiters == ()


def test_what_an_arbiter_says_is_shown_without_what_would_move_the_cursor(directory: SocketDirectory) -> None:
    worker(directory)
    said(directory, name="a\x1b[2Jb[red]c\n\r\x9b", addresses=["http://x\x1b]0;y\x07"], workers=2, reloads=3)
    text = shown(found(directory))
    assert "a?[2Jb[red]c???" in text
    assert not any(not letter.isprintable() for letter in text.replace("\n", ""))
    assert "3 reloads" in text


FACTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@settings(fuzzed(0.15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    facts=st.dictionaries(st.sampled_from(["name", "addresses", "workers", "reloads", "placement", "version"]), FACTS)
)
def test_no_arbiters_words_are_too_odd(directory: SocketDirectory, facts: dict[str, object]) -> None:
    said(directory, **facts)
    (arbiter,) = found(directory).arbiters
    assert arbiter.process.pid == os.getpid()
    assert shown(found(directory)).isascii() or facts


@settings(fuzzed(0.15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=400), name=st.sampled_from(["total.figures", "0123456789ab.figures", "%d.arbiter"]))
def test_no_bytes_are_too_odd(directory: SocketDirectory, data: bytes, name: str) -> None:
    kept = worker(directory)
    Path(directory.path, name.replace("%d", str(os.getpid()))).write_bytes(data)
    assert kept[0] in shown(found(directory))
    os.unlink(figures_path(directory.path, kept[0]))


def test_another_users_directory_is_looked_at_by_root_alone(
    directory: SocketDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = worker(directory)
    monkeypatch.setattr(os, "geteuid", lambda: directory.uid + 12345)
    assert find(Where(directory.path)) == []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert len(find(Where(directory.path))) == 1
    del kept


def test_hundred_workers_that_have_ended_leave_one_line(directory: SocketDirectory) -> None:
    owner, _ = worker(directory)
    before = len(shown(found(directory)).splitlines())
    for _ in range(100):
        ended, _ = worker(directory, stamped=2)
        fold(directory.descriptor, ended)
    server = found(directory)
    assert server.sums()["stamped"] == 200
    assert [one.owner_id for one in server.workers] == [owner]
    assert len(shown(server).splitlines()) == before + 1
    assert sorted(os.listdir(directory.path)) == sorted([f"{owner}.figures", "total.figures"])


@pytest.mark.parametrize("width", [30, 60, 80, 100, 120, 200])
def test_table_keeps_to_the_width_that_there_is(directory: SocketDirectory, width: int) -> None:
    owner, _ = worker(directory, stamped=123456)
    screen = console()
    with screen.capture() as capture:
        screen.print(table([found(directory)], width))
    (row,) = (line.rstrip() for line in capture.get().splitlines() if owner in line)
    assert len(row) <= max(width, 65)
    assert "…" not in row


def test_arbiter_file_that_is_a_link_is_not_followed(directory: SocketDirectory, tmp_path: Path) -> None:
    worker(directory)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text(json.dumps({"start": arbiter_record.start_of(os.getpid()), "name": "of another file"}))
    Path(directory.path, f"{os.getpid()}.arbiter").symlink_to(elsewhere)
    assert "of another file" not in shown(found(directory))
