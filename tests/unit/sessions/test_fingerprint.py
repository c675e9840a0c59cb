"""Whether workers sign their sessions alike."""

from __future__ import annotations

import itertools

import pytest
from itsdangerous import TimestampSigner

from gym_gunicorn.lifecycle.secret_check import secret_trouble
from gym_gunicorn.metrics.values import GENERATION, PID, SECRET, Figures, Reading
from gym_gunicorn.sessions.fingerprint import fingerprint

MINE = "00000000000a"
OTHERS = "00000000000b"


def reading(owner: str, *, secret: int, generation: int = 1, pid: int = 4321) -> Reading:
    made = Figures()
    made.values[SECRET], made.values[GENERATION], made.values[PID] = secret, generation, pid
    return made.reading(owner)


def test_same_secret_and_cookie_have_the_same_fingerprint() -> None:
    assert fingerprint(TimestampSigner("secret"), "session") == fingerprint(TimestampSigner("secret"), "session")


def test_secret_given_as_text_and_as_bytes_has_the_same_fingerprint() -> None:
    assert fingerprint(TimestampSigner("secret"), "session") == fingerprint(TimestampSigner(b"secret"), "session")


def test_every_other_secret_or_cookie_has_another_fingerprint() -> None:
    # The last three have the same bytes one after the other.
    pairs = [("secret", "session"), ("secret", "other"), ("Secret", "session"), ("", "x"), ("ab", "c"), ("a", "bc")]
    found = [fingerprint(TimestampSigner(secret), cookie) for secret, cookie in pairs]
    assert all(one != other for one, other in itertools.combinations(found, 2))


@pytest.mark.parametrize("secret", ["", "s", "é" * 1_000, "\0"])
def test_fingerprint_fits_into_a_value_and_is_never_the_sign_for_none(secret: str) -> None:
    assert 0 < fingerprint(TimestampSigner(secret), "session") < 2**64


def test_workers_with_one_secret_are_in_no_trouble() -> None:
    others = [reading(OTHERS, secret=7), reading("00000000000c", secret=7, generation=9)]
    assert secret_trouble(reading(MINE, secret=7), others) == (None, None)


def test_worker_alone_is_in_no_trouble() -> None:
    mine = reading(MINE, secret=7)
    assert secret_trouble(mine, []) == (None, None)
    assert secret_trouble(mine, [reading(MINE, secret=8)]) == (None, None)


def test_sibling_that_has_not_loaded_its_app_is_no_trouble() -> None:
    assert secret_trouble(reading(MINE, secret=7), [reading(OTHERS, secret=0)]) == (None, None)


def test_other_secret_in_a_worker_of_the_same_start_is_an_error_that_names_the_worker() -> None:
    error, note = secret_trouble(reading(MINE, secret=7), [reading(OTHERS, secret=8, pid=4321)])
    assert error is not None
    assert "(pid:4321)" in error
    assert "one secret" in error
    assert note is None


def test_other_secret_in_a_worker_from_before_a_reload_is_a_note() -> None:
    error, note = secret_trouble(reading(MINE, secret=7, generation=2), [reading(OTHERS, secret=8, generation=1)])
    assert error is None
    assert note is not None
    assert "reload" in note


def test_trouble_on_both_sides_is_told_of_both() -> None:
    others = [reading(OTHERS, secret=8, generation=1), reading("00000000000c", secret=9, generation=2)]
    error, note = secret_trouble(reading(MINE, secret=7, generation=2), others)
    assert error is not None
    assert note is not None


def test_what_is_told_holds_no_fingerprint() -> None:
    others = [reading(OTHERS, secret=0xABCDEF, generation=1), reading("00000000000c", secret=0xFEDCBA)]
    for text in secret_trouble(reading(MINE, secret=0x123456, generation=1), others):
        for secret in (0xABCDEF, 0xFEDCBA, 0x123456):
            assert text is None or (str(secret) not in text and f"{secret:x}" not in text)
