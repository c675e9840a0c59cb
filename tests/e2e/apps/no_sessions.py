"""An app that keeps no sessions."""

from __future__ import annotations

import os

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route


async def pid(request: Request) -> JSONResponse:
    return JSONResponse({"pid": os.getpid()})


app = Starlette(routes=[Route("/pid", pid)])
