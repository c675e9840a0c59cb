"""``gym-gunicorn doctor``: loads what gunicorn would load, and says what it will do and what it will cost."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from gunicorn.config import make_settings

from gym_gunicorn.cli.diagnosis.checks import findings
from gym_gunicorn.cli.diagnosis.findings import Finding, as_json, as_text, exit_status
from gym_gunicorn.cli.diagnosis.host import host_facts
from gym_gunicorn.cli.diagnosis.loading import load

_DESCRIPTION = """\
Loads the configuration and the app as gunicorn would, with the same arguments (-c, -w, --chdir and all others of
gunicorn's, GUNICORN_CMD_ARGS and ./gunicorn.conf.py included), in processes of their own; starts no server; and says
what will happen, and what will cost sessions, with the remedy. No secret is shown.

Exit status: 0 where nothing is worse than a warning (with --strict: than a note), 1 where sessions will be lost or the
server will not start, 2 where configuration or app can't be loaded.
"""


class _Passed(argparse.Action):
    """Keeps an argument of gunicorn's, checked by nobody, to be passed on as it is."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        assert option_string is not None
        value = values if isinstance(values, str) else None
        if value is None:
            passed = [option_string]
        elif option_string.startswith("--"):
            # In one, since a value may begin with a dash.
            passed = [f"{option_string}={value}"]
        else:
            passed = [option_string + value]
        namespace.gunicorn = [*namespace.gunicorn, *passed]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this subcommand: its own, and all of gunicorn's."""
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s [--json] [--strict] [--load-timeout SECONDS] [gunicorn's options] [APP_MODULE]"
    parser.add_argument("--json", action="store_true", help="write the findings as JSON")
    parser.add_argument("--strict", action="store_true", help="exit with 1 for warnings too")
    parser.add_argument(
        "--load-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long the app may take to be loaded (default: 60)",
    )
    parser.add_argument("app", nargs="*", metavar="APP_MODULE", help="the app, as gunicorn takes it: module:name")
    parser.set_defaults(gunicorn=[])
    for setting in make_settings().values():
        if not setting.cli:
            continue
        # As argparse would do for gunicorn itself: flags take no value, nargs="?" one or none.
        flag = setting.action in ("store_true", "store_false", "store_const")
        nargs: Any = 0 if flag else setting.nargs
        parser.add_argument(*setting.cli, action=_Passed, nargs=nargs, dest="gunicorn", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Print what was found, and return the exit status."""
    passed = [*arguments.gunicorn, "--", *arguments.app] if arguments.app else list(arguments.gunicorn)
    first = load(passed, arguments.load_timeout)
    # In a second process too: what differs between the two differs between workers.
    second = load(passed, arguments.load_timeout) if first.failure is None else None
    host = None if first.configuration is None else host_facts(first.configuration)
    found: list[Finding] = list(findings(first, second, host))
    app = first.configuration.app if first.configuration is not None else " ".join(arguments.app)
    # Of an app that a function makes, without what that is called with.
    app = re.sub(r"\(.*", "(...)", app, flags=re.DOTALL)
    status = 2 if first.failure is not None else exit_status(found, strict=arguments.strict)
    print(as_json(app, status, found) if arguments.json else as_text(f"gym-gunicorn doctor: {app}", found))
    return status
