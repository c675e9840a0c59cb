"""Tells whether a server hook of a user's own calls ours, by reading its code and never by running it."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from gunicorn.config import Config

from gym_gunicorn.cli.diagnosis.facts import HookUse
from gym_gunicorn.lifecycle.configuration import HOOKS
from gym_gunicorn.lifecycle.hooks import SessionRouting

# How many functions deep a hook is followed into what it calls.
_DEPTH = 5


class Hooks:
    """The server hooks of a configuration.

    ``uses`` says of each of ``HOOKS`` how it stands to ours, and ``routings`` which
    ``SessionRouting`` were found behind them.
    """

    def __init__(self, cfg: Config) -> None:
        self.routings: list[SessionRouting] = []
        self.uses: dict[str, HookUse] = {}
        for name in HOOKS:
            setting = cfg.settings[name]
            hook = setting.get()
            self.uses[name] = "missing" if hook is setting.default else self._use(name, hook)

    def _use(self, name: str, hook: Any) -> HookUse:
        if isinstance(hook, MethodType) and isinstance(hook.__self__, SessionRouting):
            if _is_method(hook, name):
                self._keep(hook.__self__)
                return "ours"
            if getattr(type(hook.__self__), hook.__name__, None) is getattr(SessionRouting, hook.__name__, None):
                # Ours, but for another hook.
                return "lost"
        search = _Search(name)
        search.look(hook, _DEPTH)
        for routing in search.routings:
            self._keep(routing)
        if search.found:
            return "calls"
        return "unknown" if search.in_doubt else "lost"

    def _keep(self, routing: SessionRouting) -> None:
        if not any(routing is other for other in self.routings):
            self.routings.append(routing)


class _Search:
    """A search for the call of our hook ``name`` in what a user's hook refers to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.found = False
        self.in_doubt = False
        self.routings: list[SessionRouting] = []
        self._seen: set[int] = set()

    def look(self, value: Any, depth: int) -> None:
        """Look at something that a hook calls or refers to."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, MethodType):
            if isinstance(value.__self__, SessionRouting) and _is_method(value, self.name):
                self._found(value.__self__)
                return
            self.look(value.__func__, depth)
            if isinstance(value.__self__, SessionRouting) and self.found:
                self._found(value.__self__)
        elif isinstance(value, FunctionType):
            if depth == 0:
                self.in_doubt = True
                return
            self._look_into(value, depth - 1)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.look(part, depth)
        elif isinstance(value, type | ModuleType | BuiltinFunctionType):
            # A class or a module that is named alone calls nothing of ours.
            pass
        elif callable(value):
            # What an object does when it is called, its class says; what it calls, the object.
            for part in vars(value).values() if hasattr(value, "__dict__") else ():
                if isinstance(part, MethodType | FunctionType | functools.partial):
                    self.look(part, depth)
            self.in_doubt = self.in_doubt or not self.found

    def _look_into(self, function: FunctionType, depth: int) -> None:
        names = set(_names(function.__code__))
        references = list(_references(function))
        names.update(value for value in references if isinstance(value, str))
        mentions = self.name in names
        for value in references:
            if isinstance(value, SessionRouting):
                if mentions:
                    self._found(value)
                elif "getattr" in names:
                    self.in_doubt = True
            elif isinstance(value, ModuleType) and mentions:
                self._look_in_module(value, names)
            elif isinstance(value, type) and issubclass(value, SessionRouting) and mentions:
                # super().hook(...), or SessionRouting.hook(self, ...).
                self.found = True
            else:
                self.look(value, depth)
        if mentions and not self.found:
            self.in_doubt = True

    def _look_in_module(self, module: ModuleType, names: set[str]) -> None:
        for name in names:
            value = vars(module).get(name)
            if isinstance(value, SessionRouting):
                self._found(value)
            elif isinstance(value, MethodType) and name == self.name:
                self.look(value, 1)
            elif isinstance(value, ModuleType) and id(value) not in self._seen:
                self._seen.add(id(value))
                self._look_in_module(value, names)

    def _found(self, routing: SessionRouting) -> None:
        self.found = True
        self.routings.append(routing)


def _is_method(method: MethodType, name: str) -> bool:
    """Tell whether a method of a ``SessionRouting`` is that class's own of this name."""
    return method.__func__ is getattr(SessionRouting, name)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names and strings that a function's code mentions, those of functions within it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant


def _globals_named(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_named(constant)


def _references(function: FunctionType) -> Iterator[Any]:
    """Yield what a function can reach by name: globals, variables of functions around it, defaults."""
    for name in sorted(set(_globals_named(function.__code__))):
        if name in function.__globals__:
            yield function.__globals__[name]
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    wrapped = inspect.unwrap(function)
    if wrapped is not function:
        yield wrapped
