"""Where the fuzzers' values come from: what is nearly right finds more than what is random."""

from __future__ import annotations

import json
import zlib
from base64 import b64encode, urlsafe_b64encode
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from starlette.types import Message, Scope

from gym_gunicorn.forwarding import wire
from tests.fuzz.properties import HEADER, KEY, NAME, NOW, SERIALIZER, SESSION_ID_KEY, stopped_signer
from tests.hostile.forging import NO_OWNER_IDS


def fuzzed(share: float = 1.0) -> settings:
    """Return settings for a property; ``share`` is the part of the usual number of examples that it can afford."""
    return settings(max_examples=max(1, int(settings().max_examples * share)))


OWNER_IDS = st.text("0123456789abcdef", min_size=12, max_size=12)
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=15),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NEARLY_OWNERS = st.one_of(
    st.sampled_from([owner for owner in NO_OWNER_IDS if not isinstance(owner, str) or len(owner) < 1000]),
    st.from_regex(r"[0-9a-fA-F]{11,13}\n?"),
    st.text(st.characters(categories=["Nd", "Ll", "Cs", "Cc"]), min_size=11, max_size=13),
    JSON,
)
OWNERS = OWNER_IDS | NEARLY_OWNERS
SESSIONS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries({KEY: OWNERS}, optional={"n": JSON})

# Sessions as bytes: JSON of anything, cut, padded, or not even that.
_TEXTS = st.one_of(
    SESSIONS.map(json.dumps),
    JSON.map(json.dumps),
    st.lists(st.tuples(st.just(KEY), OWNERS), max_size=2).map(json.dumps),
    st.tuples(OWNERS, OWNERS).map(lambda two: f'{{"{KEY}": {json.dumps(two[0])}, "{KEY}": {json.dumps(two[1])}}}'),
    st.text('{}[]":,\\u0deE+-.tfnNaI \x00\xff', max_size=20),
).map(lambda text: text.encode("utf-8", "surrogatepass"))
_ENCODED = st.one_of(_TEXTS, _TEXTS.map(lambda text: text.decode("latin-1").encode("utf-16")))


@st.composite
def cookie_payloads(draw: st.DrawFn) -> bytes:
    """What is signed in a cookie."""
    payload = b64encode(draw(_ENCODED))
    shapes = [st.just(payload), st.just(payload.rstrip(b"=")), st.just(payload[:-3]), st.binary()]
    shape: bytes = draw(st.one_of(shapes))
    return shape


@st.composite
def token_payloads(draw: st.DrawFn) -> bytes:
    """What is signed in a token."""
    session_ids = st.one_of(
        OWNER_IDS.map(lambda owner: f"{owner}-{'0' * 32}"),
        st.tuples(OWNERS, st.text("0123456789abcdefF-./", max_size=33)).map(lambda two: f"{two[0]}-{two[1]}"),
        NEARLY_OWNERS,
    )
    token = draw(st.fixed_dictionaries({}, optional={KEY: OWNERS, SESSION_ID_KEY: session_ids}) | JSON)
    text = json.dumps(token).encode()
    dumped = urlsafe_b64encode(text).rstrip(b"=")
    shapes = [
        st.just(dumped),
        st.just(b"." + dumped),
        st.just(b"." + urlsafe_b64encode(zlib.compress(text)).rstrip(b"=")),
        st.just(dumped[:-1]),
        _ENCODED.map(lambda encoded: urlsafe_b64encode(encoded).rstrip(b"=")),
        st.binary(),
    ]
    shape: bytes = draw(st.one_of(shapes))
    return shape


_COOKIES = [
    stopped_signer(NOW - age).sign(b64encode(json.dumps({KEY: owner}).encode()))
    for age in (0, 3600, 3601, -1)
    for owner in ("a" * 12, "b" * 12, "../../x")
]
_TOKENS = [
    SERIALIZER.dumps({KEY: "a" * 12}).encode(),
    SERIALIZER.dumps({SESSION_ID_KEY: "b" * 12 + "-" + "0" * 32}).encode(),
    SERIALIZER.dumps({KEY: "../../x", "padding": "x" * 200}).encode(),
]


def _lines(*pieces: bytes) -> st.SearchStrategy[bytes]:
    """Field values made of the pieces given, of their cuts, and of any bytes between."""
    piece = st.one_of(st.sampled_from(pieces), st.binary(max_size=6))
    return st.lists(piece, max_size=8).map(b"".join)


COOKIE_FIELDS = st.lists(
    st.tuples(
        st.sampled_from([b"cookie", b"cookie", b"cookie", b"cookies", b""]),
        _lines(
            *_COOKIES,
            *(b"session=" + cookie for cookie in _COOKIES),
            NAME.encode(),
            *(b"=", b";", b"; ", b'"', b"\\", b"\\073", b"\\056", b"\\377", b" ", b"\t", b".", b"\xa0", b"\x85"),
        ),
    ),
    max_size=4,
)
TOKEN_FIELDS = st.lists(
    st.tuples(
        st.sampled_from([HEADER.encode(), HEADER.encode(), b"x-tokens"]),
        st.sampled_from(_TOKENS) | _lines(*_TOKENS, b".", b"-", b"_", b"="),
    ),
    max_size=3,
)

# Links

_LATIN = st.binary(max_size=12)
# Half a surrogate pair can't be sent.
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_FIELDS = st.lists(st.tuples(_LATIN, _LATIN), max_size=4)
_ADDRESSES = st.none() | st.tuples(_TEXT, st.none() | st.integers(0, 65535))
SCOPES: st.SearchStrategy[Scope] = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["http", "websocket"]),
        "path": _TEXT,
        "raw_path": _LATIN,
        "query_string": _LATIN,
        "client": _ADDRESSES,
        "server": _ADDRESSES,
        "headers": _FIELDS,
    },
    optional={
        "asgi": st.dictionaries(_TEXT, _TEXT, max_size=2),
        "http_version": st.sampled_from(["1.0", "1.1", "2"]),
        "method": _TEXT,
        "root_path": _TEXT,
        "scheme": _TEXT,
        "subprotocols": st.lists(_TEXT, max_size=3),
        "extensions": st.dictionaries(_TEXT, st.dictionaries(_TEXT, _TEXT | st.none() | st.integers(0, 2**32))),
    },
)
REPLIES: st.SearchStrategy[Message] = st.fixed_dictionaries(
    {"type": st.just("http.response.start"), "status": st.integers(100, 599), "headers": _FIELDS}
)
EVENTS: st.SearchStrategy[Message] = st.one_of(
    st.fixed_dictionaries({"type": st.just("websocket.receive"), "bytes": st.binary()}),
    st.fixed_dictionaries({"type": st.just("websocket.receive"), "text": st.text(st.characters())}),
    st.fixed_dictionaries({"type": st.just("websocket.disconnect"), "code": st.integers(1000, 4999), "reason": _TEXT}),
    st.fixed_dictionaries({"type": st.just("websocket.accept"), "subprotocol": st.none() | _TEXT, "headers": _FIELDS}),
    st.fixed_dictionaries({"type": st.just("websocket.http.response.body"), "body": st.binary()}),
)


NANOSECONDS = st.integers(0, 2**63)


# What MessagePack can say, and more: texts with half a surrogate pair, integers of any size.
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    JSON | st.binary(max_size=9) | st.datetimes() | st.builds(msgspec.msgpack.Ext, st.integers(0, 127), st.binary()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=5,
)
# Scopes that an app server might make by mistake.
NEARLY_SCOPES: st.SearchStrategy[Scope] = st.tuples(
    SCOPES,
    st.dictionaries(
        st.sampled_from(["path", "raw_path", "query_string", "client", "server", "headers", "extensions", "method"]),
        ANYTHING,
        max_size=2,
    ),
).map(lambda two: {**two[0], **two[1]})


def _packed(value: object) -> bytes:
    """Return MessagePack of ``value``, or of its text where it has none."""
    try:
        return msgspec.msgpack.encode(value)
    except (ValueError, OverflowError):
        return msgspec.msgpack.encode(ascii(value))


# The beginnings of what does not come: lists, dicts, texts, bytes and extensions of many items, and what there is not.
_BEGINNINGS = st.sampled_from(
    [
        *(bytes([kind]) + b"\xff" * size for kind in (0xDD, 0xDF, 0xDB, 0xC6, 0xC9) for size in (4, 1)),
        *(bytes([kind]) + b"\0\x10\0\0" for kind in (0xDD, 0xDF)),
        *(b"\xdc\xff\xff", b"\xde\xff\xff", b"\xda\xff\xff", b"\xc5\xff\xff", b"\xd9\xff", b"\xc4\xff"),
        *(b"\xc1", b"\x91" * 2000, b"\x81\xa1x" * 2000, b"\x81\x80", b"\xa1\xff", b"\xa3\xed\xa0\x80", b"\xff", b""),
        *(b"\xd6\xff\0\0\0\1", b"\xc7\x0c\xff" + b"\xff" * 12, b"\xd4\xff\1", b"\xd4\x05x", b"\xcf" + b"\xff" * 8),
    ]
)
PACKED = ANYTHING.map(_packed) | _BEGINNINGS


def _nearly(*items: object) -> st.SearchStrategy[bytes]:
    """A list like that of ``items``, with some of them replaced by anything."""
    return st.tuples(*(st.just(_packed(item)) | st.just(_packed(item)) | PACKED for item in items)).map(
        lambda packed: bytes([0x90 + len(packed)]) + b"".join(packed)
    )


def _changed(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Bytes with some others in the place of some."""
    return st.tuples(values, st.integers(0, 200), st.integers(0, 9), PACKED | st.binary(max_size=3)).map(
        lambda four: four[0][: four[1]] + four[3] + four[0][four[1] + four[2] :]
    )


HEADS = st.one_of(
    st.binary(),
    PACKED,
    _nearly(1, {"type": "http"}, b"/", b"", None, ["::1", 1], [[b"a", b"b"]]),
    _changed(SCOPES.map(wire.encode_head)),
)
REPLY_HEADS = st.one_of(
    st.binary(),
    PACKED,
    _nearly(1, 200, [[b"a", b"b"]], 7),
    _changed(REPLIES.map(lambda message: wire.encode_reply(message, 7))),
)
FIELDS = st.one_of(
    st.binary(),
    st.text(st.characters(), max_size=12),
    st.text("ABab+/=-_ \n,", max_size=12),
    HEADS.map(wire.to_field),
    st.tuples(HEADS.map(b64encode), st.binary(max_size=2)).map(lambda two: two[0][:-2] + two[1]),
)


@st.composite
def frames(draw: st.DrawFn) -> bytes:
    """Bytes like those of frames: lengths that are wrong, kinds that are unknown, payloads that are anything."""
    data = b""
    for payload in draw(st.lists(st.binary() | JSON.map(lambda value: json.dumps(value).encode()), max_size=4)):
        length = draw(st.one_of(st.just(len(payload)), st.just(len(payload)), st.integers(0, 2**32 - 1)))
        kind = draw(st.sampled_from(b"BTJJJ") | st.integers(0, 255))
        data += length.to_bytes(4, "big") + bytes([kind]) + payload
    return data + draw(st.binary(max_size=6))


CUTS = st.lists(st.integers(0, 400), max_size=6)
