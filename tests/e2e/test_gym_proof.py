"""The end-to-end proof, and the examples that it is made with: each is a server in its own right."""

from __future__ import annotations

import asyncio
import pkgutil
from collections import Counter

import aiohttp
import pytest

from gym_gunicorn.gym import AgentServer, Episode, examples
from gym_gunicorn.gym.agent import RunRequest
from tests import gym_proof
from tests.gunicorn_server import errors, gunicorn_server
from tests.gym_proof import CONVERSATIONS, SESSIONS, Outcome, gather, http_client, post
from tests.workers import running

SCENARIOS = [pytest.param(scenario, id=scenario.play.__name__) for scenario in gym_proof.SCENARIOS]
EXAMPLES = [module.name for module in pkgutil.iter_modules(examples.__path__)]


def assert_all_right(outcome: Outcome, sessions: int) -> None:
    assert outcome.answers == {"right": sessions}
    assert errors(outcome.log) == []


def test_relay_agent_gets_the_full_reward_in_all_of_two_hundred_concurrent_episodes() -> None:
    assert_all_right(gym_proof.relay_agent_episodes(True), SESSIONS)


def test_simple_agent_gets_the_full_reward_in_all_of_two_hundred_concurrent_episodes() -> None:
    assert_all_right(gym_proof.simple_agent_episodes(True), SESSIONS)


def test_state_in_memory_is_found_again_by_all_sessions_and_lies_in_several_workers() -> None:
    outcome = gym_proof.state_in_memory(True)
    assert_all_right(outcome, SESSIONS)
    assert len(outcome.owners) > 1


def test_sandboxes_on_eight_workers_give_every_reward_right_and_leave_nothing() -> None:
    outcome = gym_proof.sandbox_sessions(True)
    assert_all_right(outcome, gym_proof.SANDBOXES)
    assert len(outcome.owners) > 1


def test_two_hundred_clients_count_right_over_mcp_without_cookies() -> None:
    outcome = gym_proof.mcp_without_cookies(True)
    assert_all_right(outcome, SESSIONS)
    assert len(outcome.owners) > 1


def test_mcp_clients_that_share_kept_alive_connections_count_right() -> None:
    outcome = gym_proof.mcp_over_one_pool(True)
    assert_all_right(outcome, SESSIONS)
    assert len(outcome.owners) > 1


def test_sessions_of_a_killed_worker_are_told_and_all_others_go_on() -> None:
    outcome = gym_proof.killed_worker(True)
    assert outcome.answers == {"right": SESSIONS}
    assert len(outcome.owners) > 1


def test_conversations_on_four_workers_lose_no_turn_and_mix_none_up() -> None:
    outcome = gym_proof.conversations(True)
    assert_all_right(outcome, CONVERSATIONS)
    assert len(outcome.owners) > 1


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_without_routing_the_same_scenario_goes_wrong(scenario: gym_proof.Scenario) -> None:
    outcome = scenario.play(False)
    assert outcome.answers.total() == scenario.wanted
    assert outcome.answers["right"] < scenario.wanted
    assert outcome.owners == set()


class Pausing(AgentServer):
    """An agent whose model takes the time that the request says, in seconds."""

    async def play(self, episode: Episode, body: RunRequest) -> None:
        await asyncio.sleep((body.model_extra or {})["pause"])
        await episode.call_tool("increment_counter", {"count": 1})


def test_pause_as_long_as_gunicorn_keeps_a_connection_ends_no_episode() -> None:
    async def play(resources_url: str) -> Counter[str]:
        agent = Pausing("a secret of the tests", resources_url=resources_url)
        async with running(agent.app, "", routed=False) as worker:

            async def one(number: int) -> str:
                # gunicorn keeps idle connections for 2 seconds; these are all around that.
                body = {"pause": 1.99 + 0.0001 * number, "verify": {"expected_count": 1}}
                async with http_client(cookies=True) as http:
                    status, answer = await post(http, f"{worker.url}/run", body)
                return "right" if answer == {"reward": 1.0} else f"{status}: {answer}"

            return await gather(*map(one, range(SESSIONS)))

    with gunicorn_server(app="gym_gunicorn.gym.examples.counter:app", workers=2) as server:
        assert asyncio.run(play(server.url)) == {"right": SESSIONS}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_is_served_by_its_name_alone(name: str) -> None:
    async def title(url: str) -> str:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/openapi.json") as response:
            found: str = (await response.json())["info"]["title"]
            return found

    with gunicorn_server(app=f"gym_gunicorn.gym.examples.{name}:app", workers=2) as server:
        assert name in asyncio.run(title(server.url))
        assert errors(server.log()) == []
