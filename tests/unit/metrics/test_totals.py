"""The figures of workers that have ended: added to a total, once, and never missing from the sums."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gym_gunicorn.metrics import values as places
from gym_gunicorn.metrics.totals import fold
from gym_gunicorn.metrics.values import Figures, figures_path, read_all, sums
from tests.gunicorn_server import ROOT
from tests.unit.metrics.test_values import SPOILT, child, figures_of

OWNER = "00000000000a"
ANOTHER = "00000000000b"

FOLDER = """
import os, sys
from gym_gunicorn.metrics import totals
from gym_gunicorn.metrics.totals import fold

# One that holds the lock may not be scheduled for long.
totals._PATIENCE = 60.0
descriptor = os.open(sys.argv[1], os.O_RDONLY)
print("begins", flush=True)
sys.stdin.readline()
for owner in sys.argv[2:]:
    assert fold(descriptor, owner) is not None
"""

READER = """
import sys
from gym_gunicorn.metrics.values import read_all, sums

seen = set()
print("reads", flush=True)
while True:
    now = sums(*read_all(sys.argv[1]))
    if (now["local"], now["gone"]) not in seen:
        seen.add((now["local"], now["gone"]))
        print(now["local"], now["gone"], flush=True)
"""


@pytest.fixture
def directory() -> Iterator[str]:
    path = tempfile.mkdtemp(prefix="unit-", dir="/tmp")
    try:
        yield path
    finally:
        shutil.rmtree(path)


@pytest.fixture
def descriptor(directory: str) -> Iterator[int]:
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield opened
    finally:
        os.close(opened)


def test_ended_worker_is_in_the_total_and_its_file_is_gone(directory: str, descriptor: int) -> None:
    made = [figures_of(directory, OWNER, local=5, gone=1), figures_of(directory, ANOTHER, local=2)]
    before = sums(*read_all(directory))
    last = fold(descriptor, OWNER)
    assert last is not None
    assert (last.owner_id, last["local"]) == (OWNER, 5)
    workers, total = read_all(directory)
    assert [worker.owner_id for worker in workers] == [ANOTHER]
    assert total is not None
    assert (total.owner_id, total["local"], total["gone"]) == (None, 5, 1)
    assert sums(workers, total) == before
    assert len(made) == 2


def test_total_has_counters_and_the_secret_of_the_last_that_ended(directory: str, descriptor: int) -> None:
    made = figures_of(directory, OWNER, active=3, connections=2, lag=9, secret=7, generation=5, local=1)
    fold(descriptor, OWNER)
    _, total = read_all(directory)
    assert total is not None
    assert (total["secret"], total["generation"]) == (7, 5)
    for name in ("active", "connections", "lag", "beat", "started", "state"):
        assert total[name] == 0, name
    del made


def test_total_is_its_users_alone_whatever_the_umask(directory: str, descriptor: int) -> None:
    made = figures_of(directory, OWNER)
    old = os.umask(0)
    try:
        fold(descriptor, OWNER)
    finally:
        os.umask(old)
    assert (Path(directory) / "total.figures").stat().st_mode & 0o777 == 0o600
    del made


def test_sums_are_the_same_before_while_and_after_two_arbiters_add_to_the_total(directory: str) -> None:
    owners = [f"{number:012x}" for number in range(1, 201)]
    made = [figures_of(directory, owner, local=number, gone=1) for number, owner in enumerate(owners, 1)]
    expected = (sum(range(1, 201)), 200)
    command = [sys.executable, "-c", FOLDER, directory]
    with child(READER, directory) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline().split() == [str(number) for number in expected]
        arbiters = [
            subprocess.Popen(
                [*command, *owners[number::2]], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for number in range(2)
        ]
        try:
            for arbiter in arbiters:
                assert arbiter.stdout is not None
                assert arbiter.stdout.readline() == "begins\n"
            for arbiter in arbiters:
                arbiter.communicate("\n", timeout=60)
            assert [arbiter.returncode for arbiter in arbiters] == [0, 0]
        finally:
            for arbiter in arbiters:
                arbiter.kill()
                arbiter.wait()
        workers, total = read_all(directory)
        assert workers == []
        now = sums(workers, total)
        assert (now["local"], now["gone"]) == expected
        assert reader.poll() is None
        reader.kill()
        assert reader.stdout.read() == "", "a reader has seen other sums"
    assert len(made) == 200


def test_worker_that_was_added_but_not_removed_is_not_counted_twice(directory: str, descriptor: int) -> None:
    made = figures_of(directory, OWNER, local=5)
    data = Path(figures_path(directory, OWNER)).read_bytes()
    fold(descriptor, OWNER)
    # As between the two steps of an arbiter that is adding it.
    Path(figures_path(directory, OWNER)).write_bytes(data)
    workers, total = read_all(directory)
    assert workers == []
    assert sums(workers, total)["local"] == 5
    del made


def test_worker_without_figures_adds_nothing(directory: str, descriptor: int) -> None:
    assert fold(descriptor, OWNER) is None
    assert set(sums(*read_all(directory)).values()) == {0}


@pytest.mark.parametrize("spoil", SPOILT)
def test_figures_that_cannot_be_read_add_nothing(
    spoil: Callable[[Path], None], directory: str, descriptor: int
) -> None:
    made = [figures_of(directory, OWNER, local=5), figures_of(directory, ANOTHER, local=2)]
    fold(descriptor, ANOTHER)
    spoil(Path(figures_path(directory, OWNER)))
    assert fold(descriptor, OWNER) is None
    assert sums(*read_all(directory))["local"] == 2
    assert len(made) == 2


def test_total_of_another_release_is_begun_anew(directory: str, descriptor: int) -> None:
    made = figures_of(directory, OWNER, local=5)
    (Path(directory) / "total.figures").write_bytes(b"\xff" * (8 * len(made.values)))
    fold(descriptor, OWNER)
    assert sums(*read_all(directory))["local"] == 5


@pytest.mark.parametrize("size", [0, 1, 10_000])
def test_total_of_another_length_is_begun_anew(size: int, directory: str, descriptor: int) -> None:
    made = figures_of(directory, OWNER, local=5)
    (Path(directory) / "total.figures").write_bytes(b"\xff" * size)
    fold(descriptor, OWNER)
    assert sums(*read_all(directory))["local"] == 5
    del made


def test_total_that_cannot_be_written_leaves_the_worker_where_it_is(directory: str, descriptor: int) -> None:
    made = figures_of(directory, OWNER, local=5)
    (Path(directory) / "total.figures").mkdir()
    with pytest.raises(OSError):
        fold(descriptor, OWNER)
    assert sums(*read_all(directory))["local"] == 5
    del made


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, lambda path: path.symlink_to("elsewhere"), lambda path: os.link(path.with_name("elsewhere"), path)],
    ids=["a FIFO", "a symbolic link", "a hard link"],
)
def test_what_is_no_file_of_its_own_is_replaced_and_not_written_to(
    make: Callable[[Path], object], directory: str, descriptor: int
) -> None:
    made = figures_of(directory, OWNER, local=5)
    elsewhere = Path(directory) / "elsewhere"
    elsewhere.write_text("untouched")
    make(Path(directory) / "total.figures")
    fold(descriptor, OWNER)
    assert sums(*read_all(directory))["local"] == 5
    assert elsewhere.read_text() == "untouched"
    del made


def test_counters_at_their_end_do_not_stop_an_arbiter(directory: str, descriptor: int) -> None:
    for owner in (OWNER, ANOTHER):
        made = Figures(figures_path(directory, owner))
        for place in range(places.STAMPED, len(made.values)):
            made.values[place] = 2**64 - 1
        assert fold(descriptor, owner) is not None
    _, total = read_all(directory)
    assert total is not None
    assert set(total.counters().values()) == {2**64 - 2}


def test_a_thousand_workers_that_have_ended_leave_one_file(directory: str, descriptor: int) -> None:
    for number in range(1_000):
        owner = f"{number:012x}"
        figures_of(directory, owner, stamped=1)
        fold(descriptor, owner)
    assert os.listdir(directory) == ["total.figures"]
    assert (Path(directory) / "total.figures").stat().st_size == 8 * len(Figures().values)
    assert sums(*read_all(directory))["stamped"] == 1_000
