"""The facts that the doctor judges by. None of them holds a secret."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

# How a server hook that a configuration sets stands to ours of the same name.
#   ours: it is the method of SessionRouting; calls: a user's own, which calls it;
#   missing: gunicorn's default; lost: a user's own that does not call ours; unknown: it can't be told.
HookUse = Literal["ours", "calls", "missing", "lost", "unknown"]

Stage = Literal["configuration", "application", "inspection"]


@dataclass(frozen=True, slots=True)
class Failure:
    """Why something could not be loaded. ``text`` is safe to show; ``place`` is a file and a line, or empty."""

    stage: Stage
    text: str
    place: str = ""


@dataclass(frozen=True, slots=True)
class Cookie:
    """A session cookie: that of one session middleware.

    ``mount``: the path or host below which it counts, "" for the whole app. ``path``,
    ``flags``: the cookie's attributes. ``fingerprint``: of secret and name (never shown).
    ``weakness``: "default" for a secret that is in everybody's examples, "short" for one
    that can be guessed, "" otherwise.
    """

    name: str
    max_age: int | None
    fingerprint: int
    weakness: str = ""
    mount: str = ""
    path: str = "/"
    flags: str = ""

    @property
    def is_secure(self) -> bool:
        return "secure" in self._attributes()

    @property
    def same_site(self) -> str:
        return self._attributes().get("samesite", "")

    @property
    def domain(self) -> str:
        return self._attributes().get("domain", "")

    def _attributes(self) -> dict[str, str]:
        parts = (part.strip().partition("=") for part in self.flags.split(";"))
        return {name.lower(): value.lower() for name, _, value in parts if name}


@dataclass(frozen=True, slots=True)
class Routing:
    """The settings of the ``SessionRouting`` in force.

    ``metrics``: whether a path for them is set. ``placement``: "local", "balanced" or "own".
    ``given``: the cookie that ``secret_key`` describes.
    """

    routing: str = "auto"
    directory: str = "/tmp"
    max_forwards: int = 1000
    token_header: str | None = None
    token_path: str = "/mcp"
    metrics: bool = False
    placement: str = "local"
    given: Cookie | None = None


@dataclass(frozen=True, slots=True)
class App:
    """What is to be seen of a loaded app.

    ``declares_no_state``: it says itself that its requests need not be routed.
    ``nested``: names of cookies whose middlewares stand around one another.
    ``kind``: "asgi", or "wsgi" for one that no ASGI server can call.
    """

    cookies: list[Cookie] = field(default_factory=list)
    nested: list[str] = field(default_factory=list)
    declares_no_state: bool = False
    token_header: str | None = None
    token_path: str = "/mcp"
    websockets: bool = False
    kind: Literal["asgi", "wsgi"] = "asgi"


@dataclass(frozen=True, slots=True)
class Configuration:
    """What gunicorn's configuration comes to, command line and environment included.

    ``worker_class_error``: why the worker class can't be loaded. ``is_routing_worker``:
    whether it is ours or derived from it. ``routing``: ``None`` where nothing of ours is
    set. ``routings``: how many different ``SessionRouting`` the hooks belong to.
    ``unused_routings``: names under which the configuration has others, which no hook uses.
    """

    app: str = ""
    workers: int = 4
    worker_class: str = "gym_gunicorn.RoutingWorker"
    worker_class_error: str = ""
    is_routing_worker: bool = True
    hooks: dict[str, HookUse] = field(default_factory=dict)
    routing: Routing | None = field(default_factory=Routing)
    routings: int = 1
    unused_routings: list[str] = field(default_factory=list)
    timeout: int = 30
    graceful_timeout: int = 30
    max_requests: int = 0
    preload_app: bool = False
    reload: bool = False
    reuse_port: bool = False
    uid: int = 0
    gid: int = 0
    umask: int = 0
    is_tls: bool = False
    bind: list[str] = field(default_factory=lambda: ["127.0.0.1:8000"])
    forwarded_allow_ips: list[str] = field(default_factory=lambda: ["127.0.0.1", "::1"])
    statsd: str = ""
    statsd_error: str = ""


@dataclass(frozen=True, slots=True)
class Inspection:
    """What one process found that loaded configuration and app."""

    configuration: Configuration | None = None
    app: App | None = None
    failure: Failure | None = None


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder in which the socket directory is to be made.

    ``mode`` and ``uid`` are the folder's. ``trouble``: why it can't be used, or "".
    ``longest``: bytes of a private socket's path there. ``closed_to_uid``: a folder on the
    way to it that the workers' user can't enter, or "". ``free``: bytes that this user may
    still write there, or ``None`` where that is not told; ``free_files``: how many more files.
    """

    path: str = "/tmp"
    trouble: str = ""
    longest: int = 0
    mode: int = 0o1777
    uid: int = 0
    closed_to_uid: str = ""
    free: int | None = None
    free_files: int | None = None


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A running server of this user that signs sessions as this one will.

    ``same_address``: it listens where this one is to listen (it is this server, then);
    ``None`` where that can't be told.
    """

    pid: int
    directory: str
    fingerprint: int
    same_address: bool | None = None


@dataclass(frozen=True, slots=True)
class Host:
    """What is to be known of the machine and the installed packages."""

    platform: str = "linux"
    euid: int = 0
    descriptors: int = 20000
    folder: Folder | None = None
    neighbours: list[Neighbour] = field(default_factory=list)
    unsupported: list[str] = field(default_factory=list)
    websockets: bool = True
    prometheus: bool = True


def inspection_from(data: dict[str, Any]) -> Inspection:
    """Return what ``dataclasses.asdict`` has made of an ``Inspection``."""
    configuration, app, failure = data["configuration"], data["app"], data["failure"]
    if configuration is not None:
        routing = configuration["routing"]
        if routing is not None:
            routing = Routing(**{**routing, "given": _cookie_from(routing["given"])})
        configuration = Configuration(**{**configuration, "routing": routing})
    if app is not None:
        app = App(**{**app, "cookies": [Cookie(**cookie) for cookie in app["cookies"]]})
    return Inspection(configuration, app, None if failure is None else Failure(**failure))


def _cookie_from(data: dict[str, Any] | None) -> Cookie | None:
    return None if data is None else Cookie(**data)
