"""What gunicorn's own settings mean for sessions that live in a worker's memory."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from gym_gunicorn.cli.diagnosis.facts import Configuration, Host
from gym_gunicorn.cli.diagnosis.findings import Finding

# Seconds. gunicorn's default is 30 for both.
_SHORT = 10


def check_gunicorn(configuration: Configuration, host: Host, keeps_sessions: bool) -> Iterator[Finding]:
    """Find what gunicorn's settings will cost; ``keeps_sessions``: a worker that ends takes sessions with it."""
    if keeps_sessions:
        yield from _check_ends(configuration)
    yield from _check_times(configuration)
    yield from _check_listening(configuration)
    yield from _check_user(configuration, host)
    if configuration.statsd_error:
        yield Finding(
            "warning",
            "statsd",
            f"statsd_host={configuration.statsd!r} can't be reached ({configuration.statsd_error}): gunicorn drops "
            "all figures without a word.",
            "Correct it, or start the statsd server first.",
        )


def _check_ends(configuration: Configuration) -> Iterator[Finding]:
    if configuration.max_requests:
        yield Finding(
            "error",
            "max-requests",
            f"max_requests={configuration.max_requests}: each worker is replaced after so many requests, and all "
            "sessions that it holds end then.",
            "Leave max_requests out; where a leak must be bounded, reload at a time when no sessions are open.",
        )
    if configuration.reload:
        yield Finding(
            "warning",
            "reload",
            "reload: each change of a source file replaces the workers, and ends all sessions.",
            "Leave it to development.",
        )
    if configuration.preload_app:
        yield Finding(
            "note",
            "preload-app",
            "preload_app: the app is loaded once, in the arbiter. A reload (SIGHUP) ends the workers' sessions without "
            "loading new code, threads and connections that the app starts at import are not there in the workers, "
            "and what it draws at random then is the same in all.",
        )


def _check_times(configuration: Configuration) -> Iterator[Finding]:
    timeout, graceful = configuration.timeout, configuration.graceful_timeout
    if timeout == 0:
        yield Finding(
            "warning",
            "timeout",
            "timeout=0: a worker that hangs is never replaced, and callers whose sessions it holds wait for ever.",
            "Set a timeout above the longest time for which a handler holds up its event loop.",
        )
    elif timeout < _SHORT:
        yield Finding(
            "warning",
            "timeout",
            f"timeout={timeout}: a worker whose event loop is held up for so long, by a handler that computes or "
            "blocks, is killed with all sessions that it holds. A handler that awaits may take as long as it likes.",
            "Set it above the longest time for which a handler holds up its event loop; gunicorn's default is 30.",
        )
    if graceful < _SHORT:
        yield Finding(
            "warning",
            "graceful-timeout",
            f"graceful_timeout={graceful}: at a reload and at the end, requests in progress that take longer are cut.",
            "Set it above the time that the longest request takes; gunicorn's default is 30.",
        )
    yield Finding(
        "ok",
        "times",
        f"A worker is killed when its event loop is held up for {timeout} s (timeout); " * bool(timeout)
        + f"a stopping one has {graceful} s for the requests in progress (graceful_timeout).",
    )


def _check_listening(configuration: Configuration) -> Iterator[Finding]:
    if configuration.reuse_port:
        yield Finding(
            "warning",
            "reuse-port",
            "reuse_port: the kernel resets connections that wait for a worker which closes its listener, so a reload "
            "can lose new connections; and SIGUSR2 does not work with it (gunicorn 27).",
            "Leave it out: workers share one listener then.",
        )
    if "*" in configuration.forwarded_allow_ips and not all(map(_is_local, configuration.bind)):
        yield Finding(
            "warning",
            "forwarded-allow-ips",
            "forwarded_allow_ips='*' on an address that others can reach: any caller can say that it comes from "
            "another address, or by https.",
            "Name the proxies' addresses.",
        )
    if configuration.umask & 0o077 and any(address.startswith("unix:") for address in configuration.bind):
        yield Finding(
            "note",
            "umask",
            f"umask={configuration.umask:#o} hides the listening Unix socket from other users: a proxy must be this "
            "user's. Private sockets do not depend on it.",
        )


def _check_user(configuration: Configuration, host: Host) -> Iterator[Finding]:
    if configuration.uid == host.euid:
        return
    if host.euid != 0:
        yield Finding(
            "error",
            "user",
            f"The server will not start: user={configuration.uid} is set, and only root can change the user.",
            "Leave user out, or start it as root.",
        )
    else:
        yield Finding(
            "note",
            "user",
            f"Workers run as user {configuration.uid}: their socket directory is that user's, who, beside root, alone "
            "can see them with `gym-gunicorn status`.",
        )


def _is_local(address: str) -> bool:
    """Tell whether an address is one that callers on this host alone can reach."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].removeprefix("tcp://").strip("[]") or address
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
