"""The random mixture, for two minutes. ``scripts/soak`` runs it for as long as one likes."""

from __future__ import annotations

import asyncio
import os
import random

from tests.faults.mixture import mixture

SECONDS = float(os.environ.get("GYM_GUNICORN_SOAK_SECONDS", "120"))


def test_nothing_is_lost_silently_whatever_breaks() -> None:
    seed = int(os.environ.get("GYM_GUNICORN_SOAK_SEED", random.randrange(10**6)))
    print(f"to repeat it: GYM_GUNICORN_SOAK_SEED={seed}")
    with mixture(seed) as it:
        try:
            asyncio.run(it.run(SECONDS))
            it.end()
        finally:
            print(it.tally.line(), dict(it.tally.causes), dict(it.broken))
        it.tally.report("the random mixture")
