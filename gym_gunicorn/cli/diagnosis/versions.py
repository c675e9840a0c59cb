"""Tells which installed packages are of versions that this one was not made for."""

from __future__ import annotations

import importlib.metadata
import operator
import re
from collections.abc import Iterable

_REQUIREMENT = re.compile(r"([A-Za-z0-9][\w.-]*)(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?")
_CLAUSE = re.compile(r"(==|!=|<=|>=|<|>)\s*([\d.]+)")
_COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


def unsupported(requirements: Iterable[str]) -> list[str]:
    """Return, in words, which of the ``requirements`` of this package the installed packages do not meet.

    What is needed under a condition only (an extra, a platform) is looked at where it is installed.
    """
    found = []
    for requirement in requirements:
        match = _REQUIREMENT.fullmatch(requirement)
        if match is None:
            continue
        name, clauses, condition = match[1], _CLAUSE.findall(match[2]), match[3]
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if condition is None:
                found.append(f"{name} is not installed")
            continue
        if not all(meets(version, compare, bound) for compare, bound in clauses):
            wanted = " and ".join(f"{compare}{bound}" for compare, bound in reversed(clauses))
            found.append(f"{name} {version} ({wanted} is supported)")
    return found


def meets(version: str, compare: str, bound: str) -> bool:
    """Tell whether ``version`` is, for instance, ``>=`` another; a pre-release counts as its release."""
    one, other = _numbers(version), _numbers(bound)
    length = max(len(one), len(other))
    return bool(_COMPARE[compare](one + [0] * (length - len(one)), other + [0] * (length - len(other))))


def _numbers(version: str) -> list[int]:
    match = re.match(r"(?:\d+!)?(\d+(?:\.\d+)*)", version)
    return [int(part) for part in match[1].split(".")] if match else []
