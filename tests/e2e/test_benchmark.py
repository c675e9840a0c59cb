"""The benchmark runs, finds every answer right, and says what it leaves out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.setups import _missing

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks", "--quick", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_every_answer_is_right_in_every_set_up_that_can_be(tmp_path: Path) -> None:
    setups = "one,stock,ours-framed,ours-aiohttp"
    works = "json-pooled,json-each,upload-256k,reply-64k,events,websocket,create"
    done = run("--works", works, "--setups", setups, "--base", "one", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    found = json.loads((tmp_path / "benchmark.json").read_text())
    assert set(found["works"]) == set(works.split(","))
    for work, results in found["works"].items():
        assert set(results) == {"one", "stock", "ours-framed", "ours-aiohttp"}, work
        for name in ("one", "ours-framed", "ours-aiohttp"):
            result = results[name]
            assert not result["fault"], (work, name, result["fault"])
            assert len(result["cpu_us"]) == 3
            assert min(result["cpu_us"]) > 0
    report = (tmp_path / "benchmark.md").read_text()
    assert "| 4 routed workers, framed |" in report
    assert "benchmark.svg" in report
    assert (tmp_path / "benchmark.svg").read_text().startswith("<svg")


def test_growth_is_measured(tmp_path: Path) -> None:
    done = run("--growth", "--setups", "ours-framed", "--sessions", "200", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]
    found = json.loads((tmp_path / "growth.json").read_text())
    assert not found["faults"]
    assert (tmp_path / "growth.svg").read_text().startswith("<svg")
    assert "sessions" in (tmp_path / "growth.md").read_text()


def test_what_it_does_not_know_is_named() -> None:
    done = run("--works", "nonsense")
    assert done.returncode == 2
    assert "there is no work 'nonsense'" in done.stderr


def test_proxy_that_is_not_installed_is_named_with_its_package() -> None:
    assert _missing("a-proxy-of-nobody", "its-package") == (
        "a-proxy-of-nobody is not installed (Debian: apt install its-package)"
    )
