"""Who takes a new session: the policy by figures, and what a worker knows of the others' room."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gym_gunicorn.metrics.values import (
    ACTIVE,
    BEAT,
    LAG,
    SERVING,
    STAMPED,
    STARTING,
    STATE,
    STOPPING,
    Figures,
    figures_path,
)
from gym_gunicorn.owner import new_owner_id
from gym_gunicorn.placement import LAGGING, Policy, Room, balanced
from gym_gunicorn.routing import balancer
from gym_gunicorn.routing.balancer import FRESH, LATELY, SILENT, Balancer
from tests.workers import socket_directory

HERE = "f" * 12
A, B, C, D = (f"{number:012x}" for number in range(4))


def room(owner_id: str = HERE, active: float = 0, lately: float = 0, lag: float = 0) -> Room:
    return Room(owner_id, active, lately, lag)


@pytest.fixture(autouse=True)
def _chance() -> None:
    """Chance that can be repeated."""
    random.seed(0)


def test_request_stays_where_there_is_no_other_worker() -> None:
    assert balanced(room(active=1000, lag=10), []) is None


@pytest.mark.parametrize(
    "theirs", [room(A, 3), room(A, lately=3), room(A, 1, 2), room(A, 2.5), room(A, 4), room(A, 99)]
)
def test_request_stays_where_the_others_are_no_better_by_a_session(theirs: Room) -> None:
    assert balanced(room(active=2, lately=1), [theirs, theirs]) is None


@pytest.mark.parametrize("theirs", [room(A, 2), room(A, lately=2), room(A, 1, 1), room(A)])
def test_request_moves_where_another_is_better_by_a_session(theirs: Room) -> None:
    assert balanced(room(active=2, lately=1), [theirs]) == A


def test_better_one_of_two_is_chosen() -> None:
    assert balanced(room(active=10), [room(A, 5), room(B, 3)]) == B
    assert balanced(room(active=10), [room(A, 3), room(B, 5)]) == A


def test_two_candidates_are_looked_at_and_no_more() -> None:
    others = [room(f"{number:012x}", number) for number in range(10)]
    chosen = Counter(balanced(room(active=100), others) for _ in range(5000))
    # The busiest is never the better one of two; the one that is next to it is, once in a while.
    assert set(chosen) == {other.owner_id for other in others[:-1]}
    assert chosen[others[0].owner_id] > chosen[others[8].owner_id]


def test_request_stays_where_the_two_that_are_looked_at_are_no_better() -> None:
    others = [room(A), *(room(f"{number:012x}", 10) for number in range(1, 10))]
    assert {balanced(room(active=10), others) for _ in range(1000)} == {A, None}


def test_request_leaves_a_worker_whose_loop_is_late() -> None:
    assert balanced(room(lag=LAGGING), [room(A)]) == A
    assert balanced(room(lag=LAGGING / 2), [room(A)]) is None


def test_worker_whose_loop_is_late_is_no_better() -> None:
    assert balanced(room(active=2), [room(A, lag=2 * LAGGING)]) is None
    assert balanced(room(active=10), [room(A, 1, lag=2 * LAGGING), room(B, 3)]) == B


def test_lag_counts_the_more_the_more_there_is_to_do() -> None:
    assert room(active=2, lately=3).load() == 5
    assert room(active=2, lately=3, lag=LAGGING).load() == 11


ROOMS = st.builds(room, st.sampled_from([A, B]), st.integers(0, 50), st.floats(0, 50), st.floats(0, 2))


@given(mine=ROOMS, others=st.lists(ROOMS, max_size=2))
def test_request_moves_exactly_where_one_of_two_is_better_by_a_session(mine: Room, others: list[Room]) -> None:
    chosen = balanced(mine, others)
    better = [other for other in others if other.load() + 1 <= mine.load()]
    if chosen is None:
        assert not better
    else:
        assert chosen == min(better, key=Room.load).owner_id


class Asked:
    """A policy that keeps what it was asked, and says what the test wants."""

    def __init__(self, answer: str | None = None) -> None:
        self.answer = answer
        self.mine = room()
        self.others: dict[str, Room] = {}

    def __call__(self, mine: Room, others: Sequence[Room]) -> str | None:
        self.mine = mine
        self.others = {other.owner_id: other for other in others}
        return self.answer


class Server:
    """The figures of a server's workers, its clock, and what the worker ``HERE`` knows of them.

    Args:
        policy: of that worker.
    """

    def __init__(self, directory: str, clock: SimpleNamespace, policy: Policy | None = None) -> None:
        self.directory = directory
        self.clock = clock
        self.asked = Asked()
        self.workers = {HERE: Figures(figures_path(directory, HERE))}
        self.change(HERE)
        self.placement = Balancer(HERE, directory, self.workers[HERE], policy or self.asked)

    def change(self, owner_id: str, **values: int) -> None:
        """Write figures of a worker, which is made where there is none, and lives unless they say otherwise."""
        figures = self.workers.get(owner_id)
        if figures is None:
            figures = self.workers[owner_id] = Figures(figures_path(self.directory, owner_id))
        names = {"active": ACTIVE, "stamped": STAMPED, "lag": LAG, "state": STATE, "beat": BEAT}
        # For as long as any test takes, however slow the machine is.
        alive = {"state": SERVING, "beat": time.monotonic_ns() + 3600 * 10**9}
        for name, value in {**alive, **values}.items():
            figures.values[names[name]] = value

    def stamp(self, owner_id: str, sessions: int) -> None:
        """Have a worker stamp so many sessions more."""
        self.workers[owner_id].values[STAMPED] += sessions

    def end(self, owner_id: str) -> None:
        """Remove the figures of a worker that has ended."""
        del self.workers[owner_id]
        os.unlink(figures_path(self.directory, owner_id))

    def choose(self, after: float = 0.0) -> dict[str, Room]:
        """Choose once, so many seconds later, and return what was known of the others."""
        self.clock.now += after
        self.placement.choose()
        return self.asked.others

    def look(self, after: float = 2 * FRESH) -> dict[str, Room]:
        """Choose once, when figures are no longer fresh."""
        return self.choose(after)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The clock by which looks are taken; ``now`` are its seconds."""
    clock = SimpleNamespace(now=1000.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(balancer, "time", clock)
    return clock


@pytest.fixture
def directory() -> Iterator[str]:
    with socket_directory() as path:
        yield path


@pytest.fixture
def server(directory: str, clock: SimpleNamespace) -> Server:
    return Server(directory, clock)


def about(value: float) -> Any:
    """What fades between two looks, or within a moment, is not exact."""
    return pytest.approx(value, rel=0.05, abs=0.05)


def test_others_rooms_are_what_their_files_say(server: Server) -> None:
    server.change(A, active=3, lag=20_000_000)
    server.change(B)
    assert server.choose() == {A: room(A, 3, lag=0.02), B: room(B)}


def test_own_room_is_no_other_ones(server: Server) -> None:
    server.change(HERE, active=2, lag=10_000_000)
    assert server.choose() == {}
    assert server.asked.mine == room(HERE, 2, lag=0.01)


def test_how_many_sessions_there_ever_were_is_no_matter(server: Server) -> None:
    server.change(HERE, stamped=0)
    server.change(A, stamped=10_000)
    assert server.choose()[A].lately == 0


@pytest.mark.parametrize("state", [STARTING, STOPPING, 99], ids=["starting", "stopping", "in no state there is"])
def test_worker_that_does_not_serve_is_not_placed_on(server: Server, state: int) -> None:
    server.change(A, state=state)
    server.change(B)
    assert set(server.choose()) == {B}
    server.change(A)
    assert set(server.look()) == {A, B}
    server.change(A, state=state)
    assert set(server.look()) == {B}


def test_worker_that_has_not_shown_that_it_lives_is_not_placed_on(server: Server) -> None:
    server.change(A)
    server.change(B)
    assert set(server.choose()) == {A, B}
    server.change(A, beat=time.monotonic_ns() - int(SILENT * 1.1e9))
    assert set(server.look()) == {B}


def test_worker_whose_figures_are_gone_is_forgotten(server: Server) -> None:
    server.change(A)
    assert set(server.choose()) == {A}
    server.end(A)
    assert server.look() == {}


@pytest.mark.parametrize("size", [0, 10], ids=["empty", "cut short"])
def test_worker_whose_figures_can_not_be_read_is_not_placed_on(server: Server, size: int) -> None:
    server.change(A)
    with open(figures_path(server.directory, B), "wb") as file:
        file.write(bytes(size))
    assert set(server.choose()) == {A}


def test_directory_that_is_gone_leaves_the_worker_alone(server: Server, directory: str) -> None:
    server.change(A)
    assert set(server.choose()) == {A}
    server.end(A)
    os.unlink(figures_path(directory, HERE))
    os.rmdir(directory)
    assert server.look() == {}


def test_files_are_read_again_only_when_they_are_no_longer_fresh(server: Server) -> None:
    server.change(A)
    server.choose()
    server.change(A, active=5)
    assert server.choose(after=FRESH / 2)[A].active == 0
    assert server.choose(after=FRESH)[A].active == 5


def test_own_requests_and_lag_count_at_once(server: Server) -> None:
    server.choose()
    server.change(HERE, active=7, lag=30_000_000)
    server.choose()
    assert server.asked.mine == room(HERE, 7, lag=0.03)


def test_own_stamps_count_at_once_and_once(server: Server) -> None:
    server.choose()
    for sessions in (1, 2, 3):
        server.workers[HERE].stamped()
        server.choose()
        assert server.asked.mine.lately == sessions
    server.look()
    assert server.asked.mine.lately == about(3)


def test_own_stamps_count_when_the_file_had_been_removed(server: Server) -> None:
    server.choose()
    os.unlink(figures_path(server.directory, HERE))
    server.workers[HERE].restore()
    server.workers[HERE].stamped()
    server.choose()
    assert server.asked.mine.lately == 1


def test_others_stamps_count_at_the_next_look(server: Server) -> None:
    server.change(A, stamped=100)
    server.choose()
    server.stamp(A, 8)
    assert server.choose()[A].lately == 0
    assert server.look()[A].lately == about(8)
    server.stamp(A, 2)
    assert server.look()[A].lately == about(10)


def test_stamps_count_half_after_a_while_here_and_there(server: Server) -> None:
    server.change(A)
    server.choose()
    server.stamp(A, 80)
    server.stamp(HERE, 40)
    server.look()
    assert server.look(after=LATELY)[A].lately == about(40)
    assert server.asked.mine.lately == about(20)
    assert server.look(after=2 * LATELY)[A].lately == about(10)
    assert server.asked.mine.lately == about(5)
    assert server.look(after=1e9)[A].lately == 0


def test_stamps_fade_by_the_time_and_not_by_the_looks(server: Server) -> None:
    server.change(A)
    server.choose()
    server.stamp(A, 80)
    server.look()
    for _ in range(100):
        server.look(after=LATELY / 100)
    assert server.asked.others[A].lately == about(40)


def test_what_was_stamped_in_an_hour_without_a_look_was_not_stamped_lately(server: Server) -> None:
    server.change(A)
    server.choose()
    server.stamp(A, 1000)
    server.stamp(HERE, 1000)
    assert server.look(after=3600)[A].lately < 100
    assert server.asked.mine.lately < 100


def test_what_was_placed_counts_until_the_next_look(server: Server) -> None:
    server.change(A)
    server.change(B)
    server.asked.answer = A
    for placed in range(5):
        others = server.choose()
        assert (others[A].active, others[B].active) == (placed, 0)
    server.change(A, active=1, stamped=4)
    assert server.look()[A] == room(A, 1, about(4))


def test_new_worker_begins_like_the_others(server: Server) -> None:
    server.change(A)
    server.change(B)
    server.choose()
    for owner_id, sessions in ((HERE, 10), (A, 20), (B, 60)):
        server.stamp(owner_id, sessions)
    server.look()
    server.change(C, stamped=3)
    assert server.look()[C].lately == about(30)


def test_worker_that_is_heard_of_again_begins_like_the_others(server: Server) -> None:
    server.change(A)
    server.change(B)
    server.choose()
    server.stamp(HERE, 10)
    server.stamp(B, 20)
    server.change(A, beat=1)
    server.look()
    server.change(A, stamped=1000)
    assert server.look()[A].lately == about(15)


def spread(server: Server, requests: int) -> Counter[str]:
    """Place so many requests that come at once, between two looks; return who takes how many."""
    taken: Counter[str] = Counter()
    for _ in range(requests):
        chosen = server.placement.choose() or HERE
        taken[chosen] += 1
        if chosen == HERE:
            server.workers[HERE].values[ACTIVE] += 1
    return taken


@pytest.mark.parametrize("workers", [2, 4, 8, 32])
def test_burst_is_spread_evenly_without_a_look_in_between(directory: str, clock: SimpleNamespace, workers: int) -> None:
    server = Server(directory, clock, balanced)
    for _ in range(workers - 1):
        server.change(new_owner_id())
    taken = spread(server, 50 * workers)
    assert set(taken) == set(server.workers)
    assert max(taken.values()) <= 60
    assert min(taken.values()) >= 40


def test_burst_does_not_pile_up_on_the_one_that_was_the_emptiest(directory: str, clock: SimpleNamespace) -> None:
    server = Server(directory, clock, balanced)
    for owner_id, active in ((HERE, 20), (A, 0), (B, 20), (C, 20)):
        server.change(owner_id, active=active)
    taken = spread(server, 180)
    after = {owner_id: taken[owner_id] + (0 if owner_id == A else 20) for owner_id in (HERE, A, B, C)}
    assert max(after.values()) <= 1.2 * 60
    assert min(after.values()) >= 0.8 * 60


def test_new_worker_is_not_flooded(directory: str, clock: SimpleNamespace) -> None:
    server = Server(directory, clock, balanced)
    for owner_id in (A, B):
        server.change(owner_id)
    server.placement.choose()
    for owner_id in (HERE, A, B):
        server.stamp(owner_id, 100)
    clock.now += 2 * FRESH
    server.placement.choose()
    server.change(D)
    clock.now += 2 * FRESH
    taken = spread(server, 200)
    assert set(taken) == {HERE, A, B, D}
    assert taken[D] <= 1.5 * 50


def test_worker_that_is_held_up_gets_fewer(directory: str, clock: SimpleNamespace) -> None:
    server = Server(directory, clock, balanced)
    for owner_id in (A, B, C):
        server.change(owner_id, lag=100_000_000 if owner_id == A else 0)
    taken = spread(server, 200)
    assert taken[A] < 0.5 * 50
    others = [taken[owner_id] for owner_id in (HERE, B, C)]
    assert max(others) <= 1.3 * sum(others) / 3


@pytest.mark.parametrize("answer", [None, A, B], ids=["nobody", "another worker", "an owner that is gone"])
def test_what_a_users_policy_says_is_what_is_chosen(server: Server, answer: str | None) -> None:
    server.change(A)
    server.asked.answer = answer
    assert server.placement.choose() == answer
    assert server.placement.choose() == answer
    server.clock.now += 1
    assert server.placement.choose() == answer
    assert set(server.asked.others) == {A}
