"""The random mixture, for two minutes. ``scripts/soak`` runs it for as long as one likes."""

from __future__ import annotations

import asyncio
import os

from tests.faults.mixture import mixture

SECONDS = float(os.environ.get("GYM_GUNICORN_SOAK_SECONDS", "120"))


def test_nothing_is_lost_silently_whatever_breaks() -> None:
    # Of another seed each time with scripts/soak.
    seed = int(os.environ.get("GYM_GUNICORN_SOAK_SEED", "1"))
    with mixture(seed) as it:
        try:
            asyncio.run(it.run(SECONDS))
            it.end()
        finally:
            print(it.tally.line(), dict(it.tally.causes), dict(it.broken))
        it.tally.report("the random mixture")
