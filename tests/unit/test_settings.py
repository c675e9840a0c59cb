from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest

from gym_gunicorn import SessionRouting
from gym_gunicorn.settings import SettingError, Settings, documented

BAD = [
    ("routing", "on"),
    ("routing", "AUTO"),
    ("routing", True),
    ("routing", None),
    ("routing", ["auto"]),
    ("owner_key", ""),
    ("owner_key", None),
    ("owner_key", b"gym_worker"),
    ("session_cookie", ""),
    ("session_cookie", None),
    ("session_cookie", 7),
    ("max_age", 0),
    ("max_age", -1),
    ("max_age", True),
    ("max_age", 1.5),
    ("max_age", "3600"),
    ("local_paths", "/static"),
    ("local_paths", ["static"]),
    ("local_paths", ["/static", ""]),
    ("local_paths", [b"/static"]),
    ("local_paths", b"/static"),
    ("local_paths", [None]),
    ("local_paths", None),
    ("local_paths", 5),
    ("expire_lost_cookie", 1),
    ("expire_lost_cookie", "yes"),
    ("expire_lost_cookie", None),
    ("placement", "fair"),
    ("placement", None),
    ("placement_paths", "/seed_session"),
    ("placement_paths", ["seed_session"]),
    ("forwarder", "http"),
    ("forwarder", None),
    ("max_forwards", 0),
    ("max_forwards", -5),
    ("max_forwards", None),
    ("max_forwards", False),
    ("max_forwards", 10.0),
    ("max_forwards", "10"),
    ("health_path", "health"),
    ("health_path", ""),
    ("health_path", 7),
    ("metrics_path", "metrics"),
    ("directory", ""),
    ("directory", None),
    ("directory", b"/tmp"),
]


def settings(**values: Any) -> Settings:
    return Settings(**values)


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_bad_value_is_refused_with_its_setting_and_itself(name: str, value: object) -> None:
    with pytest.raises(SettingError) as caught:
        settings(**{name: value})
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("value", ["", b"hunter2", 31337, ["hunter2"]], ids=repr)
def test_a_bad_secret_is_refused_and_never_shown(value: object) -> None:
    with pytest.raises(SettingError) as caught:
        settings(secret_key=value)
    assert "secret_key" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    assert "31337" not in str(caught.value)


def test_a_good_secret_is_not_shown_where_another_setting_is_bad() -> None:
    with pytest.raises(SettingError) as caught:
        settings(secret_key="hunter2", max_forwards=0)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("routing", "always"),
        ("routing", "off"),
        ("owner_key", "owner"),
        ("secret_key", "hunter2"),
        ("session_cookie", "sid"),
        ("max_age", None),
        ("max_age", 1),
        ("local_paths", []),
        ("local_paths", ["/static", "/login"]),
        ("local_paths", ("/",)),
        ("expire_lost_cookie", True),
        ("placement", "local"),
        ("placement", "balanced"),
        ("placement", max),
        ("placement_paths", ("/seed_session", "/x")),
        ("forwarder", "framed"),
        ("forwarder", "aiohttp"),
        ("max_forwards", 1),
        ("health_path", "/health"),
        ("metrics_path", "/"),
        ("directory", "run"),
    ],
)
def test_a_good_value_is_kept(name: str, value: object) -> None:
    assert getattr(settings(**{name: value}), name) == value


def test_a_setting_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="max_forwards"):
        Settings(max_forwards=0)


def test_settings_can_not_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(Settings(), "max_forwards", 5)  # noqa: B010  # mypy would refuse the plain assignment


def test_the_configuration_object_has_the_same_settings_and_defaults() -> None:
    parameters = inspect.signature(SessionRouting.__init__).parameters.values()
    assert {each.name: each.default for each in parameters if each.name != "self"} == {
        each.name: each.default for each in dataclasses.fields(Settings)
    }


def test_the_configuration_object_passes_every_setting_on() -> None:
    values: dict[str, Any] = {
        "routing": "always",
        "owner_key": "owner",
        "secret_key": "hunter2",
        "session_cookie": "sid",
        "max_age": 60,
        "session_id_key": "session_id",
        "token_header": "X-Token",
        "token_salt": "salt",
        "token_session_id_key": "sid",
        "token_path": "/tools",
        "local_paths": ("/static",),
        "expire_lost_cookie": True,
        "placement": "balanced",
        "placement_paths": ["/seed_session"],
        "forwarder": "aiohttp",
        "max_forwards": 7,
        "health_path": "/health",
        "metrics_path": "/metrics",
        "directory": "/run",
    }
    assert values.keys() == {each.name for each in dataclasses.fields(Settings)}
    assert dataclasses.asdict(SessionRouting(**values).settings) == values


def test_the_configuration_object_refuses_what_the_settings_refuse() -> None:
    with pytest.raises(SettingError, match="max_age"):
        SessionRouting(max_age=0)


def test_every_setting_is_documented_with_default_and_meaning() -> None:
    assert [(name, default) for name, default, _ in documented()] == [
        (each.name, repr(each.default)) for each in dataclasses.fields(Settings)
    ]
    assert all(meaning.endswith(".") for _, _, meaning in documented())
