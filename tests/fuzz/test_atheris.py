"""The coverage-guided fuzzer of the readers, for a bounded number of runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

from tests.gunicorn_server import ROOT

RUNS = 30_000


def test_coverage_guided_fuzzer_finds_nothing_that_breaks_a_reader() -> None:
    if importlib.util.find_spec("atheris") is None:
        name = os.environ["PYTEST_CURRENT_TEST"].rpartition("::")[2].rpartition(" ")[0]
        pytest.skip(f"could not run: {name} needs atheris")
    command = [sys.executable, "-m", "tests.fuzz.atheris_readers", f"-runs={RUNS}", "-seed=1"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"Done {RUNS} runs" in ended.stderr
