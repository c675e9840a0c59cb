"""Whether a hook of a user's own calls ours is read from its code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from gunicorn.config import Config

import gym_gunicorn.conf
from gym_gunicorn import SessionRouting
from gym_gunicorn.cli.diagnosis.hook_calls import Hooks

routing = SessionRouting()
ours = routing.post_worker_init


class Namespace:
    """Something that has a ``SessionRouting`` where it can't be seen without running code."""

    @property
    def routing(self) -> SessionRouting:
        return routing


hidden = Namespace()


class OwnRouting(SessionRouting):
    """A routing with a hook that goes on to ours."""

    def post_worker_init(self, worker: Any) -> None:
        super().post_worker_init(worker)


class DeafRouting(SessionRouting):
    """A routing with a hook in the place of ours."""

    def post_worker_init(self, worker: Any) -> None:
        worker.log.info("ready")


class Calling:
    """A callable of a user's own."""

    def __init__(self, hook: Callable[[Any], None]) -> None:
        self.hook = hook

    def __call__(self, worker: Any) -> None:
        self.hook(worker)


def by_attribute(worker: Any) -> None:
    routing.post_worker_init(worker)
    worker.log.info("ready")


def by_name(worker: Any) -> None:
    ours(worker)


def by_helper(worker: Any) -> None:
    by_attribute(worker)


def by_getattr(worker: Any) -> None:
    getattr(routing, "post_worker_init")(worker)  # noqa: B009  # what is looked for


def around(hook: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(hook)
    def wrapper(worker: Any) -> None:
        hook(worker)

    return wrapper


def by_module(worker: Any) -> None:
    gym_gunicorn.conf.post_worker_init(worker)  # type: ignore[attr-defined]  # set by update of its globals


def chained(name: str) -> Callable[[Any], None]:
    def hook(worker: Any) -> None:
        getattr(routing, name)(worker)

    return hook


def by_any_name(worker: Any) -> None:
    getattr(routing, worker.name)(worker)


def not_at_all(worker: Any) -> None:
    print(worker)


def another_hook(worker: Any) -> None:
    routing.worker_exit(None, worker)


def out_of_sight(worker: Any) -> None:
    hidden.routing.post_worker_init(worker)


def use(hook: Any, name: str = "post_worker_init") -> tuple[str, int]:
    """Return how ``hook`` stands to ours, and how many routings were found behind it."""
    cfg = Config()
    cfg.set(name, hook)
    hooks = Hooks(cfg)
    return hooks.uses[name], len(hooks.routings)


def test_our_own_hooks_are_ours() -> None:
    cfg = Config()
    for name in SessionRouting.HOOKS:
        cfg.set(name, getattr(routing, name))
    hooks = Hooks(cfg)
    assert set(hooks.uses.values()) == {"ours"}
    assert hooks.routings == [routing]


def test_gunicorns_own_hooks_are_missing() -> None:
    assert set(Hooks(Config()).uses.values()) == {"missing"}


@pytest.mark.parametrize(
    "hook",
    [
        by_attribute,
        by_name,
        by_helper,
        by_getattr,
        by_module,
        chained("post_worker_init"),
        around(by_attribute),
        functools.partial(by_attribute),
        OwnRouting().post_worker_init,
        Calling(ours),
        lambda worker: routing.post_worker_init(worker),
    ],
)
def test_a_hook_that_calls_ours_is_seen(hook: Any) -> None:
    if isinstance(hook, functools.partial | Calling):
        functools.update_wrapper(hook, by_attribute)
        hook.__dict__.pop("__wrapped__")
    assert use(hook) == ("calls", 1)


@pytest.mark.parametrize("hook", [not_at_all, another_hook, DeafRouting().post_worker_init, around(not_at_all)])
def test_a_hook_that_does_not_call_ours_is_seen(hook: Any) -> None:
    assert use(hook)[0] == "lost"


def test_our_method_for_another_hook_is_lost() -> None:
    assert use(routing.post_worker_init, "pre_exec")[0] == "lost"


@pytest.mark.parametrize("hook", [out_of_sight, by_any_name, Calling(print)])
def test_what_cannot_be_told_is_not_guessed(hook: Any) -> None:
    assert use(hook)[0] == "unknown"
