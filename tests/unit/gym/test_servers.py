"""Resources servers, their tools over MCP, agents and model servers, with real sockets between them."""

from __future__ import annotations

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import pytest
from fastapi import FastAPI
from itsdangerous import URLSafeSerializer
from mcp import MCPError
from mcp_types import CallToolResult, TextContent
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp

from gym_gunicorn.gym import AgentServer, Episode, ModelServer, ResourcesServer, tool
from gym_gunicorn.gym.agent import RunRequest
from gym_gunicorn.gym.examples.conversation_agent import ConversationAgent
from gym_gunicorn.gym.examples.counter import CounterServer
from gym_gunicorn.gym.examples.relay_agent import RelayAgent
from gym_gunicorn.gym.examples.simple_agent import SimpleAgent
from tests.gunicorn_server import free_port
from tests.gym_proof import mcp_client
from tests.workers import Worker, running, socket_directory, two

SECRET = "a secret of the tests"
HEADER = "X-Gym-Session-Token"


class Seed(BaseModel):
    allowed: list[str] | None = None


class Text(BaseModel):
    text: str = Field(description="What to write.")


class Empty(BaseModel):
    pass


class Page(BaseModel):
    """What every handler of the notebook returns: whose it is, and what it holds."""

    session_id: str
    notes: list[str]


class Reward(BaseModel):
    reward: float


class Notebook(ResourcesServer):
    expose_tools_over_mcp = True

    def __init__(self, secret_key: str = SECRET) -> None:
        super().__init__(secret_key)
        self.notes: dict[str, list[str]] = {}

    def tools_for(self, session_id: str, body: BaseModel) -> Sequence[str] | None:
        assert isinstance(body, Seed)
        return body.allowed

    async def seed_session(self, session_id: str, body: Seed) -> Page:
        self.notes[session_id] = []
        return self.page(session_id)

    @tool
    async def write(self, session_id: str, body: Text) -> Page:
        """Write a note."""
        self.notes[session_id].append(body.text)
        return self.page(session_id)

    @tool
    async def read(self, session_id: str, body: Empty) -> Page:
        """Read all notes."""
        return self.page(session_id)

    @tool
    async def sharpen(self, session_id: str, body: Empty) -> Page:
        """Sharpen the pencil."""
        raise RuntimeError("the pencil broke")

    async def verify(self, session_id: str, body: Empty) -> Reward:
        return Reward(reward=1.0 if self.notes.pop(session_id, None) else 0.0)

    def page(self, session_id: str) -> Page:
        return Page(session_id=session_id, notes=self.notes[session_id])


class OtherNotebook(Notebook):
    """The same, but nothing is called as it is by default."""

    name = "diary"
    mcp_path = "/tools/over/mcp"
    token_header = "X-Diary"
    token_salt = "salt of the diary"


class PlainNotebook(Notebook):
    expose_tools_over_mcp = False


def notebook() -> ASGIApp:
    return Notebook().app


# Callers


class Answer:
    """A whole reply."""

    def __init__(self, status: int, content: bytes) -> None:
        self.status = status
        self.content = content

    def json(self) -> Any:
        return json.loads(self.content)

    def ok(self) -> Any:
        assert self.status == 200, self.content
        return self.json()

    def detail(self) -> str:
        detail = self.json()["detail"]
        assert isinstance(detail, str)
        return detail


async def post(http: aiohttp.ClientSession, url: str, body: object = None, **headers: str) -> Answer:
    async with http.post(url, json={} if body is None else body, headers=headers) as response:
        return Answer(response.status, await response.read())


def caller(*, cookies: bool = True) -> aiohttp.ClientSession:
    # aiohttp keeps no cookies of an IP address otherwise.
    jar = aiohttp.CookieJar(unsafe=True) if cookies else aiohttp.DummyCookieJar()
    return aiohttp.ClientSession(cookie_jar=jar, connector=aiohttp.TCPConnector(force_close=True))


def session_in(http: aiohttp.ClientSession, cookie: str) -> Any:
    """Return the session that a caller's cookie holds."""
    values = {item.key: item.value for item in http.cookie_jar}
    payload = values[cookie].split(".")[0]
    return json.loads(base64.b64decode(payload + "=" * (-len(payload) % 4)))


def read_token(headers: dict[str, str], header: str = HEADER, salt: str = Notebook.token_salt) -> Any:
    assert list(headers) == [header]
    return URLSafeSerializer(SECRET, salt=salt).loads(headers[header])


def text_of(result: CallToolResult) -> str:
    (content,) = result.content
    assert isinstance(content, TextContent)
    return content.text


async def seed(worker: Worker, allowed: list[str] | None = None) -> dict[str, str]:
    """Begin a session and keep its token alone: return the headers for MCP."""
    async with caller(cookies=False) as http:
        answer = (await post(http, f"{worker.url}/seed_session", {"allowed": allowed})).ok()
        headers: dict[str, str] = answer["mcp"]["headers"]
        return headers


@asynccontextmanager
async def alone(app: ASGIApp) -> AsyncIterator[Worker]:
    """Serve an app with one worker, which is not routed."""
    async with running(app, "", routed=False) as worker:
        yield worker


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


# What a server's author gets wrong


class WithoutBody(Notebook):
    @tool
    async def broken(self, session_id: str) -> Page:
        return self.page(session_id)


class WithoutAnnotation(Notebook):
    @tool
    async def broken(self, session_id, body) -> Page:  # type: ignore[no-untyped-def]  # this is what is wrong
        return self.page(session_id)


class WithADictForBody(Notebook):
    @tool
    async def broken(self, session_id: str, body: dict[str, Any]) -> Page:
        return self.page(session_id)


class WithoutReply(Notebook):
    @tool
    async def broken(self, session_id: str, body: Text) -> None:
        pass


class WithAnotherArgument(Notebook):
    @tool
    async def broken(self, session_id: str, body: Text, other: str) -> Page:
        return self.page(session_id)


class InAnotherOrder(Notebook):
    @tool
    async def broken(self, body: Text, session_id: str) -> Page:
        return self.page(session_id)


class NotAsync(Notebook):
    @tool
    def broken(self, session_id: str, body: Text) -> Page:
        return self.page(session_id)


@pytest.mark.parametrize(
    "server",
    [WithoutBody, WithoutAnnotation, WithADictForBody, WithoutReply, WithAnotherArgument, InAnotherOrder, NotAsync],
)
def test_tool_with_a_wrong_signature_is_refused_when_the_server_is_made(server: type[Notebook]) -> None:
    with pytest.raises(TypeError, match=r"broken must be `async def broken\(self, session_id: str, body: Model\)"):
        server()


class WithoutSeed(ResourcesServer):
    async def verify(self, session_id: str, body: Empty) -> Reward:
        return Reward(reward=0)


class WithoutVerify(ResourcesServer):
    async def seed_session(self, session_id: str, body: Empty) -> Empty:
        return body


@pytest.mark.parametrize(("server", "missing"), [(WithoutSeed, "seed_session"), (WithoutVerify, "verify")])
def test_server_without_a_method_that_it_needs_is_told_which(server: type[ResourcesServer], missing: str) -> None:
    with pytest.raises(TypeError, match=rf"{server.__name__} needs `async def {missing}\(self, session_id"):
        server(SECRET)


def test_server_without_a_secret_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Notebook\(secret_key=...\) needs a secret"):
        Notebook("")


# Bodies and routes


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/seed_session", {"allowed": "read"}, "allowed"),
        ("/write", {}, "text"),
        ("/write", {"text": 1}, "text"),
    ],
)
def test_bad_body_gets_422_naming_the_field(path: str, body: object, field: str) -> None:
    async def scenario() -> None:
        async with alone(notebook()) as worker, caller() as http:
            answer = await post(http, worker.url + path, body)
            assert answer.status == 422
            assert [error["loc"] for error in answer.json()["detail"]] == [["body", field]]

    run(scenario)


def test_bad_body_of_run_gets_422_naming_the_field() -> None:
    async def scenario() -> None:
        async with alone(RelayAgent(SECRET, resources_url="http://unused.invalid").app) as worker, caller() as http:
            answer = await post(http, f"{worker.url}/run", {"calls": [{"arguments": {}}]})
            assert answer.status == 422
            assert answer.json()["detail"][0]["loc"] == ["body", "calls", 0, "tool"]

    run(scenario)


def test_tools_and_verify_are_post_routes_that_share_the_session() -> None:
    async def scenario() -> None:
        async with alone(notebook()) as worker, caller() as http:
            await post(http, f"{worker.url}/seed_session")
            await post(http, f"{worker.url}/write", {"text": "a"})
            assert (await post(http, f"{worker.url}/read")).ok()["notes"] == ["a"]
            async with http.get(f"{worker.url}/read") as response:
                assert response.status == 405
            assert (await post(http, f"{worker.url}/verify")).ok() == {"reward": 1.0}

    run(scenario)


# Sessions


@pytest.mark.parametrize(
    ("server", "cookie"),
    [(Notebook, "notebook_session"), (OtherNotebook, "diary_session"), (PlainNotebook, "plain_notebook_session")],
)
def test_session_cookie_is_named_after_the_server(server: type[Notebook], cookie: str) -> None:
    async def scenario() -> None:
        async with alone(server().app) as worker, caller() as http:
            await post(http, f"{worker.url}/seed_session")
            assert [item.key for item in http.cookie_jar] == [cookie]

    run(scenario)


def test_servers_on_one_host_leave_one_another_their_sessions() -> None:
    async def scenario() -> None:
        async with alone(notebook()) as one, alone(OtherNotebook().app) as other, caller() as http:
            for worker in (one, other):
                await post(http, f"{worker.url}/seed_session")
            for worker in (one, other):
                assert (await post(http, f"{worker.url}/write", {"text": worker.url})).ok()["notes"] == [worker.url]

    run(scenario)


def test_session_id_is_the_same_in_the_handler_the_cookie_and_the_token() -> None:
    async def scenario() -> None:
        async with two(notebook) as (one, other), caller() as http:
            answer = (await post(http, f"{one.url}/seed_session")).ok()
            session_id = answer["session_id"]
            assert session_in(http, "notebook_session") == {"session_id": session_id, "gym_worker": one.owner_id}
            assert read_token(answer["mcp"]["headers"])["session_id"] == session_id
            for worker in (one, other):
                assert (await post(http, f"{worker.url}/read")).ok()["session_id"] == session_id

    run(scenario)


def test_each_session_has_an_id_of_its_own() -> None:
    async def scenario() -> None:
        async with alone(notebook()) as worker:
            seen = set()
            for _ in range(5):
                async with caller() as http:
                    seen.add((await post(http, f"{worker.url}/seed_session")).ok()["session_id"])
            assert len(seen) == 5

    run(scenario)


# Tokens


def test_seed_tells_how_to_reach_the_tools_over_mcp() -> None:
    async def scenario() -> None:
        async with alone(notebook()) as worker, caller() as http:
            answer = (await post(http, f"{worker.url}/seed_session")).ok()
            headers = answer["mcp"].pop("headers")
            assert list(headers) == [HEADER]
            assert answer["mcp"] == {"server_name": "notebook", "url_path": "/mcp", "transport": "streamable_http"}
            assert answer["notes"] == []

    run(scenario)


def test_server_that_does_not_expose_its_tools_says_and_serves_nothing_of_mcp() -> None:
    async def scenario() -> None:
        async with alone(PlainNotebook().app) as worker, caller() as http:
            answer = (await post(http, f"{worker.url}/seed_session")).ok()
            assert list(answer) == ["session_id", "notes"]
            assert (await post(http, f"{worker.url}/mcp")).status == 404

    run(scenario)


@pytest.mark.parametrize("allowed", [None, ["read"], []])
def test_token_holds_the_session_the_tools_where_they_are_named_and_the_owner(allowed: list[str] | None) -> None:
    async def scenario() -> None:
        async with two(notebook) as (one, _), caller() as http:
            answer = (await post(http, f"{one.url}/seed_session", {"allowed": allowed})).ok()
            wanted = {"session_id": answer["session_id"], "gym_worker": one.owner_id}
            if allowed is not None:
                wanted["tools"] = allowed
            assert read_token(answer["mcp"]["headers"]) == wanted

    run(scenario)


def test_token_names_the_owner_of_the_session_also_where_another_worker_receives_the_seed() -> None:
    async def scenario() -> None:
        async with two(notebook) as (one, other), caller() as http:
            await post(http, f"{one.url}/seed_session")
            again = (await post(http, f"{other.url}/seed_session")).ok()
            assert read_token(again["mcp"]["headers"])["gym_worker"] == one.owner_id

    run(scenario)


def test_token_and_cookie_of_a_single_worker_name_no_owner() -> None:
    async def scenario() -> None:
        async with alone(notebook()) as worker, caller() as http:
            answer = (await post(http, f"{worker.url}/seed_session")).ok()
            assert read_token(answer["mcp"]["headers"]) == {"session_id": answer["session_id"]}
            assert session_in(http, "notebook_session") == {"session_id": answer["session_id"]}

    run(scenario)


def test_header_salt_and_path_of_a_servers_own_choice_are_used_and_routed_by() -> None:
    async def scenario() -> None:
        async with two(lambda: OtherNotebook().app) as (one, other), caller(cookies=False) as http:
            answer = (await post(http, f"{one.url}/seed_session")).ok()["mcp"]
            assert answer["server_name"] == "diary"
            assert answer["url_path"] == "/tools/over/mcp"
            token = read_token(answer["headers"], "X-Diary", "salt of the diary")
            assert token["gym_worker"] == one.owner_id
            async with mcp_client(other.url, answer["headers"], path="/tools/over/mcp") as client:
                written = (await client.call_tool("write", {"text": "a"})).structured_content
                assert written == {"session_id": token["session_id"], "notes": ["a"]}
            async with mcp_client(one.url, answer["headers"], path="/tools/over/mcp") as client:
                assert (await client.call_tool("read", {})).structured_content == written
            assert (await post(http, f"{one.url}/mcp")).status == 404

    run(scenario)


# Tools over MCP


def test_tools_are_listed_with_name_docstring_and_schema() -> None:
    async def scenario() -> None:
        async with alone(notebook()) as worker, mcp_client(worker.url, await seed(worker)) as client:
            tools = {item.name: item for item in (await client.list_tools()).tools}
            assert set(tools) == {"read", "sharpen", "write"}
            assert tools["write"].description == "Write a note."
            assert tools["write"].input_schema == Text.model_json_schema()

    run(scenario)


def test_tools_can_be_listed_without_a_token() -> None:
    async def scenario() -> None:
        async with alone(notebook()) as worker, mcp_client(worker.url, {}) as client:
            assert len((await client.list_tools()).tools) == 3

    run(scenario)


def test_tool_over_mcp_and_over_http_act_on_the_same_session() -> None:
    async def scenario() -> None:
        async with two(notebook) as (one, other), caller() as http:
            headers = (await post(http, f"{one.url}/seed_session")).ok()["mcp"]["headers"]
            await post(http, f"{other.url}/write", {"text": "over HTTP"})
            async with mcp_client(other.url, headers) as client:
                result = await client.call_tool("write", {"text": "over MCP"})
            assert not result.is_error
            assert json.loads(text_of(result)) == result.structured_content
            assert (await post(http, f"{one.url}/read")).ok() == result.structured_content
            assert result.structured_content["notes"] == ["over HTTP", "over MCP"]

    run(scenario)


@pytest.mark.parametrize("allowed", [["read"], []], ids=["one", "none"])
def test_session_sees_and_calls_only_the_tools_that_it_may_use(allowed: list[str]) -> None:
    async def scenario() -> None:
        async with alone(notebook()) as worker, mcp_client(worker.url, await seed(worker, allowed)) as client:
            assert [item.name for item in (await client.list_tools()).tools] == allowed
            for name in ("read", "write"):
                result = await client.call_tool(name, {"text": "a"})
                if name in allowed:
                    assert not result.is_error
                else:
                    assert result.is_error
                    assert f"may not use the tool '{name}'" in text_of(result)

    run(scenario)


def test_call_without_a_token_is_an_error_that_names_the_header() -> None:
    async def scenario() -> None:
        async with alone(notebook()) as worker, mcp_client(worker.url, {}) as client:
            with pytest.raises(MCPError, match=f"{HEADER} with a session token is missing"):
                await client.call_tool("read", {})

    run(scenario)


BAD_TOKENS = [
    pytest.param(token, id=reason)
    for reason, token in {
        "malformed": "nonsense",
        "empty": "",
        "of another secret": URLSafeSerializer("another", salt=Notebook.token_salt).dumps({"session_id": "a"}),
        "of another salt": URLSafeSerializer(SECRET, salt="another").dumps({"session_id": "a"}),
        "without a session": URLSafeSerializer(SECRET, salt=Notebook.token_salt).dumps({"tools": ["read"]}),
        "a list": URLSafeSerializer(SECRET, salt=Notebook.token_salt).dumps(["session_id"]),
        "with a session that is a number": URLSafeSerializer(SECRET, salt=Notebook.token_salt).dumps({"session_id": 1}),
    }.items()
]


@pytest.mark.parametrize("token", BAD_TOKENS)
def test_bad_token_is_an_error_that_names_the_header_whether_tools_are_listed_or_called(token: str) -> None:
    async def scenario() -> None:
        async with two(notebook) as (one, _), mcp_client(one.url, {HEADER: token}) as client:
            with pytest.raises(MCPError, match=f"the header {HEADER}: the session token"):
                await client.call_tool("read", {})
            with pytest.raises(MCPError, match=f"the header {HEADER}: the session token"):
                await client.list_tools()

    run(scenario)


@pytest.mark.parametrize("token", ["nonsense", "n\xf6nsense"])
def test_bad_token_is_answered_with_a_json_rpc_error_on_the_wire(token: str) -> None:
    async def scenario() -> None:
        async with alone(notebook()) as worker, caller(cookies=False) as http:
            body = {"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": {"name": "read", "arguments": {}}}
            headers = {
                "Accept": "application/json, text/event-stream",
                "MCP-Protocol-Version": "2025-06-18",
                HEADER: token,
            }
            answer = (await post(http, f"{worker.url}/mcp", body, **headers)).json()
            assert answer["id"] == 7
            assert HEADER in answer["error"]["message"]

    run(scenario)


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    [
        pytest.param("erase", {}, "there is no tool 'erase'; there are read, sharpen, write", id="unknown tool"),
        pytest.param("verify", {}, "there is no tool 'verify'", id="a method that is no tool"),
        pytest.param("write", {}, "bad arguments for 'write': text: Field required", id="missing argument"),
        pytest.param("write", {"text": 1}, "bad arguments for 'write': text: ", id="argument of another type"),
        pytest.param("sharpen", {}, "the tool 'sharpen' failed: the pencil broke", id="a tool that raises"),
    ],
)
def test_what_a_model_can_mend_comes_back_as_a_result_that_says_so(
    name: str, arguments: dict[str, Any], reason: str
) -> None:
    async def scenario() -> None:
        async with alone(notebook()) as worker, mcp_client(worker.url, await seed(worker)) as client:
            result = await client.call_tool(name, arguments)
            assert result.is_error
            assert reason in text_of(result)
            # The session goes on.
            assert not (await client.call_tool("write", {"text": "a"})).is_error

    run(scenario)


def test_http_error_that_a_tool_raises_is_read_by_its_detail() -> None:
    async def scenario() -> None:
        async with alone(CounterServer(SECRET).app) as worker, caller() as http:
            headers = (await post(http, f"{worker.url}/seed_session")).ok()["mcp"]["headers"]
            await post(http, f"{worker.url}/verify", {"expected_count": 0})
            async with mcp_client(worker.url, headers) as client:
                result = await client.call_tool("get_counter_value", {})
            assert result.is_error
            assert "failed: this session was not seeded, or is verified already" in text_of(result)

    run(scenario)


def test_call_for_a_session_whose_worker_is_gone_is_an_error_that_says_so() -> None:
    async def scenario() -> None:
        async with two(notebook) as (one, other):
            headers = await seed(one)
            async with mcp_client(other.url, headers) as client:
                await client.call_tool("write", {"text": "a"})
                await one.stop()
                with pytest.raises(MCPError, match=r"Session gone: .* Start a new session"):
                    await client.call_tool("read", {})

    run(scenario)


# Agents


class Replies:
    """A model server that gives one reply after the other, the last of them for ever."""

    def __init__(self, *replies: object, status: int = 200) -> None:
        self.replies = list(replies)
        self.status = status
        self.asked: list[Any] = []
        self.app = FastAPI()
        self.app.add_api_route("/v1/{path:path}", self.answer, methods=["POST"])

    async def answer(self, request: Request) -> Response:
        self.asked.append(await request.json())
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        return PlainTextResponse(reply, self.status) if isinstance(reply, str) else JSONResponse(reply, self.status)


def calls(*named: tuple[str, object]) -> dict[str, object]:
    """A model's reply with tool calls; arguments that are no string are written as JSON."""
    return {
        "output": [
            {
                "type": "function_call",
                "call_id": f"call_{place}",
                "name": name,
                "arguments": arguments if isinstance(arguments, str) else json.dumps(arguments),
            }
            for place, (name, arguments) in enumerate(named)
        ]
    }


TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False}
    for name in ("increment_counter", "get_counter_value")
]
DONE: dict[str, object] = {"output": [{"type": "message", "role": "assistant", "content": []}]}


async def simple_run(
    model: Replies, *, resources: ASGIApp | None = None, expected_count: int = 0, **fields: Any
) -> Answer:
    """Have the simple agent play one episode of the counter, with real servers."""
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(alone(resources or CounterServer(SECRET).app))
        asked = await stack.enter_async_context(alone(model.app))
        simple = SimpleAgent(SECRET, resources_url=served.url, model_url=asked.url)
        agent = await stack.enter_async_context(alone(simple.app))
        http = await stack.enter_async_context(caller())
        body = {"input": "count", "tools": TOOLS, "verify": {"expected_count": expected_count}, **fields}
        return await post(http, f"{agent.url}/run", body)


async def relay_run(resources_url: str, *called: tuple[str, dict[str, Any]]) -> Answer:
    """Have the relay agent play one episode of the counter, with real servers."""
    async with alone(RelayAgent(SECRET, resources_url=resources_url).app) as agent, caller() as http:
        listed = [{"tool": name, "arguments": arguments} for name, arguments in called]
        return await post(http, f"{agent.url}/run", {"calls": listed, "verify": {"expected_count": 3}})


def test_relay_agent_plays_the_calls_in_order_and_returns_the_verified_reply() -> None:
    async def scenario() -> None:
        async with alone(CounterServer(SECRET).app) as resources:
            called = [("increment_counter", {"count": count}) for count in (1, 2)]
            assert (await relay_run(resources.url, *called)).ok() == {"reward": 1.0}

    run(scenario)


def test_simple_agent_makes_all_calls_of_a_step_and_shows_the_model_their_results() -> None:
    async def scenario() -> None:
        model = Replies(calls(("increment_counter", {"count": 2}), ("get_counter_value", {})), DONE)
        assert (await simple_run(model, expected_count=2)).ok() == {"reward": 1.0}
        results = [item for item in model.asked[1]["input"] if item.get("type") == "function_call_output"]
        assert [(item["call_id"], json.loads(item["output"])) for item in results] == [
            ("call_0", {"success": True}),
            ("call_1", {"count": 2}),
        ]

    run(scenario)


def test_model_that_does_not_stop_is_stopped_after_the_steps_that_it_has() -> None:
    async def scenario() -> None:
        model = Replies(calls(("get_counter_value", {})))
        answer = await simple_run(model, max_steps=3)
        assert answer.status == 502
        assert "had not stopped after 3 steps" in answer.detail()
        assert len(model.asked) == 3

    run(scenario)


@pytest.mark.parametrize(
    "reply",
    [
        pytest.param("good morning", id="no JSON"),
        pytest.param(["output"], id="a list"),
        pytest.param({}, id="no output"),
        pytest.param({"output": None}, id="output that is null"),
        pytest.param({"output": ["good morning"]}, id="output of strings"),
        pytest.param({"output": [{"type": "function_call"}]}, id="a call of nothing"),
        pytest.param(
            {"output": [{"type": "function_call", "name": "get_counter_value", "arguments": "{}"}]},
            id="a call without an ID",
        ),
        pytest.param(
            {"output": [{"type": "function_call", "name": 5, "call_id": "1", "arguments": "{}"}]},
            id="a call of a number",
        ),
        pytest.param(calls(("increment_counter", "count=1")), id="arguments that are no JSON"),
        pytest.param(calls(("increment_counter", [1])), id="arguments that are a list"),
    ],
)
def test_model_that_answers_nonsense_ends_the_episode_with_502_and_the_reason(reply: object) -> None:
    async def scenario() -> None:
        answer = await simple_run(Replies(reply))
        assert answer.status == 502, answer.content
        # Whose fault it is.
        assert answer.detail().startswith("model: ") or "/v1/responses: " in answer.detail()

    run(scenario)


@pytest.mark.parametrize("status", [400, 410, 429, 500])
def test_model_that_answers_with_an_error_ends_the_episode_with_502_and_that_error(status: int) -> None:
    async def scenario() -> None:
        answer = await simple_run(Replies({"error": {"message": "out of tokens"}}, status=status))
        # Never 410: the session is not what is gone.
        assert answer.status == 502
        assert f"/v1/responses: {status}: " in answer.detail()
        assert "out of tokens" in answer.detail()

    run(scenario)


@pytest.mark.parametrize("name", ["seed_session", "verify", "../verify", "verify?", "openapi.json"])
def test_model_that_calls_what_is_no_tool_of_its_own_ends_the_episode(name: str) -> None:
    async def scenario() -> None:
        # Both would pay: a counter seeded anew with what is expected, or verified before the end.
        cheat = calls((name, {"initial_count": 100, "expected_count": 0}))
        answer = await simple_run(Replies(cheat, DONE), expected_count=100)
        assert answer.status == 502, answer.content
        assert name in answer.detail()

    run(scenario)


@pytest.mark.parametrize(
    ("call", "status", "reason"),
    [
        pytest.param(("erase", {}), 404, "Not Found", id="unknown tool"),
        pytest.param(("increment_counter", {"count": "many"}), 422, "count", id="bad arguments"),
    ],
)
def test_tool_that_fails_ends_the_episode_with_502_its_path_and_its_answer(
    call: tuple[str, dict[str, Any]], status: int, reason: str
) -> None:
    async def scenario() -> None:
        async with alone(CounterServer(SECRET).app) as resources:
            answer = await relay_run(resources.url, call)
            assert answer.status == 502
            assert f"{resources.url}/{call[0]}: {status}: " in answer.detail()
            assert reason in answer.detail()

    run(scenario)


def test_resources_server_that_is_down_ends_the_episode_with_502_and_its_address() -> None:
    async def scenario() -> None:
        url = f"http://127.0.0.1:{free_port()}"
        answer = await relay_run(url)
        assert answer.status == 502
        assert f"{url}/seed_session: no answer" in answer.detail()

    run(scenario)


def test_session_that_is_lost_in_the_middle_of_an_episode_ends_it_with_410() -> None:
    async def scenario() -> None:
        with socket_directory() as directory:
            async with AsyncExitStack() as stack:
                # One address, behind which a worker takes another's place.
                listener = socket.create_server(("127.0.0.1", 0))
                first = await stack.enter_async_context(
                    running(CounterServer(SECRET).app, directory, listener=listener)
                )

                class Losing(RelayAgent):
                    async def play(self, episode: Episode, body: RunRequest) -> None:
                        await super().play(episode, body)
                        await first.stop()
                        await stack.enter_async_context(
                            running(CounterServer(SECRET).app, directory, listener=listener)
                        )

                agent = Losing(SECRET, resources_url=first.url)
                worker = await stack.enter_async_context(alone(agent.app))
                http = await stack.enter_async_context(caller())
                increment = [{"tool": "increment_counter", "arguments": {"count": 3}}]
                body = {"calls": increment, "verify": {"expected_count": 3}}
                answer = await post(http, f"{worker.url}/run", body)
            assert answer.status == 410
            assert f"{agent.resources_url}/verify: 410: " in answer.detail()
            assert "Session gone" in answer.detail()

    run(scenario)


def test_verified_reply_without_a_reward_ends_the_episode_with_502() -> None:
    async def scenario() -> None:
        resources = FastAPI()

        @resources.post("/{path}")
        async def answer(path: str) -> dict[str, bool]:
            return {"success": True}

        async with alone(resources) as worker:
            reply = await relay_run(worker.url)
            assert reply.status == 502, reply.content
            assert f"{worker.url}/verify" in reply.detail()
            assert "reward" in reply.detail()

    run(scenario)


def test_verified_reply_keeps_what_it_holds_beside_the_reward() -> None:
    async def scenario() -> None:
        resources = FastAPI()

        @resources.post("/{path}")
        async def answer(path: str) -> dict[str, Any]:
            return {"reward": 0.5, "why": {"score": [1, 2]}}

        async with alone(resources) as worker:
            assert (await relay_run(worker.url)).ok() == {"reward": 0.5, "why": {"score": [1, 2]}}

    run(scenario)


def test_episodes_of_one_agent_have_sessions_of_their_own() -> None:
    async def scenario() -> None:
        async with alone(CounterServer(SECRET).app) as resources:
            agent = RelayAgent(SECRET, resources_url=resources.url)
            async with alone(agent.app) as worker, caller() as http:

                async def episode(count: int) -> object:
                    increment = [{"tool": "increment_counter", "arguments": {"count": 1}}] * count
                    body = {"calls": increment, "verify": {"expected_count": count}}
                    return (await post(http, f"{worker.url}/run", body)).ok()["reward"]

                assert await asyncio.gather(*map(episode, range(10))) == [1.0] * 10

    run(scenario)


def test_agent_without_a_model_that_asks_one_says_so() -> None:
    class Asking(AgentServer):
        async def play(self, episode: Episode, body: RunRequest) -> None:
            await episode.ask_model("/v1/responses", {})

    async def scenario() -> None:
        async with alone(CounterServer(SECRET).app) as resources:
            async with alone(Asking(SECRET, resources_url=resources.url).app) as worker, caller() as http:
                answer = await post(http, f"{worker.url}/run")
            assert answer.status == 502
            assert "no model_url" in answer.detail()

    run(scenario)


def test_agent_that_plays_no_episode_serves_no_run() -> None:
    async def scenario() -> None:
        async with alone(CounterServer(SECRET).app) as resources:
            agent = ConversationAgent(SECRET, resources_url=resources.url, model_url="http://unused.invalid")
            async with alone(agent.app) as worker, caller() as http:
                assert (await post(http, f"{worker.url}/run")).status == 404

    run(scenario)


def completion(text: str) -> dict[str, object]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


def test_conversation_holds_no_turn_that_the_model_did_not_answer_well() -> None:
    async def scenario() -> None:
        model = Replies("nonsense", {"choices": []}, completion("yes"), completion("no"))
        async with alone(model.app) as asked:
            agent = ConversationAgent(SECRET, resources_url="http://unused.invalid", model_url=asked.url)
            async with alone(agent.app) as worker, caller() as http:
                answers = [await post(http, f"{worker.url}/chat", {"message": str(number)}) for number in range(4)]
        assert [answer.status for answer in answers] == [502, 502, 200, 200]
        assert answers[3].json() == {"message": "no", "turns": 2}
        assert model.asked[3]["messages"] == [
            {"role": "user", "content": "2"},
            {"role": "assistant", "content": "yes"},
            {"role": "user", "content": "3"},
        ]

    run(scenario)


def test_turns_that_come_at_the_same_time_are_taken_one_after_the_other() -> None:
    async def scenario() -> None:
        model = Replies(completion("yes"))
        async with alone(model.app) as asked:
            agent = ConversationAgent(SECRET, resources_url="http://unused.invalid", model_url=asked.url)
            async with alone(agent.app) as worker, caller() as http:
                await post(http, f"{worker.url}/chat", {"message": "0"})
                more = [post(http, f"{worker.url}/chat", {"message": str(number)}) for number in range(1, 6)]
                turns = sorted(answer.ok()["turns"] for answer in await asyncio.gather(*more))
        assert turns == [2, 3, 4, 5, 6]
        assert [len(body["messages"]) for body in model.asked] == [1, 3, 5, 7, 9, 11]

    run(scenario)


# Model servers


def test_model_server_sends_the_backend_its_own_key_and_not_the_callers() -> None:
    async def scenario() -> None:
        seen = []
        backend = FastAPI()

        @backend.post("/v1/responses")
        async def answer(request: Request) -> dict[str, bool]:
            seen.append((request.headers.get("authorization"), request.headers.get("cookie")))
            return {"ok": True}

        async with alone(backend) as asked:
            for key in ("a key", None):
                # The slash at the end is one that users write.
                server = ModelServer(backend_url=f"{asked.url}/", api_key=key)
                async with alone(server.app) as worker, caller() as http:
                    headers = {"Authorization": "Bearer the caller's", "Cookie": "a=b"}
                    assert (await post(http, f"{worker.url}/v1/responses", **headers)).ok() == {"ok": True}
        assert seen == [("Bearer a key", None), (None, None)]

    run(scenario)


def test_model_server_hands_on_an_error_and_when_to_try_again() -> None:
    async def scenario() -> None:
        backend = FastAPI()

        @backend.post("/v1/responses")
        async def answer() -> Response:
            return JSONResponse({"error": {"message": "slow down"}}, 429, {"Retry-After": "7", "X-Request-Id": "r1"})

        async with (
            alone(backend) as asked,
            alone(ModelServer(backend_url=asked.url).app) as worker,
            caller() as http,
            http.post(f"{worker.url}/v1/responses", json={}) as response,
        ):
            assert response.status == 429
            assert await response.json() == {"error": {"message": "slow down"}}
            assert response.headers["Retry-After"] == "7"
            assert response.headers["X-Request-Id"] == "r1"

    run(scenario)


def test_stream_that_the_backend_breaks_off_does_not_pass_for_a_whole_one() -> None:
    async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        writer.write(b"9\r\ndata: {}\n\r\n")
        await writer.drain()
        writer.close()

    async def scenario() -> None:
        server = await asyncio.start_server(break_off, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            async with alone(ModelServer(backend_url=f"http://127.0.0.1:{port}").app) as worker, caller() as http:
                with pytest.raises(aiohttp.ClientError):
                    await post(http, f"{worker.url}/v1/chat/completions")

    run(scenario)


def test_model_server_needs_no_secret_and_has_no_session() -> None:
    server = ModelServer(backend_url="http://unused.invalid")
    assert server.app.user_middleware == []
    assert server.declaration().routed is False


@pytest.mark.parametrize(
    ("body", "field"),
    [
        pytest.param(b'{"initial_count": NaN}', "initial_count", id="no number"),
        pytest.param(b'{"initial_count": 1e999}', "initial_count", id="infinite"),
        pytest.param(b'{"initial_count": "\\ud800"}', "initial_count", id="half of a surrogate pair"),
        pytest.param(b"[]", "body", id="a list"),
        pytest.param(b"nonsense", "body", id="no JSON"),
    ],
)
def test_body_that_can_not_be_written_back_gets_422_with_the_name_of_its_field(body: bytes, field: str) -> None:
    async def scenario() -> None:
        with socket_directory() as directory:
            async with running(CounterServer(SECRET).app, directory) as worker, aiohttp.ClientSession() as http:
                headers = {"Content-Type": "application/json"}
                async with http.post(worker.url + "/seed_session", data=body, headers=headers) as response:
                    assert response.status == 422
                    (reason,) = (await response.json())["detail"]
                    assert field in reason["loc"]
                    assert "input" not in reason

    asyncio.run(scenario())
