"""gunicorn's server hooks that session routing needs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from gunicorn.config import Config

_P = ParamSpec("_P")
_S = TypeVar("_S")

HOOKS = (
    "on_starting",
    "on_reload",
    "nworkers_changed",
    "pre_fork",
    "post_worker_init",
    "worker_exit",
    "child_exit",
    "pre_exec",
    "on_exit",
)


class ConfigurationError(RuntimeError):
    """A server can't be started as it is configured. gunicorn prints the message and exits with 1."""


def missing_hooks(cfg: Config) -> list[str]:
    """Return the hooks that a configuration leaves as gunicorn has them; one that a user has set is to call ours."""
    return [name for name in HOOKS if cfg.settings[name].get() is cfg.settings[name].default]


def check_hooks(cfg: Config) -> None:
    """Verify that every hook is in place.

    Raises:
        ConfigurationError: one is not.
    """
    missing = missing_hooks(cfg)
    if missing:
        raise ConfigurationError(
            f"session routing needs the server hooks {', '.join(missing)}, which are not set: sessions would reach "
            "workers that do not hold them. Use `-c python:gym_gunicorn.conf`, begin the configuration with "
            "`from gym_gunicorn.conf import *`, or set each to the method of SessionRouting of that name, or call it "
            "from your own hook."
        )


def contained(hook: Callable[Concatenate[_S, Any, _P], None]) -> Callable[..., None]:
    """Have a hook, a method, log what it raises, for gunicorn would go down with it."""

    @functools.wraps(hook)
    def logging_hook(self: _S, source: Any, *args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            hook(self, source, *args, **kwargs)
        except Exception:
            source.log.exception("gym-gunicorn: the hook %s failed", hook.__name__)

    return logging_hook
