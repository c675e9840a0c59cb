"""The command's arguments, and what each of its subcommands needs."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from gym_gunicorn.cli import sessions, status

# What the extra "cli" brings.
_EXTRA = ("rich", "prometheus_client")

_GUNICORNC = """\
gunicorn has a command of its own, gunicornc, which tells what its arbiter knows and does what signals do:
  gunicornc -c "show workers"    -c "reload"    -c "worker add 2"    -c "worker kill PID"
This one tells what session routing knows, and changes nothing.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = _parser(sys.argv[1:] if arguments is None else arguments)
    parsed = parser.parse_args(arguments)
    try:
        module = import_module(f"gym_gunicorn.cli.{parsed.command}")
        result: int = module.run(parsed)
        sys.stdout.flush()
        return result
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRA:
            raise
        print(f"gym-gunicorn {parsed.command} needs {missing}: pip install 'gym-gunicorn[cli]'", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Whoever read has seen enough. What Python would flush at its end has no reader either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13
    except KeyboardInterrupt:
        return 128 + 2


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gym-gunicorn",
        description="Looks at gunicorn servers with session routing, and at their configuration.",
        epilog=_GUNICORNC,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = importlib.metadata.version("gym-gunicorn")
    parser.add_argument("--version", action="version", version=f"gym-gunicorn {version}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    here = argparse.ArgumentParser(add_help=False)
    here.add_argument(
        "--sockets", metavar="DIR", help="a server's socket directory, or the folder of several (default: /tmp)"
    )
    here.add_argument("--pid", type=int, metavar="PID", help="the server of this arbiter or worker")

    def add(name: str, help_: str, *parents: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help_, description=help_[0].upper() + help_[1:] + ".", parents=parents)

    status.add_arguments(add("status", "show what the workers of this user's servers do", here))
    add("metrics", "write a server's figures in Prometheus' text format", here)
    sessions.add_arguments(add("sessions", "say whose a session is, and whether its owner lives", here))
    doctor = add("doctor", "say what a configuration will do, and what it will cost")
    if "doctor" in arguments:
        # Loads what a server loads, which takes its time.
        import_module("gym_gunicorn.cli.doctor").add_arguments(doctor)
    return parser
