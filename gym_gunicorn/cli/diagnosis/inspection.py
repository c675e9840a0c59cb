"""The program that loads what gunicorn would load, in a process of its own, and writes down what it found.

``python -P -m gym_gunicorn.cli.diagnosis.inspection DESCRIPTOR ARGUMENT...``: the
arguments are gunicorn's own. Nothing is started, bound or made.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import socket
import sys
from dataclasses import asdict
from typing import Any, cast

from gunicorn.app.wsgiapp import WSGIApplication
from gunicorn.config import Config
from starlette.types import ASGIApp

from gym_gunicorn.cli.diagnosis.app_facts import app_facts, cookie_facts
from gym_gunicorn.cli.diagnosis.facts import Configuration, Failure, Inspection, Routing
from gym_gunicorn.cli.diagnosis.hook_calls import Hooks
from gym_gunicorn.cli.diagnosis.scrub import environment_secrets, failure_of, mask_values
from gym_gunicorn.lifecycle.arbiter import placement_name
from gym_gunicorn.lifecycle.hooks import SessionRouting
from gym_gunicorn.lifecycle.worker import RoutingWorker
from gym_gunicorn.sessions.discovery import session_middleware


class _Application(WSGIApplication):
    """gunicorn's own application, which lets errors out and keeps what configuration files define."""

    variables: dict[str, Any]

    def do_load_config(self) -> None:
        self.variables = {}
        self.load_default_config()
        self.load_config()
        self.cfg.validate()

    def load_config_from_module_name_or_filename(self, location: str) -> Any:
        self.variables = super().load_config_from_module_name_or_filename(location)
        return self.variables

    def prepare(self) -> None:
        """Do what comes before the app is loaded: environment and import path, as gunicorn's arbiter and ``run`` do."""
        os.environ.update(self.cfg.env)
        for path in (self.cfg.pythonpath or "").split(","):
            if path and os.path.abspath(path) not in sys.path:
                sys.path.insert(0, os.path.abspath(path))


def inspect(arguments: list[str]) -> Inspection:
    """Load configuration and app for gunicorn's ``arguments``, and return what was found."""
    sys.argv = ["gunicorn", *arguments]
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            application = _Application("%(prog)s [OPTIONS] [APP_MODULE]", prog="gunicorn")
    except BaseException as error:  # whatever it is, it is to be reported
        return Inspection(failure=_configuration_failure(error, said.getvalue()))
    try:
        configuration = _configuration(application)
    except BaseException as error:
        return Inspection(failure=failure_of("configuration", error))
    try:
        application.prepare()
        # What it is, is looked at first.
        app = cast(ASGIApp, application.wsgi())
    except BaseException as error:
        return Inspection(configuration, failure=failure_of("application", error))
    try:
        return Inspection(configuration, app_facts(app))
    except BaseException as error:
        return Inspection(configuration, failure=failure_of("inspection", error))


def _configuration_failure(error: BaseException, said: str) -> Failure:
    """Return why the configuration can't be loaded; argparse tells of bad arguments only on standard error."""
    complaint = re.search(r"^gunicorn: error: (.*)", said, re.MULTILINE)
    if isinstance(error, SystemExit) and error.code == 2 and complaint is not None:
        return Failure("configuration", mask_values(complaint[1], set(environment_secrets())))
    return failure_of("configuration", error)


def _configuration(application: _Application) -> Configuration:
    cfg = application.cfg
    hooks = Hooks(cfg)
    worker_class, worker_class_error = None, ""
    try:
        worker_class = cfg.worker_class
    except BaseException as error:
        worker_class_error = failure_of("configuration", error).text
    statsd, statsd_error = _statsd(cfg)
    routings = hooks.routings
    return Configuration(
        app=application.app_uri or "",
        workers=cfg.workers,
        worker_class=cfg.worker_class_str,
        worker_class_error=worker_class_error,
        is_routing_worker=isinstance(worker_class, type) and issubclass(worker_class, RoutingWorker),
        hooks=hooks.uses,
        routing=_routing(routings[0]) if routings else None,
        routings=len(routings),
        unused_routings=[
            name
            for name, value in application.variables.items()
            if isinstance(value, SessionRouting) and not any(value is routing for routing in routings)
        ],
        timeout=cfg.timeout,
        graceful_timeout=cfg.graceful_timeout,
        max_requests=cfg.max_requests,
        preload_app=bool(cfg.preload_app),
        reload=bool(cfg.reload),
        reuse_port=bool(cfg.reuse_port),
        uid=cfg.uid,
        gid=cfg.gid,
        umask=cfg.umask,
        is_tls=bool(cfg.is_ssl),
        bind=[str(address) for address in cfg.settings["bind"].get()],
        forwarded_allow_ips=[str(address) for address in cfg.forwarded_allow_ips],
        statsd=statsd,
        statsd_error=statsd_error,
    )


def _routing(routing: SessionRouting) -> Routing:
    settings = routing.settings
    given = None
    if settings.secret_key is not None:
        given = cookie_facts(session_middleware(settings.secret_key, settings.session_cookie, settings.max_age))
    return Routing(
        routing=settings.routing,
        directory=os.path.abspath(settings.directory),
        max_forwards=settings.max_forwards,
        token_header=settings.token_header,
        token_path=settings.token_path,
        metrics=settings.metrics_path is not None,
        placement=placement_name(settings),
        given=given,
    )


def _statsd(cfg: Config) -> tuple[str, str]:
    """Return where figures are sent for statsd, and why they can't get there; gunicorn says nothing then."""
    address = cfg.statsd_host
    if not address:
        return "", ""
    try:
        if isinstance(address, str):
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
            return address, ""
        host, port = address[:2]
        socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
        return f"{host}:{port}", ""
    except OSError as error:
        shown = address if isinstance(address, str) else ":".join(str(part) for part in address[:2])
        return shown, error.strerror or str(error)


def main() -> None:
    """Write what was found to the descriptor that the first argument names, and end at once."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    found = inspect(sys.argv[2:])
    with open(descriptor, "w", encoding="utf-8") as report:
        json.dump(asdict(found), report)
    # Without what the app would have run at its end, and whatever threads it has started.
    os._exit(0)


if __name__ == "__main__":
    main()
