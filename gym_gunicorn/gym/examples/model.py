"""A model server in front of the OpenAI-compatible backend at ``BACKEND_URL``, with the key ``BACKEND_API_KEY``."""

from __future__ import annotations

import os

from gym_gunicorn.gym import ModelServer

app = ModelServer(
    backend_url=os.environ.get("BACKEND_URL", "http://127.0.0.1:8002"), api_key=os.environ.get("BACKEND_API_KEY")
).app
