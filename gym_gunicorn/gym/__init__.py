"""Servers for RL environments: what a rollout keeps between requests stays in the memory of one worker.

Needs the extra ``gym``: ``pip install 'gym-gunicorn[gym]'``.
"""

from gym_gunicorn.gym.agent import AgentServer, Episode, EpisodeError
from gym_gunicorn.gym.model import ModelServer
from gym_gunicorn.gym.resources import ResourcesServer, tool

__all__ = ["AgentServer", "Episode", "EpisodeError", "ModelServer", "ResourcesServer", "tool"]
