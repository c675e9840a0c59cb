from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gym_gunicorn.forwarding.errors import Busy, ForwardError, Gone
from gym_gunicorn.forwarding.sockets import (
    MAX_PATH,
    bind_private_socket,
    connect_failure,
    is_dead,
    listener_process,
    socket_path,
    unlink,
)
from gym_gunicorn.lifecycle.socket_directory import PREFIX, DirectoryError, SocketDirectory, sweep
from gym_gunicorn.owner import new_owner_id

OWNER = "0" * 12
UID, GID = os.geteuid(), os.getegid()


@pytest.fixture
def parent() -> Iterator[str]:
    """A folder with a path that is short enough for Unix sockets."""
    path = tempfile.mkdtemp(dir="/tmp", prefix="unit-")
    try:
        yield path
    finally:
        shutil.rmtree(path)


Create = Callable[..., SocketDirectory]


@pytest.fixture
def create(parent: str) -> Iterator[Create]:
    """Make socket directories that are left when the test ends."""
    with contextlib.ExitStack() as stack:

        def create(folder: str = parent, uid: int = UID, gid: int = GID) -> SocketDirectory:
            made = SocketDirectory.create(folder, uid, gid)
            stack.callback(made.leave)
            return made

        yield create


@pytest.fixture
def directory(create: Create) -> SocketDirectory:
    return create()


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


@contextlib.contextmanager
def child_holding(*descriptors: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start a child that does nothing but keep open what it inherited."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=descriptors) as child:
        yield child


@contextlib.contextmanager
def python(script: str, *arguments: str, close_fds: bool = True) -> Iterator[subprocess.Popen[str]]:
    """Run a script that ends when its standard input does; wait for it, and for whoever it forked."""
    script = "import os, sys\n" + script
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        close_fds=close_fds,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process
        finally:
            process.stdin.close()
            process.stdout.read()


def says(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def open_descriptors() -> set[str]:
    with os.scandir("/proc/self/fd") as entries:
        return {f"{entry.name} {os.readlink(entry.path)}" for entry in entries if os.path.lexists(entry.path)}


def mode_of(path: str) -> int:
    return stat.S_IMODE(os.stat(path, follow_symlinks=False).st_mode)


# Making one


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o277, 0o777], ids=oct)
def test_a_directory_is_for_its_user_alone_whatever_the_umask(create: Create, mask: int) -> None:
    with umask(mask):
        made = create()
    assert mode_of(made.path) == 0o700
    assert made.leave()


def test_a_directory_belongs_to_the_user_that_it_is_made_for(create: Create) -> None:
    uid, gid = (65534, 65534) if UID == 0 else (UID, GID)
    made = create(uid=uid, gid=gid)
    status = os.stat(made.path)
    assert (status.st_uid, status.st_gid) == (uid, gid)
    assert made.leave()


def test_a_directory_can_be_given_to_another_user_later(directory: SocketDirectory) -> None:
    uid, gid = (65534, 65534) if UID == 0 else (UID, GID)
    directory.give_to(uid, gid)
    status = os.stat(directory.path)
    assert (status.st_uid, status.st_gid) == (uid, gid)
    assert mode_of(directory.path) == 0o700


def test_a_directory_has_an_absolute_path_with_the_prefix(
    parent: str, create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(parent)
    made = create(".")
    assert os.path.dirname(made.path) == parent
    assert os.path.basename(made.path).startswith(PREFIX)
    assert made.leave()


def test_two_directories_in_one_folder_do_not_meet(create: Create) -> None:
    one, other = create(), create()
    assert one.path != other.path
    assert one.leave()
    assert os.path.isdir(other.path)
    assert other.leave()


def test_programs_that_the_app_starts_do_not_inherit_the_lock(directory: SocketDirectory) -> None:
    assert not os.get_inheritable(directory.descriptor)


def test_a_sockets_path_is_in_the_directory(directory: SocketDirectory) -> None:
    assert directory.socket_path(OWNER) == f"{directory.path}/{OWNER}.sock" == socket_path(directory.path, OWNER)


@pytest.mark.parametrize("character", ["x", "\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_the_longest_path_that_is_taken_can_be_bound(parent: str, create: Create, character: str) -> None:
    room = MAX_PATH - len(f"/{PREFIX}xxxxxxxx/{OWNER}.sock") - len(parent) - 1
    longest = os.path.join(parent, "a" * (room % 2) + character * ((room - room % 2) // len(character.encode())))
    os.mkdir(longest)
    path = create(longest).socket_path(new_owner_id())
    assert len(os.fsencode(path)) == MAX_PATH
    bind_private_socket(path, 5).close()


def test_a_path_one_byte_too_long_is_refused_in_words(parent: str) -> None:
    folder = os.path.join(parent, "x" * (MAX_PATH - len(f"/{PREFIX}xxxxxxxx/{OWNER}.sock") - len(parent)))
    os.mkdir(folder)
    with pytest.raises(DirectoryError) as caught:
        SocketDirectory.create(folder, UID, GID)
    assert repr(folder) in str(caught.value)
    assert "108 bytes" in str(caught.value) and "107" in str(caught.value)
    assert "SessionRouting(directory=...)" in str(caught.value)
    assert os.listdir(folder) == []


def a_missing_folder(parent: str) -> str:
    return os.path.join(parent, "missing")


def a_file(parent: str) -> str:
    path = os.path.join(parent, "file")
    Path(path).touch()
    return path


def a_folder_below_a_file(parent: str) -> str:
    return os.path.join(a_file(parent), "folder")


def a_folder_that_can_not_be_written(parent: str) -> str:
    return "/proc/self"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (a_missing_folder, "No such file or directory"),
        (a_file, "Not a directory"),
        (a_folder_below_a_file, "Not a directory"),
        (a_folder_that_can_not_be_written, ""),
    ],
)
def test_a_folder_that_can_not_be_used_is_refused_in_words(
    parent: str, make: Callable[[str], str], reason: str
) -> None:
    folder = make(parent)
    before = open_descriptors()
    with pytest.raises(DirectoryError) as caught:
        SocketDirectory.create(folder, UID, GID)
    assert repr(folder) in str(caught.value)
    assert reason in str(caught.value)
    assert "SessionRouting(directory=...)" in str(caught.value)
    assert open_descriptors() == before


def test_a_directory_that_can_not_be_given_to_its_user_is_not_left_behind(parent: str) -> None:
    os.chmod(parent, 0o777)
    script = """
from gym_gunicorn.lifecycle.socket_directory import DirectoryError, SocketDirectory
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
before = len(os.listdir("/proc/self/fd"))
try:
    SocketDirectory.create(sys.argv[1], 0, 0)
except DirectoryError as error:
    print("refused, left open:", len(os.listdir("/proc/self/fd")) - before)
"""
    with python(script, parent) as process:
        assert says(process) == "refused, left open: 0"
    assert os.listdir(parent) == []


def test_a_sweeper_that_is_faster_than_the_opening_makes_no_start_fail(
    parent: str, create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdtemp, swept = tempfile.mkdtemp, list[str]()

    def swept_mkdtemp(*, prefix: str, dir: str) -> str:
        path = mkdtemp(prefix=prefix, dir=dir)
        if not swept:
            swept.extend(sweep(parent, {UID}))
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", swept_mkdtemp)
    made = create()
    assert len(swept) == 1
    assert [os.path.join(parent, name) for name in os.listdir(parent)] == [made.path]
    assert made.leave()


def test_a_sweeper_that_is_faster_than_the_lock_makes_no_start_fail(
    parent: str, create: Create, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, swept = fcntl.flock, list[str]()

    def late_flock(descriptor: int, operation: int) -> None:
        if operation == fcntl.LOCK_SH and not swept:
            swept.extend(sweep(parent, {UID}))
        flock(descriptor, operation)

    before = open_descriptors()
    monkeypatch.setattr(fcntl, "flock", late_flock)
    made = create()
    assert len(swept) == 1
    assert [os.path.join(parent, name) for name in os.listdir(parent)] == [made.path]
    assert made.leave()
    assert open_descriptors() == before


# Leaving it


def test_the_last_to_leave_removes_the_directory_and_what_is_in_it(directory: SocketDirectory) -> None:
    bind_private_socket(directory.socket_path(OWNER), 5).close()
    Path(directory.path, "figures").touch()
    assert directory.leave()
    assert not os.path.lexists(directory.path)


def test_leaving_closes_the_open_directory(parent: str) -> None:
    before = open_descriptors()
    SocketDirectory.create(parent, UID, GID).leave()
    assert open_descriptors() == before


def test_a_directory_that_a_child_holds_is_left_to_it(directory: SocketDirectory) -> None:
    with child_holding(directory.descriptor):
        assert not directory.leave()
        assert os.path.isdir(directory.path)


def test_leaving_twice_says_what_is_there(directory: SocketDirectory) -> None:
    with child_holding(directory.descriptor):
        assert not directory.leave()
        assert not directory.leave()
    sweep(os.path.dirname(directory.path), {UID})
    assert directory.leave()


def test_leaving_a_directory_that_was_removed_is_no_error(directory: SocketDirectory) -> None:
    shutil.rmtree(directory.path)
    assert directory.leave()


def test_a_child_that_leaves_does_not_give_up_its_parents_lock(directory: SocketDirectory) -> None:
    script = """
from gym_gunicorn.lifecycle.socket_directory import SocketDirectory
print(SocketDirectory.join(sys.argv[1]).leave())
"""
    with python(script, directory.inheritance(), close_fds=False) as process:
        assert says(process) == "False"
    assert sweep(os.path.dirname(directory.path), {UID}) == []
    assert os.path.isdir(directory.path)


def test_leaving_waits_for_a_process_that_is_just_ending(
    directory: SocketDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with child_holding(directory.descriptor) as child:
        pauses: list[float] = []

        def pause(seconds: float) -> None:
            pauses.append(seconds)
            child.kill()
            child.wait()

        monkeypatch.setattr("gym_gunicorn.lifecycle.socket_directory.time.sleep", pause)
        assert directory.leave(wait=60)
        assert len(pauses) == 1
    assert not os.path.lexists(directory.path)


def test_leaving_with_force_removes_a_directory_that_is_held(directory: SocketDirectory) -> None:
    bind_private_socket(directory.socket_path(OWNER), 5).close()
    with child_holding(directory.descriptor):
        assert directory.leave(force=True)
        assert not os.path.lexists(directory.path)


# Sweeping


def test_a_sweep_removes_what_nobody_holds(parent: str) -> None:
    path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    bind_private_socket(socket_path(path, OWNER), 5).close()
    assert sweep(parent, {UID}) == [path]
    assert os.listdir(parent) == []


def test_a_sweep_leaves_what_is_held(directory: SocketDirectory, parent: str) -> None:
    bind_private_socket(directory.socket_path(OWNER), 5).close()
    assert sweep(parent, {UID}) == []
    assert os.listdir(directory.path) == [f"{OWNER}.sock"]


def test_a_sweep_leaves_what_a_dead_arbiters_worker_holds_and_removes_it_afterwards(
    directory: SocketDirectory, parent: str
) -> None:
    with child_holding(directory.descriptor):
        assert not directory.leave()
        assert sweep(parent, {UID}) == []
        assert os.path.isdir(directory.path)
    assert sweep(parent, {UID}) == [directory.path]


def test_a_sweep_removes_the_directory_of_an_arbiter_that_was_killed(parent: str) -> None:
    script = """
from gym_gunicorn.lifecycle.socket_directory import SocketDirectory
held = SocketDirectory.create(sys.argv[1], os.geteuid(), os.getegid())
print(held.path, flush=True)
sys.stdin.read()
"""
    with python(script, parent) as process:
        path = says(process)
        assert sweep(parent, {UID}) == []
        process.kill()
        process.wait()
        assert sweep(parent, {UID}) == [path]


def test_a_sweep_leaves_symbolic_links_and_what_they_lead_to(parent: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    link = os.path.join(parent, PREFIX + "link")
    os.symlink(tmp_path, link)
    assert sweep(parent, {UID}) == []
    assert os.path.islink(link)
    assert (tmp_path / "file").exists()


def test_a_sweep_does_not_follow_links_inside_a_directory(parent: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    os.symlink(tmp_path, os.path.join(path, "link"))
    assert sweep(parent, {UID}) == [path]
    assert (tmp_path / "file").exists()


def test_a_sweep_leaves_files_of_that_name(parent: str) -> None:
    Path(parent, PREFIX + "file").touch()
    os.mkfifo(os.path.join(parent, PREFIX + "fifo"))
    assert sweep(parent, {UID}) == []
    assert sorted(os.listdir(parent)) == [PREFIX + "fifo", PREFIX + "file"]


def test_a_sweep_leaves_directories_of_other_names(parent: str) -> None:
    Path(parent, "gym-gunicorn").mkdir()
    Path(parent, "x" + PREFIX).mkdir()
    assert sweep(parent, {UID}) == []
    assert sorted(os.listdir(parent)) == ["gym-gunicorn", "x" + PREFIX]


def test_a_sweep_leaves_what_belongs_to_other_users(parent: str) -> None:
    path = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    assert sweep(parent, {UID + 1}) == []
    assert os.path.isdir(path)
    assert sweep(parent, {UID, UID + 1}) == [path]


def test_one_directory_that_can_not_be_removed_does_not_stop_a_sweep(parent: str) -> None:
    stubborn = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
    os.mkdir(os.path.join(stubborn, "folder"))
    others = {tempfile.mkdtemp(prefix=PREFIX, dir=parent) for _ in range(5)}
    before = open_descriptors()
    assert set(sweep(parent, {UID})) == others
    assert os.listdir(parent) == [os.path.basename(stubborn)]
    assert open_descriptors() == before


def test_a_sweep_of_a_missing_folder_removes_nothing(parent: str) -> None:
    assert sweep(os.path.join(parent, "missing"), {UID}) == []


# Joining it

JOINS = """
from gym_gunicorn.lifecycle.socket_directory import SocketDirectory
joined = SocketDirectory.join(sys.argv[1])
print(joined.path, os.get_inheritable(joined.descriptor), flush=True)
sys.stdin.read()
print(joined.leave())
"""


def test_a_directory_is_joined_across_an_exec(directory: SocketDirectory, parent: str) -> None:
    with python(JOINS, directory.inheritance(), close_fds=False) as process:
        assert says(process) == f"{directory.path} False"
        # The old arbiter goes first: the directory is the new one's.
        assert not directory.leave()
        assert sweep(parent, {UID}) == []
        assert process.stdin is not None
        process.stdin.close()
        assert says(process) == "True"
    assert not os.path.lexists(directory.path)


def test_a_new_arbiter_that_leaves_first_leaves_the_directory_to_the_old_one(directory: SocketDirectory) -> None:
    with python(JOINS, directory.inheritance(), close_fds=False) as process:
        assert says(process) == f"{directory.path} False"
        assert process.stdin is not None
        process.stdin.close()
        assert says(process) == "False"
    assert os.path.isdir(directory.path)
    assert directory.leave()


def test_a_directory_that_has_vanished_is_made_again_when_it_is_joined(directory: SocketDirectory) -> None:
    inherited = f"{os.dup(directory.descriptor)}:{directory.path}"
    os.rmdir(directory.path)
    joined = SocketDirectory.join(inherited)
    try:
        assert joined.is_there()
        assert not directory.is_there()
    finally:
        joined.leave()


def test_a_directory_that_can_not_be_made_again_can_not_be_joined(directory: SocketDirectory) -> None:
    inherited = f"{os.dup(directory.descriptor)}:{directory.path}"
    os.rmdir(directory.path)
    Path(directory.path).touch()
    with pytest.raises(DirectoryError, match="was removed"):
        SocketDirectory.join(inherited)


def test_another_directory_in_its_place_can_not_be_joined(directory: SocketDirectory) -> None:
    inherited = f"{os.dup(directory.descriptor)}:{directory.path}"
    os.rmdir(directory.path)
    os.mkdir(directory.path, 0o755)
    with pytest.raises(DirectoryError, match=r"another user.s or open to others"):
        SocketDirectory.join(inherited)


@pytest.mark.parametrize("inherited", ["", "x", ":", "5", "x:/tmp", "-1:/tmp", "999999:/tmp"])
def test_what_is_no_inheritance_can_not_be_joined(inherited: str) -> None:
    with pytest.raises(DirectoryError, match="can't be joined"):
        SocketDirectory.join(inherited)


# Private sockets


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777], ids=oct)
def test_a_private_socket_is_for_its_user_alone_whatever_the_umask(parent: str, mask: int) -> None:
    path = socket_path(parent, OWNER)
    with umask(mask):
        listener = bind_private_socket(path, 5)
    with listener, socket.socket(socket.AF_UNIX) as caller:
        assert mode_of(path) == 0o600
        caller.connect(path)


def test_a_private_socket_does_not_block(parent: str) -> None:
    with bind_private_socket(socket_path(parent, OWNER), 5) as listener:
        assert not listener.getblocking()


def test_a_path_that_is_taken_is_an_error_that_leaves_nothing_open(parent: str) -> None:
    path = socket_path(parent, OWNER)
    Path(path).touch()
    before = open_descriptors()
    with pytest.raises(OSError) as caught:
        bind_private_socket(path, 5)
    assert caught.value.errno == errno.EADDRINUSE
    assert open_descriptors() == before


def test_a_missing_file_is_unlinked_without_an_error(parent: str) -> None:
    path = os.path.join(parent, "file")
    Path(path).touch()
    assert unlink(path)
    assert not os.path.exists(path)
    assert not unlink(path)


# Who listens

LISTENS = """
from gym_gunicorn.forwarding.sockets import bind_private_socket
listener = bind_private_socket(sys.argv[1], 5)
print("listens", flush=True)
sys.stdin.read()
"""
LISTENS_AND_DIES = """
from gym_gunicorn.forwarding.sockets import bind_private_socket
listener = bind_private_socket(sys.argv[1], 5)
if os.fork() == 0:
    print("holds", flush=True)
    sys.stdin.read()
os._exit(0)
"""


def assert_gone(path: str) -> None:
    before = open_descriptors()
    with pytest.raises(Gone) as caught:
        listener_process(OWNER, path)
    assert caught.value.owner_id == OWNER
    assert open_descriptors() == before


@contextlib.contextmanager
def found(path: str) -> Iterator[int]:
    pidfd = listener_process(OWNER, path)
    assert pidfd is not None
    try:
        yield pidfd
    finally:
        os.close(pidfd)


def pid_behind(pidfd: int) -> int:
    fields = dict(line.split(":\t") for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines())
    return int(fields["Pid"])


def test_the_process_that_listens_is_found(parent: str) -> None:
    path = socket_path(parent, OWNER)
    with python(LISTENS, path) as process:
        assert says(process) == "listens"
        before = open_descriptors()
        with found(path) as pidfd:
            assert pid_behind(pidfd) == process.pid
            assert not is_dead(pidfd)
        assert open_descriptors() == before


def test_a_found_process_is_seen_to_die(parent: str) -> None:
    path = socket_path(parent, OWNER)
    with python(LISTENS, path) as process:
        assert says(process) == "listens"
        with found(path) as pidfd:
            process.kill()
            assert select.select([pidfd], [], [], 20)[0] == [pidfd]
            assert is_dead(pidfd)


def test_a_process_that_is_stopped_is_not_gone(parent: str) -> None:
    path = socket_path(parent, OWNER)
    with python(LISTENS, path) as process:
        assert says(process) == "listens"
        process.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        try:
            with found(path) as pidfd:
                assert not is_dead(pidfd)
        finally:
            process.send_signal(signal.SIGCONT)


def test_a_missing_socket_is_gone(parent: str) -> None:
    assert_gone(socket_path(parent, OWNER))


def test_a_socket_in_a_missing_directory_is_gone(parent: str) -> None:
    assert_gone(socket_path(os.path.join(parent, "missing"), OWNER))


def test_a_socket_in_what_is_no_directory_is_gone(parent: str) -> None:
    assert_gone(socket_path(a_file(parent), OWNER))


def test_a_socket_that_refuses_is_gone(parent: str) -> None:
    path = socket_path(parent, OWNER)
    bind_private_socket(path, 5).close()
    assert os.path.exists(path)
    assert_gone(path)


def test_a_dead_process_is_gone_even_while_its_child_holds_its_socket(parent: str) -> None:
    path = socket_path(parent, OWNER)
    with python(LISTENS_AND_DIES, path) as process:
        assert says(process) == "holds"
        process.wait()
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(path)
        assert_gone(path)


def test_a_dead_process_that_nobody_has_waited_for_is_gone(parent: str) -> None:
    path = socket_path(parent, OWNER)
    with python(LISTENS_AND_DIES, path) as process:
        assert says(process) == "holds"
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert_gone(path)


def test_a_full_accept_queue_is_busy_and_not_gone(parent: str) -> None:
    path = socket_path(parent, OWNER)
    with contextlib.ExitStack() as stack:
        stack.enter_context(bind_private_socket(path, 0))
        with pytest.raises(BlockingIOError):
            for _ in range(10):
                caller = stack.enter_context(socket.socket(socket.AF_UNIX))
                caller.setblocking(False)
                caller.connect(path)
        before = open_descriptors()
        with pytest.raises(Busy) as caught:
            listener_process(OWNER, path)
        assert caught.value.owner_id == OWNER
        assert open_descriptors() == before


def test_a_connection_that_fails_otherwise_says_nothing_of_the_owner() -> None:
    with pytest.raises(OSError, match="too long"):
        listener_process(OWNER, "/tmp/" + "x" * MAX_PATH)


@pytest.mark.parametrize(
    ("number", "verdict"),
    [
        (errno.ENOENT, Gone),
        (errno.ECONNREFUSED, Gone),
        (errno.ENOTDIR, Gone),
        (errno.EAGAIN, Busy),
        (errno.ENOTCONN, Busy),
        (errno.EMFILE, Busy),
        (errno.ENFILE, Busy),
        (errno.ENOBUFS, Busy),
        (errno.ENOMEM, Busy),
        (errno.EACCES, Busy),
        (errno.EPERM, Busy),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else value.__name__,
)
def test_a_failed_connect_is_read_for_what_it_says(number: int, verdict: type[ForwardError]) -> None:
    failure = connect_failure(OWNER, OSError(number, os.strerror(number)))
    assert type(failure) is verdict
    assert OWNER in str(failure)


@pytest.mark.parametrize("number", [errno.ECONNRESET, errno.EPIPE, errno.ELOOP])
def test_a_failed_connect_that_says_nothing_is_no_verdict(number: int) -> None:
    assert connect_failure(OWNER, OSError(number, os.strerror(number))) is None
    assert connect_failure(OWNER, OSError("no number")) is None


# A directory that belongs to the workers' user, who may be hostile to the arbiter's


def test_what_a_link_in_the_place_of_the_directory_leads_to_is_left_alone(directory: SocketDirectory) -> None:
    victim = f"{directory.path}-victim"
    os.mkdir(victim)
    file = os.path.join(victim, "file")
    with open(file, "w"):
        pass
    os.rename(directory.path, f"{directory.path}-moved")
    os.symlink(victim, directory.path)
    try:
        directory.leave(force=True)
        assert os.path.exists(file)
    finally:
        os.unlink(directory.path)
        os.rename(f"{directory.path}-moved", directory.path)
        os.unlink(file)
        os.rmdir(victim)


def test_socket_is_removed_from_the_directory_and_not_from_what_took_its_place(directory: SocketDirectory) -> None:
    name = os.path.basename(directory.socket_path(OWNER))
    other = f"{directory.path}-other"
    os.mkdir(other)
    for folder in (directory.path, other):
        with open(os.path.join(folder, name), "w"):
            pass
    os.rename(directory.path, f"{directory.path}-moved")
    os.rename(other, directory.path)
    try:
        assert directory.remove_socket(OWNER)
        assert not directory.remove_socket(OWNER)
        assert os.listdir(directory.path) == [name]
        assert os.listdir(f"{directory.path}-moved") == []
    finally:
        os.unlink(os.path.join(directory.path, name))
        os.rmdir(directory.path)
        os.rename(f"{directory.path}-moved", directory.path)
