"""What process titles say, and when they are written."""

from __future__ import annotations

import subprocess
import sys

import pytest
import setproctitle

from gym_gunicorn.metrics.titles import master_title, plain_title, show, worker_title
from gym_gunicorn.metrics.values import (
    ACTIVE,
    FORWARDED,
    GONE,
    LOCAL,
    RECEIVED,
    SERVING,
    STAMPED,
    STATE,
    STOPPING,
    Figures,
)
from tests.gunicorn_server import ROOT

OWNER = "3f2a91c04b7e"


def figures(state: int) -> Figures:
    made = Figures()
    counts = {STAMPED: 12, ACTIVE: 3, LOCAL: 340, FORWARDED: 498, RECEIVED: 512, GONE: 1}
    for place, value in {**counts, STATE: state}.items():
        made.values[place] = value
    return made


def test_title_of_a_worker_that_serves_has_its_owner_and_its_counts() -> None:
    assert worker_title("guess:app", figures(SERVING).reading(OWNER)) == (
        "gunicorn: worker [guess:app] "
        "owner=3f2a91c04b7e stamped=12 active=3 local=340 forwarded=498 received=512 gone=1"
    )


@pytest.mark.parametrize(("state", "word"), [(0, "starting"), (STOPPING, "stopping"), (77, "unknown")])
def test_title_of_a_worker_that_does_not_serve_says_so(state: int, word: str) -> None:
    title = worker_title("guess:app", figures(state).reading(OWNER))
    assert f" owner={OWNER} state={word} stamped=12 " in title


def test_counts_of_twenty_digits_are_written_in_full() -> None:
    made = figures(SERVING)
    made.values[LOCAL] = 2**64 - 1
    assert " local=18446744073709551615 " in worker_title("app", made.reading(OWNER))


def test_title_of_an_arbiter_has_its_workers_and_its_directory() -> None:
    title = master_title("guess:app", 4, "/tmp/gym-gunicorn-abc")
    assert title == "gunicorn: master [guess:app] workers=4 sockets=/tmp/gym-gunicorn-abc"


def test_title_of_a_worker_that_is_not_routed_is_gunicorns_own() -> None:
    assert plain_title("guess:app") == "gunicorn: worker [guess:app]"


def test_title_that_stands_there_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(setproctitle, "getproctitle", lambda: written[-1] if written else "python")
    monkeypatch.setattr(setproctitle, "setproctitle", written.append)
    for title in ("one", "one", "two", "two", "one"):
        show(title)
    assert written == ["one", "two", "one"]


def test_title_is_what_ps_shows() -> None:
    program = (
        f"from gym_gunicorn.metrics.titles import show; show({'gunicorn: ' + 'x' * 300!r}); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            command = ["ps", "-ww", "-o", "args=", "-p", str(process.pid)]
            shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        finally:
            process.kill()
    # Longer than its command line, since setproctitle takes the environment's place too.
    assert shown.strip() == "gunicorn: " + "x" * 300
