"""Numbers in words, for who reads them on a terminal."""

from __future__ import annotations


def several(number: int | None, what: str) -> str:
    """Return "1 worker", "2 workers", and "? workers" where it is not known."""
    return f"{'?' if number is None else number} {what}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Return a time in one or two units: "12 s", "5 min", "3 h 20 min", "4 d 3 h"."""
    whole = int(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min"
    if whole < 24 * 3600:
        return f"{whole // 3600} h {whole // 60 % 60} min"
    return f"{whole // (24 * 3600)} d {whole // 3600 % 24} h"
