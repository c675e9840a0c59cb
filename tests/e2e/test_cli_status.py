"""``gym-gunicorn status``: what it shows of real servers, in whatever state they are."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
from http.client import HTTPConnection
from pathlib import Path

import pytest

from tests.e2e.calls import PROBE, Journal, ask, owner_of, probe_server, session_at, stopped
from tests.e2e.command import COMMAND, OWNER, command, status_of, terminal, worker_of
from tests.e2e.launching import hang_up
from tests.gunicorn_server import CONFIG, STOCK, gunicorn_server, until
from tests.sessions import play


def test_every_worker_is_shown_with_what_it_did() -> None:
    with gunicorn_server(workers=4) as server:
        assert asyncio.run(play(server.url, 40)) == {"right": 40}
        shown = status_of(server)
        assert {worker["pid"] for worker in shown["workers"]} == set(server.workers())
        assert {worker["owner"] for worker in shown["workers"]} == server.owners()
        assert all(server.pid_of(worker["owner"]) == worker["pid"] for worker in shown["workers"])
        assert sum(worker["stamped"] for worker in shown["workers"]) == 40
        assert sum(worker["forwarded"] for worker in shown["workers"]) > 0
        totals = shown["totals"]
        assert totals["stamped"] == 40
        # Each of a session's four requests was handled once.
        assert totals["local"] + totals["received"] == 160
        assert totals["forwarded"] == totals["received"]
        for worker in shown["workers"]:
            assert worker["arbiter"] == server.pid
            assert worker["rss_bytes"] > worker["pss_bytes"] > 1_000_000
            assert worker["age_seconds"] > 0


def test_it_looks_at_servers_under_load_without_disturbing_them() -> None:
    async def look_and_play() -> None:
        playing = asyncio.create_task(play(server.url, 100))
        looks = 0
        while not playing.done() or not looks:
            shown = await asyncio.to_thread(status_of, server)
            looks += 1
            assert len(shown["workers"]) == 4
        assert await playing == {"right": 100}

    with gunicorn_server(workers=4) as server:
        asyncio.run(look_and_play())


def test_arbiter_is_shown_with_its_address_and_reloads() -> None:
    with probe_server("--name", "shop") as server:
        arbiters = until(lambda: status_of(server)["arbiters"], "the arbiter has said what it is")
        assert len(arbiters) == 1
        assert arbiters[0]["pid"] == server.pid
        assert arbiters[0]["name"] == "shop"
        assert arbiters[0]["addresses"] == [server.url]
        assert (arbiters[0]["workers"], arbiters[0]["reloads"]) == (2, 0)
        before = {worker["owner"] for worker in status_of(server)["workers"]}
        hang_up(server, 2)
        until(lambda: status_of(server)["arbiters"][0]["reloads"] == 1, "the reload is shown")
        after = until(lambda: _owners(status_of(server), 2), "two workers are shown")
        assert not before & after


@pytest.mark.parametrize(
    ("placement", "shown"), [('"local"', "local"), ('"balanced"', "balanced"), ("lambda mine, others: None", "own")]
)
def test_arbiter_says_who_takes_new_sessions(placement: str, shown: str) -> None:
    config = CONFIG.replace("SessionRouting(", f"SessionRouting(placement={placement}, ")
    with probe_server(config=config) as server:
        arbiters = until(lambda: status_of(server)["arbiters"], "the arbiter has said what it is")
        assert [arbiter["placement"] for arbiter in arbiters] == [shown]


def _owners(shown: dict[str, list[dict[str, str]]], number: int) -> set[str]:
    owners = {worker["owner"] for worker in shown["workers"]}
    return owners if len(owners) == number else set()


def test_both_arbiters_of_an_upgrade_are_shown_and_all_workers() -> None:
    with probe_server() as server:
        until(lambda: status_of(server)["arbiters"], "the arbiter has said what it is")
        server.send(signal.SIGUSR2)
        until(lambda: server.ready_workers() == 4, "the new workers serve")
        until(lambda: len(status_of(server)["arbiters"]) == 2, "both are shown")
        both = status_of(server)
        old, new = both["arbiters"]
        server.seen.add(new["pid"])
        assert old["pid"] == server.pid
        parents = [worker["arbiter"] for worker in both["workers"]]
        assert (parents.count(old["pid"]), parents.count(new["pid"])) == (2, 2)
        server.seen.update(worker["pid"] for worker in both["workers"])
        server.send(signal.SIGTERM)
        server.wait()
        until(lambda: len(status_of(server)["arbiters"]) == 1, "the new one is left")
        left = status_of(server)
        assert left["arbiters"][0]["pid"] == new["pid"]
        assert {worker["arbiter"] for worker in left["workers"]} == {new["pid"]}


def test_stopped_worker_is_shown_as_stopped_and_since_when() -> None:
    with probe_server("--timeout", "120") as server:
        first, other = server.workers()
        with stopped(first):
            assert worker_of(server, first)["state"] == "stopped"
            until(lambda: worker_of(server, other)["state"] == "serving", "the other one serves")
            until(lambda: worker_of(server, first)["silence_seconds"] > 2, "it has been silent")
            assert re.search(rf"{first}  stopped \d+ s ", command("status", "--sockets", server.parent).stdout)
        until(lambda: worker_of(server, first)["state"] == "serving", "it goes on")


def test_worker_whose_loop_is_held_up_is_shown_as_silent(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    with probe_server("--timeout", "120", journal=journal) as server:
        caller = HTTPConnection("127.0.0.1", server.port, timeout=60)
        try:
            caller.request("GET", "/block")
            pids = server.workers()
            until(lambda: any(worker_of(server, pid)["state"] == "silent" for pid in pids), "one is silent")
            (held_up,) = (pid for pid in pids if f"block {pid}" in journal.lines())
            assert worker_of(server, held_up)["state"] == "silent"
            assert worker_of(server, held_up)["active"] == 1
            shown = command("status", "--sockets", server.parent).stdout
            assert re.search(rf"{held_up}  silent \d+ s ", shown)
        finally:
            caller.close()


def test_dead_worker_is_shown_as_dead_until_its_arbiter_has_noticed() -> None:
    with probe_server() as server:
        first, _ = server.workers()
        owner = owner_of(server, first)
        with stopped(server.pid):
            os.kill(first, signal.SIGKILL)
            until(lambda: worker_of(server, first)["state"] == "dead", "it is dead")
            assert re.search(rf"{owner}  *{first}  dead ", command("status", "--sockets", server.parent).stdout)
        until(lambda: worker_of(server, first) is None, "the arbiter has noticed")


def test_what_a_killed_worker_counted_stays_in_the_sums() -> None:
    with probe_server() as server:
        first, _ = server.workers()
        session_at(server, first)
        before = status_of(server)["totals"]
        assert before["stamped"] == 1
        os.kill(first, signal.SIGKILL)
        until(lambda: worker_of(server, first) is None, "the arbiter has noticed")
        assert status_of(server)["totals"] == before
        assert re.search(r"^ended  +1 ", command("status", "--sockets", server.parent).stdout, re.MULTILINE)


@pytest.mark.parametrize("spoil", ["cut short", "of another release", "garbage", "too long", "removed"])
def test_worker_without_figures_that_can_be_read_is_shown_all_the_same(spoil: str) -> None:
    with probe_server() as server:
        first, other = server.workers()
        owner = owner_of(server, first)
        (path,) = server.parent.glob(f"gym-gunicorn-*/{owner}.figures")
        data = path.read_bytes()
        # In another file, so that what the worker has mapped stays as it is. Where it is missing
        # the worker makes it again, so that one is kept from being seen to be missing.
        path.with_suffix(".new").write_bytes(
            {
                "cut short": data[:50],
                "of another release": bytes([*data[:6], data[6] ^ 1, *data[7:]]),
                "garbage": os.urandom(len(data) // 2),
                "too long": data * 2,
                "removed": b"",
            }[spoil]
        )
        with stopped(first):
            path.with_suffix(".new").rename(path)
            if spoil == "removed":
                path.unlink()
            shown = status_of(server)
            (spoilt,) = (worker for worker in shown["workers"] if worker["owner"] == owner)
            assert (spoilt["state"], spoilt["pid"], spoilt["stamped"]) == ("unknown", None, None)
            until(lambda: worker_of(server, other)["state"] == "serving", "the other one serves")
            assert re.search(rf"{owner}  *-  no figures ", command("status", "--sockets", server.parent).stdout)
            command("metrics", "--sockets", server.parent)


@pytest.mark.parametrize("which", ["arbiter", "worker"])
def test_server_is_found_by_one_of_its_processes(which: str) -> None:
    with probe_server() as server, probe_server() as other:
        pid = server.pid if which == "arbiter" else server.workers()[-1]
        shown = json.loads(command("status", "--json", "--pid", str(pid)).stdout)["servers"]
        assert [one["directory"] for one in shown] == [str(path) for path in server.directories()]
        assert str(other.parent) not in json.dumps(shown)


def test_server_is_found_by_its_directory_and_by_the_folder_of_that() -> None:
    with probe_server() as server:
        (directory,) = server.directories()
        for sockets in (directory, server.parent):
            shown = json.loads(command("status", "--json", "--sockets", sockets).stdout)["servers"]
            assert [one["directory"] for one in shown] == [str(directory)]


def test_several_servers_are_shown_one_below_the_other() -> None:
    with probe_server() as server:
        config = (server.parent / "conf.py").read_text()
        with probe_server(config=config) as beside:
            until(lambda: "arbiter" in command("status", "--sockets", server.parent).stdout, "it is shown")
            shown = command("status", "--sockets", server.parent).stdout
            assert set(OWNER.findall(shown)) == server.owners() | beside.owners()
            assert len(server.directories()) == 2
            assert all(str(directory) in shown for directory in server.directories())


def test_where_no_server_runs_it_says_where_it_looked(tmp_path: Path) -> None:
    done = command("status", "--sockets", tmp_path, status=1)
    assert done.stdout == ""
    assert str(tmp_path) in done.stderr
    assert json.loads(command("status", "--json", "--sockets", tmp_path, status=1).stdout)["servers"] == []


def test_what_a_server_that_was_killed_left_behind_is_no_server() -> None:
    with probe_server() as server:
        server.workers()
        for pid in (server.pid, *server.workers()):
            os.kill(pid, signal.SIGKILL)
        server.wait()
        until(lambda: not server.survivors(), "everything is killed")
        (left,) = server.directories()
        assert list(left.glob("*.figures"))
        command("status", "--sockets", server.parent, status=1)
        assert list(left.glob("*.figures")), "looking changes nothing"


def test_server_without_routing_is_not_shown() -> None:
    with gunicorn_server(app=PROBE, workers=2, config=STOCK) as server:
        command("status", "--sockets", server.parent, status=1)
        assert f"process {server.pid}" in command("status", "--pid", str(server.pid), status=1).stderr


def test_pipe_gets_whole_lines_and_no_escape_sequences() -> None:
    with probe_server() as server:
        until(lambda: status_of(server)["arbiters"], "the arbiter has said what it is")
        shown = command("status", "--sockets", server.parent).stdout
        assert "\x1b" not in shown
        assert "…" not in shown
        header = next(line for line in shown.splitlines() if line.startswith("owner"))
        names = "owner pid state age PSS stamped active local forwarded received gone errors loop lag"
        assert " ".join(header.split()) == names


def test_reader_that_leaves_is_no_error() -> None:
    with probe_server() as server:
        watching = subprocess.Popen(
            [COMMAND, "status", "--watch", "--interval", "0.1", "--json", "--sockets", server.parent],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert watching.stdout is not None and watching.stderr is not None
        try:
            assert len(json.loads(watching.stdout.readline())["servers"]) == 1
            assert len(json.loads(watching.stdout.readline())["servers"]) == 1
            watching.stdout.close()
            watching.wait(60)
            assert watching.stderr.read() == b""
        finally:
            watching.kill()
            watching.wait()
            watching.stderr.close()


@pytest.mark.parametrize("end", ["Ctrl-C", "SIGTERM"])
def test_watch_draws_again_and_leaves_the_terminal_as_it_was(end: str) -> None:
    with (
        probe_server() as server,
        terminal("status", "--watch", "--interval", "0.1", "--sockets", server.parent, columns=150) as screen,
    ):
        (owner, *_) = server.owners()
        until(lambda: screen.read().count(owner.encode()) >= 3, "it has drawn three times")
        ask(server, "/count", method="POST")
        until(lambda: re.search(r"^all +1 ", screen.text(), re.MULTILINE), "the new session is shown")
        if end == "Ctrl-C":
            screen.press_control_c()
        else:
            screen.process.send_signal(signal.SIGTERM)
        assert screen.process.wait(60) == (0 if end == "Ctrl-C" else 128 + signal.SIGTERM)
        seen = screen.read()
        assert b"Traceback" not in seen
        # The other screen was entered once and left, and the cursor is back.
        assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1
        assert seen.rindex(b"\x1b[?25h") > seen.rindex(b"\x1b[?25l")
        assert screen.echoes()


def test_narrow_terminal_gets_no_broken_lines() -> None:
    with probe_server() as server, terminal("status", "--sockets", server.parent, columns=80) as screen:
        assert screen.process.wait(60) == 0
        lines = screen.text().splitlines()
        rows = [line for line in lines if OWNER.match(line)]
        assert {row.split()[0] for row in rows} == server.owners()
        assert all(len(row) <= 80 and "…" not in row for row in rows)
        assert any(line.startswith("A wider terminal shows more: ") for line in lines)


def test_looking_leaves_the_directory_as_it_is() -> None:
    with probe_server() as server:
        (directory,) = server.directories()
        until(lambda: status_of(server)["arbiters"], "the arbiter has said what it is")
        before = sorted(os.listdir(directory))
        command("status", "--sockets", server.parent)
        command("metrics", "--sockets", server.parent)
        assert sorted(os.listdir(directory)) == before
        assert server.stop() == 0
        assert server.directories() == []
