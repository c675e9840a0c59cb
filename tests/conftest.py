"""How properties are tested: with the same values each time, or with more, and others each time, on request.

What fails then fails again. ``GYM_GUNICORN_FUZZ_EXAMPLES=20000 pytest tests`` looks further.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

from tests.gunicorn_server import ROOT

_EXAMPLES = os.environ.get("GYM_GUNICORN_FUZZ_EXAMPLES")

# With what pytest remembers, and not in a folder of its own in the repository.
set_hypothesis_home_dir(ROOT / ".pytest_cache" / "hypothesis")
settings.register_profile(
    "suite",
    max_examples=int(_EXAMPLES or 400),
    derandomize=_EXAMPLES is None,
    database=None,
    # Tests assert no times.
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("suite")
