"""A scripted OpenAI-compatible backend: for tests, and for trying agents out without a model.

It keeps no state: all that it says follows from the request.

``/v1/responses`` plays the script that the first user message holds as JSON,
``{"script": [{"tool": "increment_counter", "arguments": {"count": 1}}], "say": "done"}``:
a function call for each step, and the words at the end. ``/v1/chat/completions`` answers
with the number of messages that arrived and a digest of them, streams included.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gym_gunicorn.sessions.discovery import Declaration

_FORM = '{"script": [{"tool": "...", "arguments": {}}, ...], "say": "..."}'


class ScriptedCall(BaseModel):
    tool: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Script(BaseModel):
    """What the first user message holds, as JSON."""

    script: list[ScriptedCall]
    say: str = "done"


class ResponsesRequest(BaseModel):
    model: str
    input: str | list[dict[str, Any]]
    tools: list[dict[str, Any]] = Field(default_factory=list)
    stream: bool = False


class StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    stream: bool = False
    stream_options: StreamOptions | None = None


class BadRequest(Exception):
    """What a caller asks for can't be answered. ``param`` is the field at fault."""

    def __init__(self, message: str, param: str | None) -> None:
        super().__init__(message)
        self.param = param


app = FastAPI(title="scripted_backend")
# Any worker can answer, however many there are.
app.state.gym_gunicorn = Declaration(routed=False)


def answer_to(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return what ``/v1/chat/completions`` answers: a proof that these messages arrived, whole and in this order."""
    said = [[message.get("role"), message.get("content")] for message in messages]
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    return f"{len(said)} messages, sha256 {digest}"


@app.post("/v1/responses", response_model=None)
async def responses(body: ResponsesRequest) -> dict[str, Any]:
    if body.stream:
        raise BadRequest("this backend streams /v1/chat/completions only", "stream")
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    script = _script(items)
    step = sum(item.get("type") == "function_call_output" for item in items)
    output: dict[str, Any]
    if step < len(script.script):
        call = script.script[step]
        output = {
            "type": "function_call",
            "id": f"fc_{step}",
            "call_id": f"call_{step}",
            "name": call.tool,
            "arguments": json.dumps(call.arguments),
            "status": "completed",
        }
    else:
        output = {
            "type": "message",
            "id": f"msg_{step}",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": script.say, "annotations": []}],
        }
    asked, said = len(json.dumps(items)), len(json.dumps(output))
    return {
        "id": f"resp_{step}",
        "object": "response",
        # Nothing here depends on when it is asked.
        "created_at": 0,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": body.model,
        "output": [output],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": body.tools,
        # Characters, for want of a tokenizer.
        "usage": {
            "input_tokens": asked,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": said,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": asked + said,
        },
    }


@app.post("/v1/chat/completions", response_model=None)
async def chat_completions(body: ChatRequest) -> Response:
    text = answer_to(body.messages)
    asked = len(json.dumps(body.messages))
    usage = {"prompt_tokens": asked, "completion_tokens": len(text), "total_tokens": asked + len(text)}
    if body.stream:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        chunks = _chunks(body.model, text, usage if with_usage else None)
        return StreamingResponse(_events(chunks), media_type="text/event-stream")
    message = {"role": "assistant", "content": text, "refusal": None}
    return JSONResponse(
        {
            **_completion(body.model, "chat.completion"),
            "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
            "usage": usage,
        }
    )


def _completion(model: str, kind: str) -> dict[str, Any]:
    return {"id": "chatcmpl-0", "object": kind, "created": 0, "model": model}


def _chunks(model: str, text: str, usage: dict[str, int] | None) -> Iterator[dict[str, Any]]:
    """Yield a reply in chunks, a word each; and at the end ``usage``, where it is wanted."""

    def chunk(delta: dict[str, str], finish_reason: str | None = None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return {**_completion(model, "chat.completion.chunk"), "choices": [choice]}

    yield chunk({"role": "assistant", "content": ""})
    for place, word in enumerate(text.split(" ")):
        yield chunk({"content": word if place == 0 else f" {word}"})
    yield chunk({}, "stop")
    if usage is not None:
        yield {**_completion(model, "chat.completion.chunk"), "choices": [], "usage": usage}


async def _events(chunks: Iterable[dict[str, Any]]) -> AsyncIterator[str]:
    for chunk in chunks:
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def _script(items: Sequence[Mapping[str, Any]]) -> Script:
    """Return the script that the first user message holds.

    Raises:
        BadRequest: there is no such message, or it holds something else.
    """
    for item in items:
        if item.get("role") == "user":
            try:
                return Script.model_validate_json(_text(item.get("content")))
            except ValidationError as error:
                raise BadRequest(
                    f"the first user message is not {_FORM}: {_reasons(error.errors())}", "input"
                ) from None
    raise BadRequest(f"there is no user message; the first must be {_FORM}", "input")


def _text(content: object) -> str:
    """Return the text of a message's content, which is a string or a list of parts."""
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return str(content)


def _reasons(errors: Iterable[Mapping[str, Any]]) -> str:
    return "; ".join(f"{'.'.join(map(str, error['loc'])) or 'the text'}: {error['msg']}" for error in errors)


# Errors in OpenAI's form, so that its clients raise what they should.


def _error(status: int, message: str, param: str | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": None}}, status)


@app.exception_handler(BadRequest)
async def _bad_request(request: Request, error: Exception) -> Response:
    assert isinstance(error, BadRequest)
    return _error(400, str(error), error.param)


@app.exception_handler(RequestValidationError)
async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    # The first part says that it is the body.
    found = [{**item, "loc": item["loc"][1:]} for item in error.errors()]
    return _error(400, _reasons(found), ".".join(map(str, found[0]["loc"])) or None)


@app.exception_handler(HTTPException)
async def _not_served(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
