"""All findings that follow from the facts."""

from __future__ import annotations

from collections.abc import Iterator

from gym_gunicorn.cli.diagnosis.checks_gunicorn import check_gunicorn
from gym_gunicorn.cli.diagnosis.checks_host import check_host, check_neighbours, check_sockets
from gym_gunicorn.cli.diagnosis.checks_routing import check_routing, keeps_sessions, why_not
from gym_gunicorn.cli.diagnosis.checks_sessions import check_sessions
from gym_gunicorn.cli.diagnosis.facts import Failure, Host, Inspection
from gym_gunicorn.cli.diagnosis.findings import Finding

_WHAT = {
    "configuration": "The configuration can't be loaded",
    "application": "The app can't be loaded",
    "inspection": "Session routing can't be set up for this app",
}


def findings(first: Inspection, second: Inspection | None, host: Host | None) -> Iterator[Finding]:
    """Yield what is to be said of what two processes have loaded, and of the host that they are on.

    ``second`` is ``None`` where the first could not load the app, and ``host`` where it
    could not load the configuration.
    """
    if first.failure is not None:
        yield failed(first.failure)
    elif second is not None and second.failure is not None:
        again = failed(second.failure)
        yield Finding(
            "error",
            "loads-once",
            f"The app was loaded by one process, and not by a second, as each worker does. {again.text}",
            again.remedy,
        )
    configuration, app = first.configuration, first.app
    if configuration is None or host is None:
        return
    yield from check_routing(configuration, app)
    if app is not None:
        yield from check_sessions(configuration, app, None if second is None else second.app)
    yield from check_gunicorn(configuration, host, keeps_sessions(configuration, app))
    yield from check_host(configuration, host, app)
    if why_not(configuration, app) in ("", "broken"):
        yield from check_sockets(configuration, host)
        cookies = list(app.cookies) if app is not None else []
        if configuration.routing is not None and configuration.routing.given is not None:
            cookies.append(configuration.routing.given)
        yield from check_neighbours(host, {cookie.fingerprint for cookie in cookies})


def failed(failure: Failure) -> Finding:
    """Return the finding for what could not be loaded."""
    place = f" ({failure.place})" if failure.place else ""
    return Finding(
        "error",
        f"{failure.stage}-broken",
        f"{_WHAT[failure.stage]}: {failure.text}{place}",
        "`gunicorn --check-config` with the same arguments shows all that Python says of it.",
    )
