"""What the doctor sees of a machine and of an app."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.sessions import SessionMiddleware
from starlette.routing import Mount
from starlette.types import ASGIApp

from gym_gunicorn.cli.diagnosis.app_facts import app_facts, weakness
from gym_gunicorn.cli.diagnosis.host import folder_facts, place
from gym_gunicorn.cli.diagnosis.versions import meets, unsupported
from gym_gunicorn.sessions.discovery import Declaration

SECRET = "9f86d081884c7d659a2feaa0c55ad015"


def sessions(secret: str = SECRET, **options: Any) -> Middleware:
    return Middleware(SessionMiddleware, secret_key=secret, **options)


def test_a_cookie_is_described() -> None:
    app = Starlette(middleware=[sessions(session_cookie="mine", max_age=60, same_site="none", https_only=True)])
    (cookie,) = app_facts(app).cookies
    assert (cookie.name, cookie.max_age, cookie.same_site, cookie.is_secure) == ("mine", 60, "none", True)
    assert (cookie.mount, cookie.path, cookie.domain, cookie.weakness) == ("", "/", "", "")


def test_no_secret_is_in_the_facts() -> None:
    assert SECRET not in repr(app_facts(Starlette(middleware=[sessions()])))


def test_fingerprints_differ_with_secret_and_name() -> None:
    apps = [
        Starlette(middleware=[sessions()]),
        Starlette(middleware=[sessions("another")]),
        Starlette(middleware=[sessions(session_cookie="another")]),
    ]
    assert len({app_facts(app).cookies[0].fingerprint for app in apps}) == 3


def test_session_middlewares_of_mounted_apps_are_found() -> None:
    inner = Starlette(middleware=[sessions(session_cookie="inner")])
    app = Starlette(routes=[Mount("/sub", inner)], middleware=[sessions()])
    assert [(cookie.name, cookie.mount) for cookie in app_facts(app).cookies] == [("inner", "/sub"), ("session", "")]
    assert app_facts(app).nested == []


def test_session_middlewares_around_one_another_are_found() -> None:
    app = Starlette(middleware=[sessions(session_cookie="outer"), sessions(session_cookie="inner")])
    assert app_facts(app).nested == ["inner", "outer"]
    wrapped: ASGIApp = SessionMiddleware(SessionMiddleware(Starlette(), SECRET, "b"), SECRET, "a")
    assert app_facts(wrapped).nested == ["a", "b"]


def test_what_an_app_says_of_itself_is_seen() -> None:
    app = Starlette(middleware=[sessions()])
    assert not app_facts(app).declares_no_state
    app.state.gym_gunicorn = Declaration(routed=False)
    assert app_facts(app).declares_no_state
    app.state.gym_gunicorn = Declaration(token_header="X-Token", token_path="/tools")
    assert (app_facts(app).token_header, app_facts(app).token_path) == ("X-Token", "/tools")


def test_websocket_routes_are_seen_in_mounted_apps_too() -> None:
    inner = FastAPI()

    @inner.websocket("/ws")
    async def talk(websocket: WebSocket) -> None:
        await asyncio.sleep(0)

    assert app_facts(Starlette(routes=[Mount("/sub", inner)])).websockets
    assert not app_facts(Starlette(routes=[Mount("/sub", Starlette())])).websockets


def test_a_wsgi_app_is_told_from_an_asgi_app() -> None:
    def wsgi(environ: Any, start_response: Any) -> list[bytes]:
        return []

    app: Any = wsgi
    assert app_facts(app).kind == "wsgi"
    assert app_facts(Starlette()).kind == "asgi"


@pytest.mark.parametrize(
    ("secret", "expected"),
    [
        ("change-me", "default"),
        ("CHANGE_ME", "default"),
        ("secret", "default"),
        ("", "default"),
        ("hunter2", "short"),
        ("a" * 40, "short"),
        (SECRET, ""),
    ],
)
def test_weak_secrets_are_known(secret: str, expected: str) -> None:
    assert weakness(secret.encode()) == expected


def test_a_folder_is_described(tmp_path: Path) -> None:
    folder = folder_facts("/tmp", 0, 0)
    assert folder.trouble == ""
    # "/tmp/gym-gunicorn-" with 8 characters, "/", an owner ID of 12 and ".sock".
    assert folder.longest == len("/tmp/gym-gunicorn-") + 8 + 1 + 12 + 5
    assert folder.free


def test_a_folder_that_is_missing_or_a_file_is_described(tmp_path: Path) -> None:
    assert folder_facts(str(tmp_path / "nowhere"), 0, 0).trouble == "No such file or directory"
    (tmp_path / "file").touch()
    assert folder_facts(str(tmp_path / "file"), 0, 0).trouble == "it is not a folder"


def test_a_folder_that_the_workers_cannot_enter_is_told(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "inner").mkdir(parents=True)
    for folder in (closed, *closed.parents[:2]):
        folder.chmod(0o755)
    uid, gid = closed.stat().st_uid + 12345, closed.stat().st_gid
    closed.chmod(0o700)
    assert folder_facts(str(closed / "inner"), uid, gid + 1).closed_to_uid


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("127.0.0.1:8000", "8000"),
        ("http://127.0.0.1:8000", "8000"),
        ("http://[::1]:8080", "8080"),
        ("localhost", "8000"),
        ("unix:/run/app.sock", "/run/app.sock"),
        ("fd://3", "fd://3"),
    ],
)
def test_addresses_are_compared_by_port_or_path(address: str, expected: str) -> None:
    assert place(address) == expected


@pytest.mark.parametrize(
    ("version", "compare", "bound", "expected"),
    [
        ("27.0.1", ">=", "27.0.1", True),
        ("27.0.0", ">=", "27.0.1", False),
        ("28.0.0rc1", "<", "28", False),
        ("27.10", "<", "28", True),
        ("28", "==", "28.0.0", True),
        ("0.54.0", "<", "0.55", True),
    ],
)
def test_versions_are_compared(version: str, compare: str, bound: str, expected: bool) -> None:
    assert meets(version, compare, bound) is expected


def test_unsupported_versions_are_named() -> None:
    assert unsupported(["gunicorn>=9999", "starlette<1,>=0.1", "itsdangerous>=2"]) == [
        f"gunicorn {installed('gunicorn')} (>=9999 is supported)",
        f"starlette {installed('starlette')} (>=0.1 and <1 is supported)",
    ]


def test_what_is_needed_under_a_condition_is_not_missed() -> None:
    assert unsupported(["no-such-package>=1; extra == 'gym'", "no-such-package>=1"]) == [
        "no-such-package is not installed"
    ]


def installed(name: str) -> str:
    from importlib.metadata import version

    return version(name)
