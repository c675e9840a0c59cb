"""Coverage-guided fuzzing of the readers.

``python -m tests.fuzz.atheris_readers [-runs=100000] [other options of libFuzzer] [folder of seeds]``

The properties are those of the other fuzz tests; here the bytes are chosen by which
branches of the readers they reach. Ends with status 0 after ``-runs`` runs, and where a
property does not hold, with its traceback and the bytes. Needs atheris, which is no
dependency of the tests: ``pip install atheris``.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from base64 import b64encode
from pathlib import Path

atheris = importlib.import_module("atheris")

with atheris.instrument_imports(
    include=["gym_gunicorn", "itsdangerous", "starlette.requests", "http.cookies", "json", "base64"]
):
    import msgspec
    from starlette.types import Scope

    from gym_gunicorn.forwarding import wire
    from tests.fuzz import properties
    from tests.fuzz.oracle import Fields

DEFAULT_RUNS = 100_000

SCOPE: Scope = {
    "type": "http",
    "path": "/",
    "raw_path": b"/",
    "query_string": b"a=b",
    "client": ("::1", 1),
    "server": None,
    "headers": [(b"cookie", b"a=b")],
}


HEADS: list[list[object]] = [
    [b"", b"", None, None, []],
    [b"", b"", ["", 0], ["", None], [[b"", b""]]],
    [0, b"", None, None, []],
    ["", b"", None, None, []],
]
REPLIES: list[list[object]] = [[[], 0], [[[b"", b""]], 0], [[[b"", 0]], 0], [[["", b""]], 0]]


def check(data: bytes) -> None:
    """Check one property; the first byte says which, the others are what its reader reads."""
    if not data:
        return
    choice, rest = data[0] % 9, data[1:]
    if choice == 0:
        properties.cookies_are_read_as_by_starlette(_fields(b"cookie", rest))
    elif choice == 1:
        properties.signed_sessions_are_read_as_by_starlette(rest)
    elif choice == 2:
        properties.signed_sessions_are_read_as_by_starlette(b64encode(rest))
    elif choice == 3:
        properties.tokens_are_read_as_by_itsdangerous(_fields(properties.HEADER.encode(), rest))
    elif choice == 4:
        properties.signed_payloads_are_read_as_by_itsdangerous(rest)
    elif choice == 5:
        properties.heads_are_read_or_refused(rest)
    elif choice == 6:
        properties.replies_are_read_or_refused(rest)
    elif choice == 7:
        cuts, data = rest[:3], rest[3:]
        properties.frames_are_read_or_refused(data, cuts)
    else:
        head = properties.fields_are_read_or_refused(rest)
        if head is not None:
            properties.heads_are_read_or_refused(head)
            properties.replies_are_read_or_refused(head)


def _fields(name: bytes, value: bytes) -> Fields:
    return [(name, line) for line in value.split(b"\n")]


def seeds() -> list[bytes]:
    """Return bytes to begin with: for each property some that its reader can read."""
    session = json.dumps({properties.KEY: "a" * 12}).encode()
    cookie = properties.stopped_signer().sign(b64encode(session))
    token = properties.SERIALIZER.dumps({properties.KEY: "a" * 12}).encode()
    event = {"type": "websocket.disconnect", "code": 1000, "reason": "", "headers": [(b"a", b"b")], "body": b"c"}
    return [
        b"\0a=b; session=" + cookie + b'\nsession="' + cookie + b'"',
        b"\1" + b64encode(session),
        b"\2" + session,
        b"\3" + token,
        b"\4" + token.partition(b".")[0],
        b"\4" + properties.SERIALIZER.dump_payload({properties.SESSION_ID_KEY: "b" * 12 + "-" + "0" * 32}),
        b"\5" + wire.encode_head(SCOPE),
        b"\6" + wire.encode_reply({"status": 200, "headers": [(b"a", b"\xff")]}, 7),
        # Short, so that a change of few bytes leaves MessagePack that is wrong in one place.
        *(b"\5" + msgspec.msgpack.encode([1, {"type": "http"}, *others]) for others in HEADS),
        *(b"\6" + msgspec.msgpack.encode([1, 0, *others]) for others in REPLIES),
        b"\5" + msgspec.msgpack.encode([2]),
        b"\5\x97\1\x81\xa4type\xdd\xff\xff\xff\xff",
        b"\6\x94\1\xdf\xff\xff\xff\xff",
        b"\7\0\0\0" + wire.encode_frame({"type": "a"}),
        b"\7\0\0\0" + wire.encode_frame({"type": "a", "headers": []}),
        b"\7\0\0\0" + wire.encode_frame({"type": "a", "body": b""}),
        b"\7\5\6\7" + wire.encode_frame(event) + wire.encode_frame({"text": "a"}) + wire.encode_frame({"bytes": b"a"}),
        b"\x08" + wire.to_field(wire.encode_head(SCOPE)).encode(),
        b"\x08" + wire.to_field(wire.encode_reply({"status": 200}, 7)).encode(),
    ]


def main() -> int:
    """Fuzz until the runs are done, from the seeds or from a folder of them that is the last argument."""
    *options, last = [f"-runs={DEFAULT_RUNS}", *sys.argv[1:]]
    if os.path.isdir(last):
        # Ends the process, without a word to Python. Of two settings of one option the last counts.
        atheris.Setup([sys.argv[0], *options, last], check)
        atheris.Fuzz()
    with tempfile.TemporaryDirectory(prefix="gg-fuzz-") as folder:
        for number, seed in enumerate(seeds()):
            (Path(folder) / str(number)).write_bytes(seed)
        # What breaks a property is printed; no file of it is left behind.
        command = [sys.executable, "-m", "tests.fuzz.atheris_readers", *options, last, f"-artifact_prefix={folder}/"]
        return subprocess.run([*command, folder], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
