"""What is to be known of an app's sessions: carriers, secrets, and cookies that do not come back."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from gym_gunicorn.cli.diagnosis.facts import App, Configuration, Cookie
from gym_gunicorn.cli.diagnosis.findings import Finding

_ONE_SECRET = (
    "Give SessionMiddleware one secret for all workers, kept outside the code: "
    "secret_key=os.environ['SESSION_SECRET'], and not secrets.token_hex() in each."
)


def check_sessions(configuration: Configuration, app: App, again: App | None) -> Iterator[Finding]:
    """Find what there is to say of the sessions of ``app``; ``again`` is the same app in a second process."""
    if app.kind == "wsgi":
        yield Finding(
            "error",
            "wsgi-app",
            "The app is a WSGI app, and session routing serves ASGI apps: each request will fail.",
            "Serve an ASGI app (Starlette, FastAPI), or wrap this one: a2wsgi.WSGIMiddleware(app).",
        )
    if app.declares_no_state:
        return
    yield from _carriers(configuration, app)
    yield from _secrets(configuration, app, again)
    yield from _given(configuration, app)
    yield from _several(app)
    for cookie in app.cookies or _given_cookies(configuration):
        yield from _attributes(configuration, cookie)


def _given_cookies(configuration: Configuration) -> list[Cookie]:
    routing = configuration.routing
    return [routing.given] if routing is not None and routing.given is not None else []


def _carriers(configuration: Configuration, app: App) -> Iterator[Finding]:
    given = _given_cookies(configuration)
    for cookie in given or app.cookies:
        lasts = "for ever" if cookie.max_age is None else f"for {_duration(cookie.max_age)}"
        where = "" if not cookie.mount else f" below {cookie.mount}"
        source = "as SessionRouting(secret_key=...) says" if given else "of the app's SessionMiddleware"
        yield Finding("ok", "carrier-cookie", f"Carrier: the cookie {cookie.name!r}{where} {source}, valid {lasts}.")
    routing = configuration.routing
    settings = routing is not None and routing.token_header is not None
    header = routing.token_header if routing is not None and settings else app.token_header
    path = routing.token_path if routing is not None and settings else app.token_path
    if header is not None:
        yield Finding(
            "ok",
            "carrier-token",
            f"Carrier: the token in the field {header!r}, which decides below {path}; elsewhere it counts where there "
            "is no session cookie.",
        )


def _secrets(configuration: Configuration, app: App, again: App | None) -> Iterator[Finding]:
    if again is not None and _signed(app.cookies) != _signed(again.cookies):
        if configuration.workers > 1 and not configuration.preload_app:
            yield Finding(
                "error",
                "secret-random",
                "Each process that loads the app signs its sessions with another secret: no worker can read what "
                "another wrote, so sessions start over without a word.",
                _ONE_SECRET,
            )
        else:
            yield Finding(
                "warning",
                "secret-random",
                "The app signs its sessions with another secret each time it is loaded: after a restart callers start "
                "over without a word, where they would get 410.",
                _ONE_SECRET,
            )
    weak = {cookie.weakness for cookie in app.cookies or _given_cookies(configuration)}
    if "default" in weak:
        yield Finding(
            "warning",
            "secret-default",
            "A session secret is one that examples have: whoever guesses it can write sessions of anybody.",
            "Make one with `python -c 'import secrets; print(secrets.token_hex())'`, and give it to the app from "
            "outside its code. With a restart, since sessions signed with the old one can't be read any more.",
        )
    elif "short" in weak:
        yield Finding(
            "warning",
            "secret-short",
            "A session secret is short or monotonous enough to be tried out by whoever has one cookie.",
            "Make one with `python -c 'import secrets; print(secrets.token_hex())'`.",
        )


def _signed(cookies: list[Cookie]) -> list[int]:
    return sorted(cookie.fingerprint for cookie in cookies)


def _given(configuration: Configuration, app: App) -> Iterator[Finding]:
    for given in _given_cookies(configuration):
        if not app.cookies:
            yield Finding(
                "note",
                "stamp-unseen",
                "The app can't be looked into: whether it has gym_gunicorn.SessionStamp inside its session middleware, "
                "without which no session names an owner, can't be told.",
            )
        elif all(cookie.fingerprint != given.fingerprint for cookie in app.cookies):
            yield Finding(
                "error",
                "secret-differs",
                "SessionRouting(secret_key=..., session_cookie=...) has another secret or cookie name than the app's "
                "SessionMiddleware: no session's owner can be read, and nothing is routed.",
                "Leave both out, since the app's own can be seen.",
            )
        elif all(cookie.max_age != given.max_age for cookie in app.cookies):
            yield Finding(
                "warning",
                "max-age-differs",
                "SessionRouting(max_age=...) is not that of the app's SessionMiddleware: the two disagree on when a "
                "session has expired.",
                "Leave secret_key, session_cookie and max_age out, since the app's own can be seen.",
            )


def _several(app: App) -> Iterator[Finding]:
    if app.nested:
        yield Finding(
            "warning",
            "sessions-nested",
            f"Session middlewares stand around one another in the app ({_list(app.nested)}): handlers see the "
            "innermost session, and the outer cookies repeat it.",
            "Keep one SessionMiddleware.",
        )
    pairs = list(combinations(app.cookies, 2))
    same = sorted({one.name for one, other in pairs if one.name == other.name})
    if same:
        differ = any(one.name == other.name and one.fingerprint != other.fingerprint for one, other in pairs)
        yield Finding(
            "error" if differ else "warning",
            "cookie-name-twice",
            f"Two session middlewares have one cookie name ({_list(same)})"
            + (
                " and different secrets: each takes the other's cookie for none, and overwrites it."
                if differ
                else ": what one writes, the other reads and overwrites."
            ),
            "Give them different session_cookie names, or keep one.",
        )
    mounted = [cookie for cookie in app.cookies if cookie.mount]
    if mounted and len(app.cookies) > 1:
        places = _list(sorted({cookie.mount for cookie in mounted}))
        yield Finding(
            "warning",
            "sessions-mounted",
            f"There is more than one SessionMiddleware, and apps mounted at {places} have their own: a caller has "
            "a session, and an owner, for each; around a mounted one, the outer cookie repeats the inner session.",
            "Keep one SessionMiddleware, in the outermost app, if the sessions are to be one.",
        )


def _attributes(configuration: Configuration, cookie: Cookie) -> Iterator[Finding]:
    """Find why clients will not send a cookie back: they then start a new session with each request."""
    behind_socket = all(address.startswith("unix:") for address in configuration.bind)
    if cookie.is_secure and not configuration.is_tls:
        yield Finding(
            "note" if behind_socket else "warning",
            "cookie-secure",
            f"The cookie {cookie.name!r} is for https only, and this server speaks plain http: a caller that reaches "
            "it without a TLS proxy does not send the cookie back, and starts a new session with each request.",
            "Serve https (--certfile, --keyfile, or a proxy that all callers go through), or set https_only=False.",
        )
    if cookie.same_site == "none" and not cookie.is_secure:
        yield Finding(
            "warning",
            "cookie-same-site",
            f"The cookie {cookie.name!r} has SameSite=None without Secure: browsers drop it.",
            "Set https_only=True with it, or same_site='lax'.",
        )
    if cookie.name.startswith(("__Secure-", "__Host-")) and (
        not cookie.is_secure or (cookie.name.startswith("__Host-") and (cookie.path != "/" or cookie.domain))
    ):
        yield Finding(
            "warning",
            "cookie-prefix",
            f"The name {cookie.name!r} promises what the cookie does not keep: browsers drop it.",
            "__Secure- needs https_only=True; __Host- that, path='/' and no domain.",
        )
    if cookie.same_site == "strict":
        yield Finding(
            "note",
            "cookie-strict",
            f"The cookie {cookie.name!r} has SameSite=Strict: a browser that comes by a link from another site does "
            "not send it with its first request, which then belongs to no session.",
        )
    if cookie.domain:
        yield Finding(
            "note",
            "cookie-domain",
            f"The cookie {cookie.name!r} is for the domain {cookie.domain}: callers that use another name, or an IP "
            "address, drop it.",
        )
    if cookie.path != "/":
        yield Finding(
            "note",
            "cookie-path",
            f"The cookie {cookie.name!r} is sent below {cookie.path} only: other requests belong to no session.",
        )


def _list(names: list[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _duration(seconds: int) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length and seconds % length == 0:
            count = seconds // length
            return f"{count} {unit}{'s' if count != 1 else ''}"
    return f"{seconds} seconds"
