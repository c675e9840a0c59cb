"""One worker's figures: how they are laid out, made, written, put back and read."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gym_gunicorn.metrics import values as places
from gym_gunicorn.metrics.values import (
    ACTIVE,
    ADDED,
    ADDED_BOUNDS,
    ADDED_NS,
    BEAT,
    FORMAT,
    FORWARDED,
    GONE,
    LAG,
    LOCAL,
    STAMPED,
    STARTED,
    STATE,
    STOPPING,
    Figures,
    Reading,
    figures_path,
    read_all,
    sums,
)
from tests.e2e.launching import needs
from tests.gunicorn_server import ROOT

OWNER = "00000000000a"
ANOTHER = "00000000000b"

# Every byte of a value it writes is the same, so that half of one and half of another show.
WRITER = """
import sys
from gym_gunicorn.metrics.values import ACTIVE, FORWARDED, LOCAL, Figures

values = Figures(sys.argv[1]).values
print("writes", flush=True)
while True:
    for byte in range(256):
        values[ACTIVE] = byte * 0x0101010101010101
        values[LOCAL] += 1
        values[FORWARDED] += 1
"""

MAKER = """
import errno, os, resource, sys
from gym_gunicorn.metrics.values import Figures

if len(sys.argv) > 2:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), -1))
try:
    Figures(sys.argv[1])
except OSError as error:
    print(errno.errorcode[error.errno], os.listdir(os.path.dirname(sys.argv[1])))
"""


@pytest.fixture
def directory() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="unit-", dir="/tmp")
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextmanager
def child(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program that says a line when it is at work, and end it at the end."""
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline()
            yield process
        finally:
            process.kill()


def in_time(read: Callable[[], tuple[list[Reading], Reading | None]]) -> tuple[list[Reading], Reading | None]:
    """Read in a thread of its own, so that what hangs fails the test and does not hang it."""
    found: list[tuple[list[Reading], Reading | None]] = []
    thread = threading.Thread(target=lambda: found.append(read()), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "reading hangs, or has raised"
    return found[0]


def figures_of(directory: str, owner: str, **values: int) -> Figures:
    """Make the figures of a worker, with these values."""
    made = Figures(figures_path(directory, owner))
    for name, value in values.items():
        made.values[getattr(places, name.upper())] = value
    return made


def test_every_value_has_a_place_and_a_name_of_its_own() -> None:
    made = Figures()
    named = [name for name in vars(places) if name.isupper() and isinstance(getattr(places, name), int)]
    not_places = {"STARTING", "SERVING", "STOPPING"}
    numbers = {name: getattr(places, name) for name in named if not name.startswith("_") and name not in not_places}
    assert len(set(numbers.values())) == len(numbers)
    for name, place in numbers.items():
        made.values[place] = 1_000 + place
        read = "added_0" if name == "ADDED" else name.lower()
        assert made.reading(OWNER)[read] == 1_000 + place, name


def test_counters_are_what_is_no_fact_and_buckets_are_one_more_than_bounds() -> None:
    counters = Figures().reading(OWNER).counters()
    facts = {"format", "pid", "started", "beat", "state", "generation", "secret", "active", "connections", "lag"}
    assert not facts & set(counters)
    assert len(Figures().values) == len(facts) + len(counters)
    assert sum(name.startswith("added_") and name != "added_ns" for name in counters) == len(ADDED_BOUNDS) + 1
    assert list(ADDED_BOUNDS) == sorted(set(ADDED_BOUNDS))
    assert set(counters.values()) == {0}


def test_new_figures_say_whose_they_are_and_since_when() -> None:
    before = time.time_ns(), time.monotonic_ns()
    reading = Figures().reading(OWNER)
    after = time.time_ns(), time.monotonic_ns()
    assert reading["pid"] == os.getpid()
    assert before[0] <= reading["started"] <= after[0]
    assert before[1] <= reading["beat"] <= after[1]
    assert reading.state == "starting"


def test_what_a_worker_writes_is_read_from_its_file(directory: str) -> None:
    made = figures_of(directory, OWNER, local=3)
    made.values[GONE] += 2
    made.stamped()
    ((reading,), total) = read_all(directory)
    assert reading == made.reading(OWNER)
    assert total is None
    assert (reading["local"], reading["gone"], reading["stamped"]) == (3, 2, 1)


def test_values_read_while_they_are_written_are_whole_and_counters_never_go_back(directory: str) -> None:
    reader = f"""
from gym_gunicorn.metrics.values import read_all
print("reads", flush=True)
last = 0
while True:
    for reading in read_all({directory!r})[0]:
        whole = reading["active"] % 0x0101010101010101 == 0
        if not whole or reading["local"] < last:
            print("torn", flush=True)
        last = reading["local"]
"""
    with child(WRITER, figures_path(directory, OWNER)), child(reader) as beside:
        seen: set[int] = set()
        local = forwarded = 0
        deadline = time.monotonic() + 60
        while len(seen) < 256 or local < 100_000:
            assert time.monotonic() < deadline, (len(seen), local)
            ((reading,), _) = read_all(directory)
            assert reading["active"] % 0x0101010101010101 == 0, hex(reading["active"])
            assert reading["local"] >= local
            assert reading["forwarded"] >= forwarded
            local, forwarded = reading["local"], reading["forwarded"]
            seen.add(reading["active"])
        beside.kill()
        assert beside.stdout is not None
        assert beside.stdout.read() == ""


def _shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _longer(path: Path) -> None:
    os.truncate(path, path.stat().st_size + 8)


def _of_another_release(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[FORMAT * 8] ^= 1
    path.write_bytes(data)


def _garbage(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


def _replaced_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(path: Path) -> None:
        path.rename(path.with_suffix(".away"))
        make(path)

    return replace


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


SPOILT = [
    pytest.param(lambda path: os.truncate(path, 0), id="empty"),
    pytest.param(_shorter, id="shorter"),
    pytest.param(_longer, id="longer"),
    pytest.param(_of_another_release, id="another release"),
    pytest.param(_garbage, id="garbage"),
    pytest.param(_replaced_by(Path.mkdir), id="directory"),
    pytest.param(_replaced_by(os.mkfifo), id="FIFO"),
    pytest.param(_replaced_by(_socket), id="socket"),
    pytest.param(_replaced_by(lambda path: path.symlink_to(path.with_suffix(".away"))), id="symlink"),
    pytest.param(_replaced_by(lambda path: path.symlink_to("/dev/zero")), id="symlink to a device"),
]


@pytest.mark.parametrize("spoil", SPOILT)
def test_file_that_is_not_as_it_should_be_is_left_out(spoil: Callable[[Path], None], directory: str) -> None:
    # Kept, since a map of a file that was cut short must not be written any more.
    spoilt = figures_of(directory, OWNER)
    good = figures_of(directory, ANOTHER, local=7)
    spoil(Path(figures_path(directory, OWNER)))
    workers, total = in_time(lambda: read_all(directory))
    assert [worker.owner_id for worker in workers] == [ANOTHER]
    assert total is None
    assert sums(workers, total)["local"] == 7
    del spoilt, good


@pytest.mark.parametrize("spoil", SPOILT)
def test_total_that_is_not_as_it_should_be_is_left_out(spoil: Callable[[Path], None], directory: str) -> None:
    good = figures_of(directory, ANOTHER, local=7)
    total_file = Path(directory) / "total.figures"
    Figures(str(total_file))
    spoil(total_file)
    workers, total = in_time(lambda: read_all(directory))
    assert [worker.owner_id for worker in workers] == [ANOTHER]
    assert total is None
    del good


def test_directory_that_is_missing_or_no_directory_has_no_figures(directory: str) -> None:
    path = os.path.join(directory, "missing")
    assert read_all(path) == ([], None)
    Path(path).touch()
    assert read_all(path) == ([], None)


def test_names_that_are_no_owner_ids_are_not_read(directory: str) -> None:
    kept = [Figures(os.path.join(directory, name)) for name in ("0a.figures", "X" * 12 + ".figures", ".figures")]
    assert read_all(directory) == ([], None)
    del kept


def test_workers_are_read_oldest_first(directory: str) -> None:
    made = [figures_of(directory, f"{12 - number:012x}", started=1_000 + number) for number in (3, 1, 4, 2)]
    workers, _ = read_all(directory)
    assert [worker["started"] for worker in workers] == [1_001, 1_002, 1_003, 1_004]
    assert len(made) == 4


def test_sums_are_of_the_workers_and_of_those_that_have_ended() -> None:
    readings = []
    for number, owner in enumerate((OWNER, ANOTHER, None), 1):
        made = Figures()
        made.values[LOCAL], made.values[GONE], made.values[ACTIVE] = number, 10 * number, 100
        readings.append(Reading(owner, tuple(made.values)))
    *workers, total = readings
    assert sums(workers, total)["local"] == 6
    assert sums(workers, None)["gone"] == 30
    assert sums([], None) == dict.fromkeys(total.counters(), 0)
    assert "active" not in sums(workers, total)


def test_file_is_its_users_alone_whatever_the_umask(directory: str) -> None:
    old = os.umask(0o777)
    try:
        made = figures_of(directory, OWNER, local=1)
    finally:
        os.umask(old)
    assert stat.S_IMODE(os.stat(figures_path(directory, OWNER)).st_mode) == 0o600
    ((reading,), _) = read_all(directory)
    assert reading["local"] == 1
    del made


def test_what_stands_in_the_place_of_new_figures_is_left_as_it_is(directory: str) -> None:
    target = Path(directory) / "target"
    target.write_text("another's")
    os.symlink(target, figures_path(directory, OWNER))
    with pytest.raises(FileExistsError):
        Figures(figures_path(directory, OWNER))
    assert target.read_text() == "another's"
    assert sorted(os.listdir(directory)) == [f"{OWNER}.figures", "target"]


def test_no_room_for_a_file_is_an_error_and_leaves_none(directory: str) -> None:
    needs("--mount")
    path = figures_path(directory, OWNER)
    fill = f'mount -t tmpfs -o size=4k tmpfs {directory} && head -c 4096 /dev/zero > {directory}/full && exec "$@"'
    command = ["unshare", "--mount", "sh", "-c", fill, "sh", sys.executable, "-c", MAKER, path]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert made.stdout.split(maxsplit=1) == [errno.errorcode[errno.ENOSPC], "['full']\n"]


def test_limit_of_file_sizes_is_an_error_and_leaves_none(directory: str) -> None:
    command = [sys.executable, "-c", MAKER, figures_path(directory, OWNER), "100"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert made.stdout.split(maxsplit=1) == [errno.errorcode[errno.EFBIG], "[]\n"]


def test_removed_file_is_made_again_with_the_counts_it_had(directory: str) -> None:
    made = figures_of(directory, OWNER, local=5, state=STOPPING)
    before = made.reading(OWNER)
    os.unlink(figures_path(directory, OWNER))
    made.values[LOCAL] += 1
    assert read_all(directory) == ([], None)
    made.restore()
    made.values[FORWARDED] += 1
    ((reading,), _) = read_all(directory)
    assert (reading["local"], reading["forwarded"], reading.state) == (6, 1, "stopping")
    assert (reading["pid"], reading["started"]) == (before["pid"], before["started"])


def test_file_that_is_there_is_left_as_it_is_by_restore(directory: str) -> None:
    made = figures_of(directory, OWNER, local=5)
    inode = os.stat(figures_path(directory, OWNER)).st_ino
    made.restore()
    assert os.stat(figures_path(directory, OWNER)).st_ino == inode
    nobody_reads = Figures()
    nobody_reads.values[STAMPED] = 3
    nobody_reads.restore()
    assert nobody_reads.values[STAMPED] == 3


def test_counts_go_on_where_the_file_cannot_be_made_again(directory: str) -> None:
    folder = os.path.join(directory, "sockets")
    os.mkdir(folder)
    made = figures_of(folder, OWNER, local=5)
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError):
        made.restore()
    made.values[LOCAL] += 1
    os.mkdir(folder)
    made.restore()
    ((reading,), _) = read_all(folder)
    assert reading["local"] == 6


def test_beat_that_is_late_is_remembered_and_fades() -> None:
    made = Figures()
    made.values[BEAT] = time.monotonic_ns() - 5 * 10**9
    made.beat(1.0)
    late = made.values[LAG]
    assert late >= 4 * 10**9
    made.beat(1_000.0)
    assert made.values[LAG] == late * 3 // 4
    for _ in range(200):
        made.beat(1_000.0)
    assert made.values[LAG] == 0


def test_beat_that_is_in_time_is_not_late() -> None:
    made = Figures()
    made.beat(1_000.0)
    assert made.values[LAG] == 0


def test_silence_is_the_time_since_the_last_beat() -> None:
    made = Figures()
    made.values[BEAT] = time.monotonic_ns() - 10 * 10**9
    assert made.reading(OWNER).silence() >= 10
    made.beat(0.1)
    assert made.reading(OWNER).silence() < 10
    made.values[BEAT] = time.monotonic_ns() + 10**12
    assert made.reading(OWNER).silence() == 0


def test_state_that_this_release_does_not_know_is_unknown() -> None:
    made = Figures()
    made.values[STATE] = 2**64 - 1
    assert made.reading(OWNER).state == "unknown"


@pytest.mark.parametrize("number", range(len(ADDED_BOUNDS)))
def test_added_time_counts_in_the_bucket_whose_bound_it_does_not_exceed(number: int) -> None:
    made = Figures()
    bound = round(ADDED_BOUNDS[number] * 1e9)
    made.added(bound)
    made.added(bound + 1)
    counts = [made.values[ADDED + bucket] for bucket in range(len(ADDED_BOUNDS) + 1)]
    expected = [0] * len(counts)
    expected[number] = expected[number + 1] = 1
    assert counts == expected
    assert made.values[ADDED_NS] == 2 * bound + 1


def test_added_time_of_nothing_and_of_an_hour_have_buckets() -> None:
    made = Figures()
    made.added(0)
    made.added(3_600 * 10**9)
    assert (made.values[ADDED], made.values[ADDED + len(ADDED_BOUNDS)]) == (1, 1)
    assert made.values[STARTED] > 0
