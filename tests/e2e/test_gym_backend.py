"""The scripted backend and the model server in front of it, asked by the official client."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageParam
from openai.types.responses import FunctionToolParam, Response, ResponseFunctionToolCall, ResponseInputParam

from tests.gunicorn_server import GunicornServer, errors, gunicorn_server, reserved_port

BACKEND = "gym_gunicorn.gym.examples.scripted_backend:app"
MODEL = "gym_gunicorn.gym.examples.model:app"

SCRIPT = {
    "script": [
        {"tool": "increment_counter", "arguments": {"count": 1}},
        {"tool": "get_counter_value"},
    ],
    "say": "all done",
}
TOOLS: list[FunctionToolParam] = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, "strict": False}
    for name in ("increment_counter", "get_counter_value")
]
CONVERSATION: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How are you? ü"},
    {"role": "assistant", "content": "Fine."},
    {"role": "user", "content": "And now?"},
]


@dataclass
class Servers:
    """``model`` has four workers in front of the one of ``backend``."""

    backend: GunicornServer
    model: GunicornServer

    def url(self, name: str) -> str:
        return {"directly": self.backend, "through the model server": self.model}[name].url


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with (
        gunicorn_server(app=BACKEND, workers=1) as backend,
        gunicorn_server(app=MODEL, workers=4, env={"BACKEND_URL": backend.url}) as model,
    ):
        yield Servers(backend, model)
        assert errors(backend.log()) == errors(model.log()) == []


@pytest.fixture(params=["directly", "through the model server"])
def client(request: pytest.FixtureRequest, servers: Servers) -> Iterator[OpenAI]:
    with client_of(servers.url(request.param)) as client:
        yield client


def client_of(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=60)


def digest(messages: list[ChatCompletionMessageParam]) -> str:
    said = [[message["role"], message.get("content")] for message in messages]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def post(url: str, path: str, body: object, headers: dict[str, str] | None = None) -> tuple[int, dict[str, str], bytes]:
    """Post JSON over a connection of its own; return status, headers and the bytes of the reply."""
    connection = HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


def test_script_is_played_a_function_call_at_a_time_and_ends_with_what_it_says(client: OpenAI) -> None:
    items: ResponseInputParam = [{"role": "user", "content": json.dumps(SCRIPT)}]
    called = []
    while True:
        reply = client.responses.create(model="scripted", input=items, tools=TOOLS)
        # The client takes what it gets; its models are strict when they are asked.
        Response.model_validate_json(reply.model_dump_json(exclude_unset=True))
        (output,) = reply.output
        if not isinstance(output, ResponseFunctionToolCall):
            break
        called.append((output.name, json.loads(output.arguments)))
        items += [
            {"type": "function_call", "call_id": output.call_id, "name": output.name, "arguments": output.arguments},
            {"type": "function_call_output", "call_id": output.call_id, "output": "{}"},
        ]
    assert called == [("increment_counter", {"count": 1}), ("get_counter_value", {})]
    assert output.type == "message"
    assert reply.output_text == "all done"
    assert reply.status == "completed"
    assert reply.usage is not None
    assert [tool.name for tool in reply.tools if tool.type == "function"] == ["increment_counter", "get_counter_value"]


def test_script_may_stand_in_a_plain_input_or_in_parts_of_a_message(client: OpenAI) -> None:
    text = json.dumps({"script": [], "say": "hello"})
    parts: ResponseInputParam = [
        {"role": "system", "content": "not the script"},
        {"role": "user", "content": [{"type": "input_text", "text": text}]},
    ]
    assert client.responses.create(model="scripted", input=text).output_text == "hello"
    assert client.responses.create(model="scripted", input=parts).output_text == "hello"


def test_chat_completion_proves_that_the_whole_conversation_arrived(client: OpenAI) -> None:
    reply = client.chat.completions.create(model="scripted", messages=CONVERSATION)
    ChatCompletion.model_validate_json(reply.model_dump_json(exclude_unset=True))
    assert reply.choices[0].message.content == f"4 messages, sha256 {digest(CONVERSATION)}"
    assert reply.choices[0].finish_reason == "stop"
    other = client.chat.completions.create(model="scripted", messages=[*CONVERSATION[1:], CONVERSATION[0]])
    assert other.choices[0].message.content != reply.choices[0].message.content


def test_streamed_chat_completion_says_the_same_in_many_chunks(client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="scripted", messages=CONVERSATION, stream=True, stream_options={"include_usage": True}
        )
    )
    for chunk in chunks:
        ChatCompletionChunk.model_validate_json(chunk.model_dump_json(exclude_unset=True))
    words = [chunk.choices[0].delta.content or "" for chunk in chunks[:-1]]
    assert "".join(words) == f"4 messages, sha256 {digest(CONVERSATION)}"
    assert len([word for word in words if word]) == 4
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None


def test_text_that_is_no_script_is_a_bad_request_that_says_what_a_script_is(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r'\{"script": ') as caught:
        client.responses.create(model="scripted", input="increment, please")
    assert caught.value.param == "input"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match=r"script\.0\.tool: Field required"):
        client.responses.create(model="scripted", input=json.dumps({"script": [{"name": "increment_counter"}]}))


def test_request_without_messages_is_a_bad_request_that_names_the_field(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="messages: ") as caught:
        client.chat.completions.create(model="scripted", messages=[])
    assert caught.value.param == "messages"


def test_streamed_response_is_refused_in_words(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="streams /v1/chat/completions only"):
        client.responses.create(model="scripted", input=json.dumps(SCRIPT), stream=True)


def test_what_the_backend_does_not_serve_is_not_found_in_openais_form(servers: Servers) -> None:
    with client_of(servers.backend.url) as client, pytest.raises(openai.NotFoundError, match="GET /v1/models"):
        client.models.list()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"model": "m", "input": json.dumps(SCRIPT)}),
        ("/v1/responses", {"model": "m", "input": "no script"}),
        ("/v1/chat/completions", {"model": "m", "messages": CONVERSATION}),
        ("/v1/chat/completions", {"model": "m", "messages": CONVERSATION, "stream": True}),
    ],
    ids=["a response", "an error", "a chat completion", "a stream"],
)
def test_reply_through_the_model_server_is_the_backends_to_the_byte(servers: Servers, path: str, body: Any) -> None:
    status, headers, content = post(servers.model.url, path, body)
    direct_status, direct_headers, direct_content = post(servers.backend.url, path, body)
    assert (status, content) == (direct_status, direct_content)
    assert headers["content-type"] == direct_headers["content-type"]


def test_model_server_with_four_workers_has_no_private_socket_and_says_why(servers: Servers) -> None:
    assert len(servers.model.workers()) == 4
    assert servers.model.owners() == set()
    assert servers.model.log().count("The app says that it keeps no sessions") == 1
    assert "found nothing to route by" not in servers.model.log()


def test_model_server_with_four_workers_sets_no_cookie_and_adds_no_key(servers: Servers) -> None:
    for _ in range(20):
        status, headers, content = post(servers.model.url, "/v1/responses", {"model": "m", "input": json.dumps(SCRIPT)})
        assert status == 200
        assert "set-cookie" not in headers
        assert b"gym_worker" not in content


def test_model_server_answers_whatever_session_a_caller_says_it_has(servers: Servers) -> None:
    cookie = {"Cookie": "session=nonsense; model_server_session=nonsense", "X-Gym-Session-Token": "nonsense"}
    body = {"model": "m", "messages": CONVERSATION}
    assert post(servers.model.url, "/v1/chat/completions", body, cookie)[0] == 200


def test_backend_that_is_down_is_a_server_error_with_the_reason() -> None:
    with (
        reserved_port() as port,
        gunicorn_server(app=MODEL, workers=1, env={"BACKEND_URL": f"http://127.0.0.1:{port}"}) as model,
        client_of(model.url) as client,
    ):
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="the backend does not answer") as caught:
                client.chat.completions.create(model="scripted", messages=CONVERSATION, stream=stream)
            assert caught.value.status_code == 502
            assert caught.value.type == "backend_error"
            assert "Connect call failed" in caught.value.message
            assert str(port) in caught.value.message
        assert errors(model.log()) == []
