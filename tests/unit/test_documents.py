"""What README, SECURITY and CHANGELOG name is there: files, settings, metrics, extras, commands and scripts."""

from __future__ import annotations

import importlib
import os
import re
import socket
import tomllib
from pathlib import Path
from typing import Any

from gunicorn.config import KNOWN_SETTINGS, Config
from gunicorn.instrument.statsd import Statsd
from prometheus_client.parser import text_string_to_metric_families

import gym_gunicorn
from gym_gunicorn.metrics.prometheus import render
from gym_gunicorn.metrics.statsd import report
from gym_gunicorn.metrics.titles import master_title, worker_title
from gym_gunicorn.metrics.values import Figures
from gym_gunicorn.settings import Settings, documented

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = {name: (ROOT / name).read_text() for name in ("README.md", "SECURITY.md", "CHANGELOG.md")}
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())

SETTINGS = {name for name, _, _ in documented()}
GUNICORNS = {str(setting.name) for setting in KNOWN_SETTINGS}
READING = Figures().reading("0123456789ab")


def named(pattern: str, *documents: str) -> dict[str, list[str]]:
    """Return what ``pattern`` finds in these documents, or in all, and in which of them it is."""
    found: dict[str, list[str]] = {}
    for document in documents or DOCUMENTS:
        for name in re.findall(pattern, DOCUMENTS[document]):
            found.setdefault(name, []).append(document)
    return found


def assert_known(names: dict[str, list[str]], known: set[str]) -> None:
    assert names, "the documents name none: look at the pattern"
    unknown = {name: documents for name, documents in names.items() if name not in known}
    assert not unknown, f"named, and not there: {unknown}"


# Files


def test_sdist_holds_every_document_and_nothing_that_is_not_there() -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert {"README.md", "SECURITY.md", "CHANGELOG.md", "LICENSE"} <= set(included)
    assert [name for name in included if not (ROOT / name).exists()] == []


def test_every_script_that_is_named_is_there_and_executable() -> None:
    scripts = named(r"\bscripts/[\w.-]*\w")
    assert_known(scripts, {name for name in scripts if (ROOT / name).is_file() and os.access(ROOT / name, os.X_OK)})


# Settings


def test_every_argument_of_session_routing_that_is_shown_is_a_setting() -> None:
    arguments: dict[str, list[str]] = {}
    for call, documents in named(r"SessionRouting\(([^()]*)\)").items():
        for name in re.findall(r"(\w+)\s*=", re.sub(r"#.*|\"[^\"]*\"|'[^']*'", "", call)):
            arguments.setdefault(name, []).extend(documents)
    assert_known(arguments, SETTINGS)


def test_every_word_in_code_that_looks_like_a_setting_is_one_of_ours_or_of_gunicorns() -> None:
    known = {*gym_gunicorn.__all__, Settings.owner_key, *metric_names()}
    assert_known(named(r"`([a-z]+(?:_[a-z]+)+)`"), SETTINGS | GUNICORNS | known)


def test_every_word_in_code_that_is_given_a_value_is_a_setting_or_a_key_of_a_title() -> None:
    titles = worker_title("x", READING) + " state=stopping " + master_title("x", 1, "/tmp/x")
    # "key=value" is how titles are described.
    known = {"key", *re.findall(r"(\w+)=", titles)}
    assert_known(named(r"`([a-z_]+)="), SETTINGS | GUNICORNS | known)


# Metrics


def metric_names() -> set[str]:
    """Return the names of all metrics, and of their samples, that a server tells Prometheus."""
    families = list(text_string_to_metric_families(render([READING], None).decode()))
    return {family.name for family in families} | {sample.name for family in families for sample in family.samples}


def test_every_metric_that_is_named_is_told_to_prometheus() -> None:
    metrics = metric_names()
    # What ends with "_" stands for all that begin so.
    beginnings = {name[: end + 1] for name in metrics for end, letter in enumerate(name) if letter == "_"}
    assert_known(named(r"\bgym_gunicorn_[a-z_]+"), metrics | beginnings)


def test_every_metric_that_is_named_is_told_to_statsd() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as statsd:
        statsd.bind(("127.0.0.1", 0))
        statsd.settimeout(60)
        config = Config()
        config.set("statsd_host", f"127.0.0.1:{statsd.getsockname()[1]}")
        log = Statsd(config)
        assert log.sock is not None
        with log.sock:
            report(log, dict.fromkeys(READING.counters(), 1), {}, [READING])
            log.gauge("the.end", 1)
            # gunicorn's own.
            told = {"gunicorn.workers"}
            while "the.end" not in told:
                told.add(statsd.recv(1024).decode().partition(":")[0])
    assert_known(named(r"\bgunicorn\.(?:requests|sessions|websockets|workers)(?:\.\w+)*"), told)


# Extras and commands


def test_every_extra_that_is_named_can_be_installed() -> None:
    lists = {
        **named(r"gym-gunicorn\[([\w, -]+)\]"),
        **named(r"\bextras? `([\w-]+)`", "README.md", "CHANGELOG.md"),
    }
    extras = {name.strip(): documents for names, documents in lists.items() for name in names.split(",")}
    assert_known(extras, set(PROJECT["project"]["optional-dependencies"]))


def test_every_extra_that_can_be_installed_is_in_the_changelog_or_the_readme() -> None:
    for extra in PROJECT["project"]["optional-dependencies"]:
        assert any(f"[{extra}]" in text or f"extra `{extra}`" in text for text in DOCUMENTS.values()), extra


def test_every_command_that_is_named_is_there() -> None:
    commands = named(r"(?:`|\$ )gym-gunicorn\s+([a-z]+)")
    known = set()
    for name in commands:
        module = importlib.import_module(f"gym_gunicorn.cli.{name}")
        if callable(getattr(module, "run", None)):
            known.add(name)
    assert_known(commands, known)
