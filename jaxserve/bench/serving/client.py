"""One request to an OpenAI-compatible server: its body, its stream, and the arrival time of each chunk.

Uses aiohttp: a chunk costs a third of the CPU time that it costs with httpx, and half of that under uvloop.
"""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from jaxserve.bench.serving.options import ServingOptions
from jaxserve.errors import InvalidRequest

KEEPALIVE_SECONDS = 2.0  # shorter than any server's, so that no connection is closed while a request is written to it
INTERRUPTED = ("interrupted", "the run was ended before the answer was whole")
_CONNECT_SECONDS = 30.0
_MAX_ERROR_LENGTH = 300


class Outcome(msgspec.Struct, kw_only=True):
    """The outcome of one request; times are time.perf_counter seconds.

    `chunk_times` holds the times of chunks with text, or that of the last chunk if none had text. `num_prompt_tokens`
    and `num_output_tokens` are counted by the server; `is_counted` is false if it sent no usage, and they are then the
    workload's prompt length and the number of chunks. `kind` and `error` are None for a request that was answered
    completely.
    """

    index: int
    due: float
    sent: float
    ended: float = 0.0
    chunk_times: list[float] = msgspec.field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    is_counted: bool = False
    finish_reason: str | None = None
    kind: str | None = None
    error: str | None = None


class ServedModel(msgspec.Struct, frozen=True):
    """One entry of /v1/models."""

    id: str
    max_model_len: int | None = None
    root: str | None = None


class _ModelList(msgspec.Struct, frozen=True):
    data: list[ServedModel]


class _Delta(msgspec.Struct, frozen=True):
    content: Any = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None
    refusal: Any = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    def has_text(self) -> bool:
        delta = self.delta
        if delta is None:
            return bool(self.text)
        return bool(delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls or delta.refusal)


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


class Client:
    """A connection pool to one server. Use as an async context manager."""

    def __init__(self, options: ServingOptions):
        self.base_url = options.base_url
        headers = {"accept-encoding": "identity"}
        if options.api_key is not None:
            headers["authorization"] = f"Bearer {options.api_key}"
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_SECONDS)
        timeout = aiohttp.ClientTimeout(total=options.timeout, sock_connect=_CONNECT_SECONDS)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, timeout=timeout)
        path = "/completions" if options.endpoint == "completions" else "/chat/completions"
        self._url = self.base_url + path

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def models(self) -> list[ServedModel] | None:
        """Return the served models, or None if the server has no such route. Raises InvalidRequest if it does not
        answer.
        """
        url = self.base_url + "/models"
        try:
            async with self._session.get(url) as response:
                answer = await response.read()
                if response.status == 404:
                    return None
                if response.status != 200:
                    message = f"{url} answered {response.status}: {_error_text(answer)}"
                    raise InvalidRequest(message, param="api_key" if response.status in (401, 403) else "url")
            return msgspec.json.decode(answer, type=_ModelList).data
        except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError) as error:
            raise InvalidRequest(f"{url}: {_describe(error)}", param="url") from error

    async def send(self, body: bytes, outcome: Outcome) -> None:
        """Send one request and record what arrives, or what goes wrong, in `outcome`.

        Raises only asyncio.CancelledError, after recording it.
        """
        outcome.sent = time.perf_counter()
        try:
            await self._stream(body, outcome)
        except asyncio.CancelledError:
            _fail(outcome, *INTERRUPTED)
            raise
        except TimeoutError:
            _fail(outcome, "timeout", "no whole answer within the timeout")
        except (aiohttp.ClientError, OSError) as error:
            _fail(outcome, "connection", _describe(error))
        except msgspec.MsgspecError as error:
            _fail(outcome, "malformed", _describe(error))
        finally:
            outcome.ended = time.perf_counter()

    async def _stream(self, body: bytes, outcome: Outcome) -> None:
        headers = {"content-type": "application/json"}
        async with self._session.post(self._url, data=body, headers=headers) as response:
            if response.status != 200:
                _fail(outcome, f"HTTP {response.status}", _error_text(await response.read()))
                return
            if response.content_type != "text/event-stream":
                _fail(outcome, "malformed", f"the answer is {response.content_type}, not a stream")
                return
            rest = b""
            async for data in response.content.iter_any():
                now = time.perf_counter()
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        _take_event(line[5:].strip(), now, outcome)
        if outcome.finish_reason is None:
            _fail(outcome, "cut off", "the stream ended without a finish_reason")
        elif outcome.finish_reason in ("error", "abort"):
            _fail(outcome, "finish_reason", f"the server ended it with {outcome.finish_reason!r}")
        if not outcome.is_counted:
            outcome.num_output_tokens = len(outcome.chunk_times)


def request_body(
    options: ServingOptions, *, model: str, prompt: str | list[int], output_len: int, exact_length: bool
) -> bytes:
    """Return the JSON of one streamed request. `exact_length` adds ignore_eos and min_tokens, which OpenAI itself
    rejects.
    """
    if options.endpoint == "completions":
        content: dict[str, Any] = {"prompt": prompt}
    else:
        content = {"messages": [{"role": "user", "content": prompt}]}
    body = {
        "model": model,
        **content,
        "max_tokens": output_len,
        "temperature": options.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if exact_length:
        body |= {"ignore_eos": True, "min_tokens": output_len}
    return msgspec.json.encode(body | options.extra_fields())


def _fail(outcome: Outcome, kind: str, error: str) -> None:
    """Record a failure unless there is one already: an error in a stream is often followed by the end of the
    connection.
    """
    if outcome.kind is None:
        outcome.kind, outcome.error = kind, error


def _take_event(data: bytes, now: float, outcome: Outcome) -> None:
    if data == b"[DONE]" or not data:
        return
    chunk = _decode_chunk(data)
    if chunk.error is not None:
        _fail(outcome, "error in stream", _error_text(msgspec.json.encode({"error": chunk.error})))
    for choice in chunk.choices:
        outcome.finish_reason = choice.finish_reason or outcome.finish_reason
        if choice.has_text() or (choice.finish_reason and not outcome.chunk_times):
            outcome.chunk_times.append(now)
    if chunk.usage is not None:
        outcome.is_counted = True
        outcome.num_prompt_tokens = chunk.usage.prompt_tokens
        outcome.num_output_tokens = chunk.usage.completion_tokens
        details = chunk.usage.prompt_tokens_details
        outcome.num_cached_tokens = (details.cached_tokens or 0) if details else 0


def _error_text(answer: bytes) -> str:
    """Return the message of an error in OpenAI's format, or the beginning of any other body."""
    try:
        error = msgspec.json.decode(answer)["error"]
        text = str(error["message"] if isinstance(error, Mapping) else error)
    except (msgspec.MsgspecError, KeyError, TypeError):
        text = answer.decode("utf-8", errors="replace")
    return text[:_MAX_ERROR_LENGTH]


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_LENGTH]
