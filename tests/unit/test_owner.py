from __future__ import annotations

import os

import pytest

from gym_gunicorn.owner import is_owner_id, new_owner_id


def test_new_owner_ids_have_the_exact_form() -> None:
    assert all(is_owner_id(new_owner_id()) for _ in range(1000))


def test_new_owner_ids_do_not_repeat() -> None:
    assert len({new_owner_id() for _ in range(10_000)}) == 10_000


def test_an_owner_id_is_a_plain_file_name() -> None:
    owner_id = new_owner_id()
    assert os.path.basename(os.path.normpath(owner_id)) == owner_id


@pytest.mark.parametrize("value", ["0" * 12, "0123456789ab", "ffffffffffff"])
def test_twelve_lower_case_hexadecimal_digits_are_an_owner_id(value: str) -> None:
    assert is_owner_id(value)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "0" * 11,
        "0" * 13,
        "ABCDEF012345",
        "ghijklmnopqr",
        "../../x",
        "../../../../",
        "/etc/passwd0",
        "0123456789a.",
        "0123456789a/",
        "0123456789a\0",
        "0123456789ab\n",
        "\n0123456789ab",
        " 0123456789a",
        "0x0123456789",
        "+00000000001",
        "0000_0000_00",
        "\N{ARABIC-INDIC DIGIT ONE}" * 12,
        "\N{FULLWIDTH DIGIT ONE}" * 12,
        "\N{MATHEMATICAL BOLD DIGIT ONE}" * 12,
        b"0123456789ab",
        123456789012,
        ["0123456789ab"],
        {"0123456789ab": 1},
        True,
        None,
    ],
    ids=repr,
)
def test_nothing_else_is_an_owner_id(value: object) -> None:
    assert not is_owner_id(value)
