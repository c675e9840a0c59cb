"""What the app and its callers know of each other: the bytes that are sent and expected."""

from __future__ import annotations

KIB, MIB = 1024, 1024 * 1024

# Every upload and every sized reply is a beginning of it. Its period is a prime: a piece at a wrong place shows.
PATTERN = (bytes(range(251)) * (8 * MIB // 251 + 1))[: 8 * MIB]

EVENTS = 1000
COMPUTED_SECONDS = 0.02


def event(number: int) -> bytes:
    """Return one server-sent event."""
    return b'data: {"number": %d, "text": "a token or two"}\n\n' % number


STREAMED = b"".join(map(event, range(EVENTS)))
