"""Whether the workers of a server sign their sessions with one secret."""

from __future__ import annotations

from collections.abc import Iterable

from gym_gunicorn.metrics.values import Reading


def secret_trouble(mine: Reading, others: Iterable[Reading]) -> tuple[str | None, str | None]:
    """Return what is wrong, and what is to be known, where other workers sign with another secret than mine.

    Of the ``others``, the total of the workers that have ended may be one.
    """
    error = None
    last: Reading | None = None
    for other in others:
        if not other["secret"] or other.owner_id == mine.owner_id:
            continue
        if other["generation"] != mine["generation"]:
            if last is None or other["generation"] > last["generation"]:
                last = other
        elif other["secret"] != mine["secret"] and other.owner_id is not None:
            error = (
                f"This worker signs session cookies with another secret than worker (pid:{other['pid']}) of the same "
                "server. Neither can read what the other wrote, so sessions start over without a word. Give "
                "SessionMiddleware one secret for all workers, not secrets.token_hex() or the like in each"
            )
    if last is None or last["secret"] == mine["secret"]:
        return error, None
    return error, (
        "The secret or the name of the session cookie has changed with this reload: sessions that were made "
        "before can't be read any more, and start over wherever they land"
    )
