"""Whether a server will start with session routing, whether it will route, and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gym_gunicorn.cli.diagnosis.facts import App, Configuration, HookUse
from gym_gunicorn.cli.diagnosis.findings import Finding

_HOW = (
    "Use `-c python:gym_gunicorn.conf`, begin the configuration with `from gym_gunicorn.conf import *`, or set each "
    "hook to the method of SessionRouting of that name."
)

# Why requests are not routed; "" where they are.
Why = Literal["", "nothing", "setting", "one worker", "app", "no carrier", "broken"]


def why_not(configuration: Configuration, app: App | None) -> Why:
    """Return why a server will not route, or "" where it will; an app that can't be seen is taken to have sessions."""
    routing = configuration.routing
    if routing is None and not configuration.is_routing_worker:
        return "nothing"
    if (
        routing is None
        or not configuration.is_routing_worker
        or {"missing", "lost"} & set(configuration.hooks.values())
    ):
        return "broken"
    if routing.routing == "off":
        return "setting"
    if routing.routing == "auto" and configuration.workers <= 1:
        return "one worker"
    if app is not None and app.declares_no_state:
        return "app"
    if app is not None and not app.cookies and routing.given is None:
        return "no carrier"
    return ""


def keeps_sessions(configuration: Configuration, app: App | None) -> bool:
    """Tell whether a worker that ends takes sessions with it, as far as that is known."""
    if app is None:
        return True
    off = configuration.routing is not None and configuration.routing.routing == "off"
    return not app.declares_no_state and not (off and not app.cookies)


def check_routing(configuration: Configuration, app: App | None) -> Iterator[Finding]:
    """Find what stands between a configuration and routed sessions."""
    why = why_not(configuration, app)
    several = configuration.workers > 1
    stateless = app is not None and app.declares_no_state
    if configuration.worker_class_error:
        yield _broken_worker_class(configuration)
    elif why == "nothing":
        yield _without_us(configuration, stateless)
    if why == "nothing":
        return
    yield from _check_hooks(configuration)
    yield from _check_worker_class(configuration)
    yield from _check_objects(configuration)
    how_many = f"{configuration.workers} worker{'s' if several else ''}"
    if why == "" and app is not None:
        yield Finding(
            "ok",
            "routed",
            f"Routing is on, since there {'are' if several else 'may be more than'} {how_many}.",
        )
        if several and configuration.routing is not None and configuration.routing.placement == "local":
            yield _left_where_they_land()
    elif why == "app":
        yield Finding("ok", "app-keeps-no-state", "Routing is off, since the app says that it keeps no sessions.")
    elif why == "one worker":
        yield Finding(
            "warning",
            "one-worker",
            "Routing is off, since there is one worker. Its sessions name no owner: when it is reloaded or dies they "
            "start over without a word instead of getting 410, and SIGTTIN can't add workers.",
            "Start with two workers or more (-w 2), or set SessionRouting(routing='always').",
        )
    elif why == "setting":
        if several and keeps_sessions(configuration, app):
            yield Finding(
                "error",
                "routing-off",
                f"Routing is off, as SessionRouting(routing='off') says, and there are {how_many}: most requests of a "
                "session reach a worker that has never heard of it.",
                "Leave routing='off' out, or start one worker; an app that keeps no state in memory has nothing to "
                "fear.",
            )
        else:
            yield Finding("ok", "routing-off", "Routing is off, as SessionRouting(routing='off') says.")
    elif why == "no carrier" and several:
        yield Finding(
            "error",
            "no-carrier",
            f"Routing finds nothing to route by: the app has no SessionMiddleware that can be seen. With {how_many}, "
            "requests are served by whichever they reach.",
            "Add SessionMiddleware to the app; or set SessionRouting(secret_key=...) and add SessionStamp inside the "
            "app's own; or, for an app that keeps no state, SessionRouting(routing='off').",
        )
    elif why == "no carrier":
        yield Finding(
            "warning", "no-carrier", "Routing finds nothing to route by: the app has no SessionMiddleware to be seen."
        )


def _left_where_they_land() -> Finding:
    return Finding(
        "note",
        "placement-local",
        "New sessions belong to the worker that accepts their connection, and fall unevenly: callers that share few "
        "kept-alive connections may make most of them on one worker.",
        'SessionRouting(placement="balanced") sends each to a worker with room; `gym-gunicorn status` says how uneven '
        "they are.",
    )


def _broken_worker_class(configuration: Configuration) -> Finding:
    return Finding(
        "error",
        "worker-class-broken",
        f"The server will not start: the worker class {configuration.worker_class!r} can't be loaded: "
        f"{configuration.worker_class_error}",
        'Set worker_class = "gym_gunicorn.RoutingWorker", and leave out -k.',
    )


def _without_us(configuration: Configuration, stateless: bool) -> Finding:
    if configuration.workers > 1 and not stateless:
        return Finding(
            "error",
            "not-configured",
            f"Nothing of gym-gunicorn is in this configuration (worker class {configuration.worker_class!r}), and it "
            f"has {configuration.workers} workers: most requests of a session reach one that has never heard of it.",
            _HOW,
        )
    return Finding(
        "warning",
        "not-configured",
        f"Nothing of gym-gunicorn is in this configuration (worker class {configuration.worker_class!r}).",
        _HOW,
    )


def _check_hooks(configuration: Configuration) -> Iterator[Finding]:
    missing, lost, unknown = (_named(configuration, use) for use in ("missing", "lost", "unknown"))
    if missing:
        yield Finding(
            "error",
            "hooks-missing",
            f"The server will not start: session routing needs the hooks {missing}, which are not set.",
            _HOW,
        )
    if lost:
        yield Finding(
            "error",
            "hooks-lost",
            f"The configuration has hooks of its own that do not call those of SessionRouting: {lost}. What they do "
            "is left out, and sessions are lost.",
            "Call ours from yours: `def post_worker_init(worker): routing.post_worker_init(worker)`, and so for each.",
        )
    if unknown:
        yield Finding(
            "warning",
            "hooks-unknown",
            f"Whether these hooks of the configuration's own call those of SessionRouting can't be told: {unknown}.",
            "See to it that each calls the method of SessionRouting of its name, with the arguments it has.",
        )


def _check_worker_class(configuration: Configuration) -> Iterator[Finding]:
    if not configuration.is_routing_worker and not configuration.worker_class_error:
        yield Finding(
            "error",
            "worker-class",
            f"The server will not start: it has the hooks of session routing, and the worker class "
            f"{configuration.worker_class!r}, which routes nothing.",
            'Set worker_class = "gym_gunicorn.RoutingWorker" or one derived from it, and leave out -k.',
        )


def _check_objects(configuration: Configuration) -> Iterator[Finding]:
    remedy = (
        "Make one SessionRouting and set all hooks from it: "
        "`globals().update({name: getattr(routing, name) for name in SessionRouting.HOOKS})`."
    )
    if configuration.routings > 1:
        yield Finding(
            "error",
            "several-routings",
            f"The hooks belong to {configuration.routings} different SessionRouting objects, whose settings differ.",
            remedy,
        )
    elif configuration.unused_routings and configuration.routing is not None:
        names = ", ".join(configuration.unused_routings)
        yield Finding(
            "error",
            "settings-unused",
            f"No hook uses the SessionRouting that the configuration makes as {names}: its settings are not in force.",
            remedy,
        )


def _named(configuration: Configuration, wanted: HookUse) -> str:
    return ", ".join(name for name, use in configuration.hooks.items() if use == wanted)
