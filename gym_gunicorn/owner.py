"""Owner IDs: the name of the worker process in whose memory a session lives. And session IDs that hold one."""

from __future__ import annotations

import re
import secrets
from typing import TypeGuard

_FORM = re.compile(r"[0-9a-f]{12}")
_SESSION_ID = re.compile(r"([0-9a-f]{12})-[0-9a-f]{32}")


def new_owner_id() -> str:
    """Return an owner ID that no worker has had: 12 random hexadecimal digits."""
    return secrets.token_hex(6)


def is_owner_id(value: object) -> TypeGuard[str]:
    """Tell whether ``value`` has the exact form of an owner ID.

    What passes is safe as a file name. Everything that came from outside the
    process, signed or not, goes through this before it is used as an owner.
    """
    return isinstance(value, str) and _FORM.fullmatch(value) is not None


def new_session_id(owner_id: str) -> str:
    """Return a session ID that nobody can guess and that names its owner: ``<owner ID>-<32 hexadecimal digits>``."""
    return f"{owner_id}-{secrets.token_hex(16)}"


def owner_in(session_id: object) -> str | None:
    """Return the owner ID that a session ID names, or ``None`` where it is not one of ``new_session_id``."""
    match = _SESSION_ID.fullmatch(session_id) if isinstance(session_id, str) else None
    return None if match is None else match[1]
