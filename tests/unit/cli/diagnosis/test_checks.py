"""What the doctor concludes from facts: each finding from a server that has it, and from one that has not."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gym_gunicorn.cli.diagnosis.checks import findings
from gym_gunicorn.cli.diagnosis.facts import (
    App,
    Configuration,
    Cookie,
    Failure,
    Folder,
    Host,
    Inspection,
    Neighbour,
    Routing,
)
from gym_gunicorn.cli.diagnosis.findings import Finding, as_json, as_text, exit_status
from gym_gunicorn.lifecycle.configuration import HOOKS

COOKIE = Cookie("session", 1209600, fingerprint=7, flags="httponly; samesite=lax")
HOOKED = Configuration(app="app:app", hooks={name: "ours" for name in HOOKS}, routing=Routing(placement="balanced"))
APP = App(cookies=[COOKIE])
HOST = Host(folder=Folder(longest=43))
SECURE = replace(COOKIE, flags="httponly; samesite=lax; secure")
NO_HOOKS: dict[str, Any] = {name: "missing" for name in HOOKS}


def found(
    configuration: Configuration = HOOKED, app: App = APP, host: Host = HOST, again: App | None = None
) -> dict[str, Finding]:
    """Return the findings by their codes."""
    first, second = Inspection(configuration, app), Inspection(configuration, again or app)
    return {finding.code: finding for finding in findings(first, second, host)}


def test_a_good_configuration_is_all_right() -> None:
    assert {finding.level for finding in found().values()} == {"ok"}


@pytest.mark.parametrize(
    ("code", "level", "changes"),
    [
        ("one-worker", "warning", {"workers": 1}),
        ("hooks-missing", "error", {"hooks": {**HOOKED.hooks, "pre_fork": "missing"}}),
        ("hooks-lost", "error", {"hooks": {**HOOKED.hooks, "post_worker_init": "lost"}}),
        ("hooks-unknown", "warning", {"hooks": {**HOOKED.hooks, "post_worker_init": "unknown"}}),
        ("worker-class", "error", {"is_routing_worker": False, "worker_class": "sync"}),
        ("worker-class-broken", "error", {"is_routing_worker": False, "worker_class_error": "ImportError"}),
        ("not-configured", "error", {"is_routing_worker": False, "routing": None, "hooks": NO_HOOKS}),
        ("hooks-missing", "error", {"routing": None, "hooks": NO_HOOKS}),
        ("several-routings", "error", {"routings": 2}),
        ("settings-unused", "error", {"unused_routings": ["mine"]}),
        ("routing-off", "error", {"routing": Routing(routing="off")}),
        ("max-requests", "error", {"max_requests": 100}),
        ("reload", "warning", {"reload": True}),
        ("preload-app", "note", {"preload_app": True}),
        ("timeout", "warning", {"timeout": 5}),
        ("timeout", "warning", {"timeout": 0}),
        ("graceful-timeout", "warning", {"graceful_timeout": 3}),
        ("reuse-port", "warning", {"reuse_port": True}),
        ("forwarded-allow-ips", "warning", {"forwarded_allow_ips": ["*"], "bind": ["0.0.0.0:80"]}),
        ("umask", "note", {"umask": 0o077, "bind": ["unix:/run/app.sock"]}),
        ("user", "note", {"uid": 1000}),
        ("statsd", "warning", {"statsd": "nowhere:8125", "statsd_error": "Name or service not known"}),
        ("secret-differs", "error", {"routing": Routing(given=replace(COOKIE, fingerprint=8))}),
        ("max-age-differs", "warning", {"routing": Routing(given=replace(COOKIE, max_age=60))}),
        ("carrier-token", "ok", {"routing": Routing(token_header="X-Session")}),
        ("placement-local", "note", {"routing": Routing(placement="local")}),
    ],
)
def test_what_a_configuration_costs_is_found(code: str, level: str, changes: dict[str, Any]) -> None:
    finding = found(replace(HOOKED, **changes))[code]
    assert finding.level == level
    assert level == "ok" or level == "note" or finding.remedy
    assert code not in found()


@pytest.mark.parametrize(
    "changes",
    [
        {"routing": Routing(placement="own")},
        {"routing": Routing(routing="always"), "workers": 1},
        {"routing": Routing(), "workers": 1},
        {"routing": Routing(routing="off")},
    ],
    ids=["a policy of the user's", "one worker, routed", "one worker", "not routed"],
)
def test_nothing_is_said_of_new_sessions_where_they_are_placed_or_there_is_no_choice(changes: dict[str, Any]) -> None:
    assert "placement-local" not in found(replace(HOOKED, **changes))


@pytest.mark.parametrize(
    ("code", "level", "app"),
    [
        ("no-carrier", "error", App()),
        ("app-keeps-no-state", "ok", App(declares_no_state=True)),
        ("wsgi-app", "error", App(kind="wsgi")),
        ("secret-default", "warning", App(cookies=[replace(COOKIE, weakness="default")])),
        ("secret-short", "warning", App(cookies=[replace(COOKIE, weakness="short")])),
        ("sessions-nested", "warning", App(cookies=[COOKIE], nested=["a", "session"])),
        ("sessions-mounted", "warning", App(cookies=[replace(COOKIE, name="b", mount="/sub"), COOKIE])),
        ("cookie-name-twice", "warning", App(cookies=[replace(COOKIE, mount="/sub"), COOKIE])),
        ("cookie-name-twice", "error", App(cookies=[replace(COOKIE, mount="/sub", fingerprint=8), COOKIE])),
        ("cookie-secure", "warning", App(cookies=[SECURE])),
        ("cookie-same-site", "warning", App(cookies=[replace(COOKIE, flags="httponly; samesite=none")])),
        ("cookie-prefix", "warning", App(cookies=[replace(COOKIE, name="__Host-session")])),
        ("cookie-prefix", "warning", App(cookies=[replace(SECURE, name="__Host-session", path="/sub")])),
        ("cookie-strict", "note", App(cookies=[replace(COOKIE, flags="httponly; samesite=strict")])),
        ("cookie-domain", "note", App(cookies=[replace(COOKIE, flags="httponly; samesite=lax; domain=example.org")])),
        ("cookie-path", "note", App(cookies=[replace(COOKIE, path="/sub")])),
        ("carrier-token", "ok", App(cookies=[COOKIE], token_header="X-Session")),
    ],
)
def test_what_an_app_costs_is_found(code: str, level: str, app: App) -> None:
    assert found(app=app)[code].level == level
    assert code not in found()


@pytest.mark.parametrize(
    ("code", "level", "changes"),
    [
        ("platform", "warning", {"platform": "darwin"}),
        ("versions", "warning", {"unsupported": ["gunicorn 26.0 (>=27.0.1 is supported)"]}),
        ("websockets", "note", {"websockets": False}),
        ("descriptors", "warning", {"descriptors": 256}),
        ("descriptors", "note", {"descriptors": 1024}),
        ("path-too-long", "error", {"folder": Folder(longest=108)}),
        ("folder", "error", {"folder": Folder(trouble="No such file or directory")}),
        ("folder-closed", "error", {"folder": Folder(closed_to_uid="/root")}),
        ("folder-full", "error", {"folder": Folder(free=0)}),
        ("folder-full", "error", {"folder": Folder(free_files=0)}),
        ("folder-full", "warning", {"folder": Folder(free=4096)}),
        ("folder-open", "warning", {"folder": Folder(mode=0o777)}),
        ("folder-of-another", "warning", {"folder": Folder(uid=12345)}),
        ("same-secret", "warning", {"neighbours": [Neighbour(9, "/tmp/x", 7, same_address=False)]}),
        ("same-secret", "note", {"neighbours": [Neighbour(9, "/tmp/x", 7, same_address=None)]}),
        ("running", "ok", {"neighbours": [Neighbour(9, "/tmp/x", 7, same_address=True)]}),
    ],
)
def test_what_a_host_costs_is_found(code: str, level: str, changes: dict[str, Any]) -> None:
    assert found(host=replace(HOST, **changes))[code].level == level
    assert code not in found()


def test_a_neighbour_with_another_secret_is_no_trouble() -> None:
    assert "same-secret" not in found(host=replace(HOST, neighbours=[Neighbour(9, "/tmp/x", 8, same_address=False)]))


def test_only_root_can_change_the_user() -> None:
    assert found(replace(HOOKED, uid=1000), host=replace(HOST, euid=1001))["user"].level == "error"


def test_websockets_that_the_app_needs_are_missed_more() -> None:
    host = replace(HOST, websockets=False)
    assert found(app=replace(APP, websockets=True), host=host)["websockets"].level == "warning"


def test_a_metrics_path_needs_its_library() -> None:
    configuration = replace(HOOKED, routing=Routing(metrics=True))
    assert found(configuration, host=replace(HOST, prometheus=False))["metrics"].level == "error"
    assert "metrics" not in found(configuration)


def test_a_random_secret_is_an_error_where_workers_make_one_each() -> None:
    again = App(cookies=[replace(COOKIE, fingerprint=8)])
    assert found(again=again)["secret-random"].level == "error"
    assert found(replace(HOOKED, preload_app=True), again=again)["secret-random"].level == "warning"
    assert found(replace(HOOKED, workers=1), again=again)["secret-random"].level == "warning"
    assert "secret-random" not in found()


def test_a_secure_cookie_is_right_where_the_server_speaks_https() -> None:
    app = App(cookies=[SECURE])
    assert "cookie-secure" not in found(replace(HOOKED, is_tls=True), app)
    assert found(replace(HOOKED, bind=["unix:/run/app.sock"]), app)["cookie-secure"].level == "note"


def test_one_worker_with_routing_always_is_routed() -> None:
    configuration = replace(HOOKED, workers=1, routing=Routing(routing="always"))
    assert "routed" in found(configuration)
    assert "one-worker" not in found(configuration)


def test_routing_off_is_right_for_one_worker_and_for_an_app_without_sessions() -> None:
    off = replace(HOOKED, routing=Routing(routing="off"))
    assert found(replace(off, workers=1))["routing-off"].level == "ok"
    assert found(off, App())["routing-off"].level == "ok"


def test_workers_that_hold_no_sessions_may_be_replaced() -> None:
    assert "max-requests" not in found(replace(HOOKED, max_requests=100), App(declares_no_state=True))


def test_any_proxy_may_be_believed_on_the_loopback_address() -> None:
    for bind in ("127.0.0.1:8000", "[::1]:8000", "localhost:8000", "unix:/run/app.sock"):
        assert "forwarded-allow-ips" not in found(replace(HOOKED, forwarded_allow_ips=["*"], bind=[bind]))


def test_a_secret_for_an_app_that_cannot_be_looked_into_is_a_carrier() -> None:
    codes = found(replace(HOOKED, routing=Routing(given=COOKIE)), App())
    assert "no-carrier" not in codes
    assert codes["stamp-unseen"].level == "note"


def test_an_app_that_loads_only_once_is_an_error() -> None:
    second = Inspection(HOOKED, failure=Failure("application", "OSError: in use", "app.py, line 3"))
    codes = {finding.code: finding for finding in findings(Inspection(HOOKED, APP), second, HOST)}
    assert codes["loads-once"].level == "error"
    assert "OSError: in use (app.py, line 3)" in codes["loads-once"].text


def test_the_exit_status_is_for_ci() -> None:
    ok, warning, error = (Finding(level, "code", "text") for level in ("ok", "warning", "error"))
    assert exit_status([ok], strict=True) == 0
    assert exit_status([ok, warning], strict=False) == 0
    assert exit_status([ok, warning], strict=True) == 1
    assert exit_status([ok, error], strict=False) == 1


def test_the_most_serious_comes_first_in_text_and_json() -> None:
    given = [Finding("ok", "a", "fine"), Finding("note", "b", "so"), Finding("error", "c", "bad\nthing", "mend it")]
    text = as_text("title", given)
    assert text.splitlines()[2:6] == ["error    bad thing", "         -> mend it", "note     so", "ok       fine"]
    shown = json.loads(as_json("app:app", 1, given))
    assert [finding["code"] for finding in shown["findings"]] == ["c", "b", "a"]
    assert shown["exit_status"] == 1
