"""Says why something failed without saying a secret: an error's message may hold one.

A message is shown, but what may be a secret in it is masked: the values of
variables, settings and arguments that are named like one, and every quoted or
random-looking piece that the kind of error does not make harmless.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

from gunicorn.errors import AppImportError

import gym_gunicorn
from gym_gunicorn.cli.diagnosis.facts import Failure, Stage

MASK = "[hidden]"

_OWN = os.path.dirname(gym_gunicorn.__file__)

_SECRETIVE = re.compile(
    r"secret|passw|passphrase|token|credential|private|apikey|(^|_)(key|salt|pw|pwd|auth|dsn)s?($|[_\s=:])", re.I
)
# An apostrophe within a word opens nothing.
_QUOTED = re.compile(r"""(?<!\w)b?'(?:[^'\\]|\\.)*'|b?"(?:[^"\\]|\\.)*"|`[^`]*`""")
# The name of an environment variable or of a thing in code, alone.
_VARIABLE = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
_IDENTIFIER = re.compile(r"[A-Za-z_][\w.]{0,60}")
# At least 16 characters that could be hexadecimal or base64, a digit among them.
_RANDOM = re.compile(r"(?<![\w/.+=-])(?=[\w+=-]*\d)[\w+=-]{16,}(?![\w/.])")
_USERINFO = re.compile(r"(?<=://)[^/\s@]+@")
# As in "SESSION_SECRET=...", and in "bad secret: ...".
_GIVEN = re.compile(r"""(\w+\s*[=:]\s*)(?![\s'"`\[])\S+""")
_LENGTH = 300

# What Python itself says of a call with other arguments than a function has.
_ARGUMENTS = re.compile(r"[\w.<>]+\(\) (missing \d+ required|got an unexpected keyword|got multiple values)")

# Errors that quote names of modules, attributes and variables.
_NAMING = (ImportError, AttributeError, NameError, SyntaxError, AppImportError)


def failure_of(stage: Stage, error: BaseException) -> Failure:
    """Return why ``error`` was raised: the last line of its traceback, masked, and the place where it was raised.

    The place is where the user's own code stands last, as far as that can be told.
    """
    # gunicorn exits where it could not read a configuration, in the course of handling why not.
    if isinstance(error, SystemExit) and isinstance(error.__context__, Exception):
        error = error.__context__
    if isinstance(error, SystemExit):
        return Failure(stage, f"it ends the process by itself: SystemExit({_exit_code(error)})", _place(error))
    secrets = set(_known_secrets(error))
    # Of a message with many lines the first says what it is about.
    text = "".join(_masked(str(error), secrets, error).splitlines()[:1])[:_LENGTH]
    name = type(error).__name__
    if isinstance(error, SyntaxError):
        # Without the line of source, which may be the one that sets the secret.
        text = _masked(error.msg, secrets, error)
        return Failure(stage, f"{name}: {text}", f"{error.filename}, line {error.lineno}")
    return Failure(stage, f"{name}: {text}" if text else name, _place(error))


def mask_values(text: str, secrets: set[str]) -> str:
    """Return ``text`` with every one of ``secrets`` masked, and what it gives to a name that secrets have."""
    for secret in sorted(secrets, key=len, reverse=True):
        for form in (secret, repr(secret)[1:-1], unquote(secret)):
            text = text.replace(form, MASK)
    return _GIVEN.sub(lambda given: f"{given[1]}{MASK}" if _SECRETIVE.search(given[1]) else given[0], text)


def environment_secrets() -> Iterator[str]:
    """Yield the values of environment variables that are named like secrets, and the passwords in URLs."""
    for name, value in os.environ.items():
        yield from _values(name, value)


def _masked(message: str, secrets: set[str], error: BaseException) -> str:
    names_code = isinstance(error, _NAMING) or (isinstance(error, TypeError) and _ARGUMENTS.match(message) is not None)
    is_file = isinstance(error, OSError) and isinstance(error.filename, str | bytes)

    def quoted(match: re.Match[str]) -> str:
        inner = match[0].removeprefix("b")[1:-1]
        harmless = (
            _VARIABLE.fullmatch(inner) is not None
            or re.fullmatch(r"\W{1,2}", inner) is not None
            or (names_code and _IDENTIFIER.fullmatch(inner) is not None)
            or (is_file and inner == os.fsdecode(error.filename))  # type: ignore[attr-defined]  # seen by is_file
            or os.path.exists(inner)
        )
        return match[0] if harmless else MASK

    def random_looking(match: re.Match[str]) -> str:
        return match[0] if _VARIABLE.fullmatch(match[0]) and not re.search(r"\d{3}", match[0]) else MASK

    message = mask_values(message, secrets)
    message = _USERINFO.sub(f"{MASK}@", message)
    message = _QUOTED.sub(quoted, message)
    return message if is_file else _RANDOM.sub(random_looking, message)


def _known_secrets(error: BaseException) -> Iterator[str]:
    """Yield what code that ``error`` came through knows under a name that secrets have."""
    yield from environment_secrets()
    sources: set[str] = set()
    # A secret may have come from a module that is not on the way, by a name that tells nothing.
    for module in list(sys.modules.values()):
        if (name := getattr(module, "__file__", None)) and not _is_installed(name):
            yield from _items(vars(module))
    for frame, _ in traceback.walk_tb(error.__traceback__):
        sources.add(frame.f_code.co_filename)
        installed = _is_installed(frame.f_code.co_filename)
        local = dict(frame.f_locals)
        if installed and _VARIABLE.fullmatch(str(local.get("key"))):
            # The name of a variable that os.environ does not have.
            del local["key"]
        yield from _items(local)
        # An installed package's own names hold nothing of the app's.
        yield from _items({} if installed else frame.f_globals)
    for source in sources:
        if not _is_installed(source):
            yield from _literals(source)


def _items(variables: dict[str, Any]) -> Iterator[str]:
    """Yield the secrets among variables, and among what mappings and objects in them hold."""
    for name, value in list(variables.items()):
        yield from _values(name, value)
        if name.startswith("__") or isinstance(value, ModuleType | type):
            continue
        inner = value if isinstance(value, dict) else getattr(value, "__dict__", None)
        if isinstance(inner, dict):
            for key, held in list(inner.items()):
                yield from _values(str(key), held)


def _values(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    elif type(value).__module__.startswith(("starlette.", "pydantic.")) and "Secret" in type(value).__name__:
        value = value.get_secret_value() if hasattr(value, "get_secret_value") else str(value)
    if not isinstance(value, str) or len(value) < 3:
        return
    if _SECRETIVE.search(name):
        yield value
    elif "://" in value and "@" in value:
        try:
            password = urlsplit(value).password
        except ValueError:
            return
        if password:
            yield password


def _literals(source: str) -> Iterator[str]:
    """Yield the strings that a source file gives to names, arguments and keys that are named like secrets."""
    try:
        tree = ast.parse(Path(source).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword):
            yield from _under(node.arg or "", node.value)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from _under(_name(target), node.value)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            yield from _under(_name(node.target), node.value)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                yield from _under(_name(key), value)
        elif isinstance(node, ast.Call):
            # os.environ.get("SESSION_SECRET", "...")
            names = [_name(argument) for argument in node.args]
            if any(_SECRETIVE.search(name) for name in names[:1]):
                for argument in node.args[1:]:
                    yield from _under("secret", argument)


def _under(name: str, value: ast.expr) -> Iterator[str]:
    if _SECRETIVE.search(name):
        for node in ast.walk(value):
            if isinstance(node, ast.Constant) and not _VARIABLE.fullmatch(str(node.value)):
                yield from _values("secret", node.value)


def _name(node: ast.expr | None) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return _name(node.slice) if isinstance(node, ast.Subscript) else ""


def _exit_code(error: SystemExit) -> str:
    return str(error.code) if isinstance(error.code, int) or error.code is None else MASK


def _place(error: BaseException) -> str:
    """Return file and line of the last frame outside installed packages, or of the last one."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    frames = [(name, line) for name, line in frames if not name.startswith("<")]
    own = [(name, line) for name, line in frames if not _is_installed(name)]
    if not own:
        return ""
    name, line = own[-1]
    return f"{name}, line {line}"


def _is_installed(name: str) -> bool:
    return "site-packages" in name or name.startswith(("<frozen", os.path.dirname(os.__file__), _OWN))
