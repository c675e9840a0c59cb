"""The settings of ``SessionRouting``: each with its meaning, its unit and its default."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from gym_gunicorn.placement import Policy

Routing = Literal["auto", "always", "off"]
Way = Literal["framed", "aiohttp"]
Placed = Literal["local", "balanced"]


def _setting(default: Any, meaning: str, shown: bool = True) -> Any:
    return field(default=default, repr=shown, metadata={"meaning": meaning})


class SettingError(ValueError):
    """A setting has a value that it can't have. The message names both."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What can be set; ``documented`` returns it as a table.

    Raises:
        SettingError: a value is not of the form that its setting asks for.
    """

    routing: Routing = _setting(
        "auto",
        'Whether requests are routed: "auto", where there is more than one worker; "always", with one worker '
        'too, so that SIGTTIN can add more; "off", never.',
    )
    owner_key: str = _setting("gym_worker", "The key under which a session keeps its owner.")
    secret_key: str | None = _setting(
        None,
        "The secret that session cookies are signed with. Only for an app that can't be looked into; "
        "otherwise it is taken from the app's `SessionMiddleware`, as are the next two.",
        shown=False,
    )
    session_cookie: str = _setting("session", "The name of the session cookie. Used only with `secret_key`.")
    max_age: int | None = _setting(
        14 * 24 * 60 * 60, "Seconds for which a session cookie is valid, or `None`. Used only with `secret_key`."
    )
    session_id_key: str | None = _setting(
        None,
        "The session key under which the app keeps a session ID that it puts into tokens of its own. New sessions "
        "then get an ID that names their owner, before the app looks for one.",
    )
    token_header: str | None = _setting(
        None, "The header field in which callers without cookies send a session token. `None`: there is none."
    )
    token_salt: str = _setting("gym-gunicorn-session-token", "The salt that the app signs its session tokens with.")
    token_session_id_key: str = _setting("session_id", "The key under which a session token holds the session ID.")
    token_path: str = _setting(
        "/mcp", "The path below which a session token decides; elsewhere it counts where there is no session cookie."
    )
    local_paths: Sequence[str] = _setting(
        (),
        "Prefixes of paths, by whole segments, that are handled by whichever worker they reach: static files, "
        "a login page.",
    )
    expire_lost_cookie: bool = _setting(
        False,
        "Whether a 410 also expires the session cookie, so that a browser starts over at its next request. "
        "Off, since a program that goes on after a 410 would start over without a word.",
    )
    placement: Placed | Policy = _setting(
        "local",
        'Who takes a request that names no owner, and with it the session that it makes: "local", the worker that it '
        'reached; "balanced", one that has more room; or a function of your own '
        "(`gym_gunicorn.placement.Policy`).",
    )
    placement_paths: Sequence[str] = _setting(
        (),
        "Prefixes of the paths that make sessions, such as `/seed_session`: only requests there are placed. None: all "
        "that name no owner are.",
    )
    forwarder: Way = _setting(
        "framed",
        'How requests travel between workers: "framed", in frames over pooled connections; "aiohttp", as plain HTTP. '
        "An owner of another release, which can't be reached by the first, is reached by the second.",
    )
    max_forwards: int = _setting(
        1000, "How many requests one worker may have in flight to one owner; more get 503 with `Retry-After`."
    )
    health_path: str | None = _setting(
        None,
        "A path that the server answers itself, routed or not, for balancers: 200 while some worker takes new "
        "sessions, 503 when none does. `None`: there is none.",
    )
    metrics_path: str | None = _setting(
        None,
        "A path on which any worker answers with the figures of the whole server in Prometheus' format. Whoever "
        "reaches the server can read them. Only where requests are routed; needs `gym-gunicorn[metrics]`. `None`: "
        "there is none.",
    )
    directory: str = _setting("/tmp", "The folder in which the socket directory is made.")

    def __post_init__(self) -> None:
        if self.routing not in get_args(Routing):
            raise _error("routing", self.routing, 'one of "auto", "always" and "off"')
        if not callable(self.placement) and self.placement not in get_args(Placed):
            raise _error("placement", self.placement, 'one of "local" and "balanced", or a function')
        if self.forwarder not in get_args(Way):
            raise _error("forwarder", self.forwarder, 'one of "framed" and "aiohttp"')
        for name in ("session_id_key", "token_header"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), str):
                raise _error(name, getattr(self, name), "a string, or None")
        for name in ("health_path", "metrics_path"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value.startswith("/")):
                raise _error(name, value, 'a string that begins with "/", or None')
        for name in ("owner_key", "session_cookie", "directory", "token_salt", "token_session_id_key"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise _error(name, getattr(self, name), "a string that is not empty")
        if self.secret_key is not None and (not isinstance(self.secret_key, str) or not self.secret_key):
            raise SettingError("SessionRouting(secret_key=...) must be a string that is not empty, or None")
        if self.max_age is not None and not _is_positive(self.max_age):
            raise _error("max_age", self.max_age, "a number of seconds above 0, or None")
        if not _is_positive(self.max_forwards):
            raise _error("max_forwards", self.max_forwards, "a number above 0")
        if not isinstance(self.expire_lost_cookie, bool):
            raise _error("expire_lost_cookie", self.expire_lost_cookie, "True or False")
        if not isinstance(self.token_path, str) or not self.token_path.startswith("/"):
            raise _error("token_path", self.token_path, 'a string that begins with "/"')
        for name in ("local_paths", "placement_paths"):
            paths = getattr(self, name)
            if (
                isinstance(paths, str)
                or not isinstance(paths, Sequence)
                or not all(isinstance(path, str) and path.startswith("/") for path in paths)
            ):
                raise _error(name, paths, 'a list of strings that begin with "/"')


def documented() -> list[tuple[str, str, str]]:
    """Return name, default and meaning of every setting."""
    return [(item.name, repr(item.default), item.metadata["meaning"]) for item in fields(Settings)]


def _is_positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _error(name: str, value: object, wanted: str) -> SettingError:
    return SettingError(f"SessionRouting({name}={value!r}): must be {wanted}")
