"""Where hypothesis keeps its files: with what pytest remembers, and not in a folder of its own in the repository."""

from __future__ import annotations

from hypothesis.configuration import set_hypothesis_home_dir

from tests.gunicorn_server import ROOT

set_hypothesis_home_dir(ROOT / ".pytest_cache" / "hypothesis")
