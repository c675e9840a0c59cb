"""The codec for what travels between the worker that receives a request and its owner.

A head holds everything of an ASGI scope that the caller's request made, in one
opaque header field, so that the owner's handler sees the request to the byte,
whatever an HTTP client in between does to methods, targets and headers. A reply
head does the same for the status and headers of the reply. A WebSocket travels
as its ASGI events, each in a frame.

Heads are MessagePack, read into what they have to be: fields may hold any byte, and
nothing that a peer sends can run code or take memory out of proportion. ``VERSION``
comes first, since two releases stand side by side during an upgrade (SIGUSR2). Over a
link they go as they are, over HTTP as the value of a field.
"""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import msgspec
from starlette.types import Message, Scope

VERSION = 1

HEAD_FIELD = b"gym-gunicorn-head"
REPLY_FIELD = b"gym-gunicorn-reply"

Fields = list[tuple[bytes, bytes]]

# Whose the request is, beside its head, where the way to an owner does not say so; and the
# status of what another owner answers (RFC 9110, 15.5.20).
OWNER_FIELD = b"gym-gunicorn-owner"
MISDIRECTED = 421

_SCOPE_KEYS = ("type", "asgi", "http_version", "method", "scheme", "path", "root_path", "subprotocols", "extensions")
_FRAME_LENGTH = struct.Struct("!I")
_MAX_FRAME = 2**30


class WireError(Exception):
    """A peer sent what this release can't read."""


def _plain(value: object) -> object:
    # msgspec writes no kinds of these that an app has made itself; a status may be one.
    if isinstance(value, int):
        return int(value)
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bytes):
        return bytes(value)
    raise TypeError(f"no head can hold a {type(value).__name__}")


_encode = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_decode_head = msgspec.msgpack.Decoder(
    tuple[int, dict[str, Any], bytes, bytes, tuple[str, int | None] | None, tuple[str, int | None] | None, Fields]
).decode
_decode_reply = msgspec.msgpack.Decoder(tuple[int, Any, Fields, int]).decode


def _fields(headers: Any) -> Fields:
    # Some apps send other sequences, and other kinds of bytes.
    return [(bytes(name), bytes(value)) for name, value in headers]


def encode_head(scope: Scope) -> bytes:
    """Return the head of ``scope`` (an ``http`` or ``websocket`` scope).

    Raises:
        WireError: it can't be a head; no scope of uvicorn's is such.
    """
    try:
        return _encode(
            (
                VERSION,
                {key: scope[key] for key in _SCOPE_KEYS if key in scope},
                scope["raw_path"],
                scope["query_string"],
                scope.get("client"),
                scope.get("server"),
                scope["headers"],
            )
        )
    except (TypeError, ValueError, OverflowError, RecursionError, BufferError) as error:
        raise WireError(f"a scope that is no head: {type(error).__name__}") from error


def decode_head(head: bytes) -> Scope:
    """Return the scope entries that ``encode_head`` wrote.

    Raises:
        WireError: it is no head of this version.
    """
    try:
        version, entries, raw_path, query_string, client, server, headers = _decode_head(head)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"unreadable head: {_version_of(head)}{type(error).__name__}") from error
    if version != VERSION:
        raise WireError(f"head of version {version!r}, this release reads {VERSION}")
    if entries.get("type") not in ("http", "websocket"):
        raise WireError(f"head of a {str(entries.get('type'))[:50]!r}")
    entries["raw_path"] = raw_path
    entries["query_string"] = query_string
    entries["client"] = client
    entries["server"] = server
    entries["headers"] = headers
    return entries


def encode_reply(message: Message, taken: int) -> bytes:
    """Return the head of a reply, an ``http.response.start`` event.

    ``taken`` is how many nanoseconds the owner took for it.
    """
    return _encode((VERSION, message["status"], _fields(message.get("headers", ())), taken))


def decode_reply(head: bytes) -> tuple[Message, int]:
    """Return the ``http.response.start`` event and the nanoseconds that ``encode_reply`` wrote.

    The status may be anything.

    Raises:
        WireError: it is no reply head of this version.
    """
    try:
        version, status, headers, taken = _decode_reply(head)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise WireError(f"unreadable reply: {_version_of(head)}{type(error).__name__}") from error
    if version != VERSION:
        raise WireError(f"reply of version {version!r}, this release reads {VERSION}")
    return {"type": "http.response.start", "status": status, "headers": headers}, max(0, taken)


def _version_of(head: bytes) -> str:
    """Say of which version an unreadable head is, where that is what makes it so."""
    try:
        items = msgspec.msgpack.decode(head)
        if not isinstance(items, list) or not items or (type(items[0]) is int and items[0] == VERSION):
            return ""
        return f"version {items[0]!r}, this release reads {VERSION}: "
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return ""


def to_field(head: bytes) -> str:
    """Return a head as the value of a header field."""
    return base64.b64encode(head).decode("ascii")


def from_field(value: bytes | str) -> bytes:
    """Return the head in a header field.

    Raises:
        WireError: there is none.
    """
    try:
        return base64.b64decode(value, validate=True)
    except ValueError as error:
        raise WireError("unreadable field") from error


def _dumps(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _texts(headers: Any) -> list[list[str]]:
    return [[bytes(name).decode("latin-1"), bytes(value).decode("latin-1")] for name, value in headers]


def _pairs(headers: Any) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]


def encode_frame(event: Message) -> bytes:
    """Return one ASGI event of a WebSocket as a frame: length, kind, payload.

    Messages go as they are (kinds ``T`` and ``B``), other events as JSON (``J``).
    """
    if event.get("bytes") is not None:
        kind, payload = b"B", bytes(event["bytes"])
    elif event.get("text") is not None:
        kind, payload = b"T", event["text"].encode("utf-8", "surrogatepass")
    else:
        plain = dict(event)
        if "headers" in plain:
            plain["headers"] = _texts(plain["headers"])
        if "body" in plain:
            plain["body"] = bytes(plain["body"]).decode("latin-1")
        kind, payload = b"J", _dumps(plain).encode("ascii")
    return _FRAME_LENGTH.pack(len(payload)) + kind + payload


class FrameReader:
    """Takes bytes in any pieces and returns the ASGI events in them.

    ``message_type`` is the type of the events that text and binary frames stand
    for: ``websocket.receive`` towards the app, ``websocket.send`` towards the caller.
    """

    def __init__(self, message_type: str) -> None:
        self._message_type = message_type
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Add ``data`` and return the events that are complete.

        Raises:
            WireError: the bytes are no frames of ours.
        """
        self._buffer += data
        events = []
        header = _FRAME_LENGTH.size + 1
        start = 0
        while len(self._buffer) - start >= header:
            (length,) = _FRAME_LENGTH.unpack_from(self._buffer, start)
            if length > _MAX_FRAME:
                raise WireError("frame too long")
            end = start + header + length
            if len(self._buffer) < end:
                break
            kind = self._buffer[start + header - 1]
            events.append(self._event(kind, bytes(self._buffer[start + header : end])))
            start = end
        del self._buffer[:start]
        return events

    def _event(self, kind: int, payload: bytes) -> Message:
        try:
            if kind == 0x42:  # B
                return {"type": self._message_type, "bytes": payload}
            if kind == 0x54:  # T
                return {"type": self._message_type, "text": payload.decode("utf-8", "surrogatepass")}
            if kind != 0x4A:  # J
                raise WireError("unknown kind of frame")
            event = json.loads(payload)
            if not isinstance(event, dict) or not isinstance(event.get("type"), str):
                raise WireError("a frame that is no event")
            if "headers" in event:
                event["headers"] = _pairs(event["headers"])
            if "body" in event:
                event["body"] = event["body"].encode("latin-1")
            return event
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise WireError(f"unreadable frame: {type(error).__name__}") from error
