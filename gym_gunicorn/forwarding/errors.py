"""Why a request could not be answered by its owner.

Whatever goes wrong between two workers is turned into one of these at one place,
in the forwarder; the router turns them into answers.
"""

from __future__ import annotations

import os


class ForwardError(Exception):
    """A request was not answered by its owner.

    ``owner_id`` says whose it was, ``unsent`` that the owner could not be connected to, so that
    nothing of the request was sent and nothing of its body is lost.
    """

    def __init__(self, owner_id: str, cause: str, *, unsent: bool = False) -> None:
        super().__init__(f"owner {owner_id}: {cause}")
        self.owner_id = owner_id
        self.cause = cause
        self.unsent = unsent


class Gone(ForwardError):
    """The owner is dead, or is stopping and takes no more: the session is lost."""


class Busy(ForwardError):
    """The owner is alive and can't take the request now. It was not run."""


class Broken(ForwardError):
    """The owner is alive, but the exchange broke before a reply. The request may have been run."""


class Truncated(ForwardError):
    """The exchange broke after the reply began, so that no other answer can be given."""


def describe(error: BaseException) -> str:
    """Return what kind of error it is and, for one of the system's, its number in words.

    Not its text: aiohttp's (3.14) can hold the request that it sent, cookies included.
    """
    number = getattr(error, "errno", None)
    return type(error).__name__ + (f", {os.strerror(number)}" if isinstance(number, int) else "")
