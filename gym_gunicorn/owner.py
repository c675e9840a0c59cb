"""Owner IDs: the name of the worker process in whose memory a session lives."""

from __future__ import annotations

import re
import secrets
from typing import TypeGuard

_FORM = re.compile(r"[0-9a-f]{12}")


def new_owner_id() -> str:
    """Return an owner ID that no worker has had: 12 random hexadecimal digits."""
    return secrets.token_hex(6)


def is_owner_id(value: object) -> TypeGuard[str]:
    """Tell whether ``value`` has the exact form of an owner ID.

    What passes is safe as a file name. Everything that came from outside the
    process, signed or not, goes through this before it is used as an owner.
    """
    return isinstance(value, str) and _FORM.fullmatch(value) is not None
