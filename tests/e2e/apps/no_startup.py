"""An app whose startup raises."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from starlette.applications import Starlette


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    raise RuntimeError("the database is not there")
    yield


app = Starlette(lifespan=lifespan)
