"""`jaxserve run-batch`: answer a file of requests, one JSON object per line in OpenAI's format, into another file.

The routes are the server's own, called without a connection. Answers are written as they arrive; an interrupted run can
be continued, since requests that the output file already answers are skipped.
"""

import asyncio
import codecs
import contextlib
import os
import pathlib
import shutil
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any, BinaryIO, NamedTuple

import httpx
import msgspec
from starlette.types import Receive, Scope, Send

from jaxserve.config import ServerConfig
from jaxserve.engine.frontend import Frontend
from jaxserve.errors import EngineDead, InvalidRequest, JaxserveError
from jaxserve.server.app import create_app
from jaxserve.server.process.lifecycle import make_state

ENDPOINTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"),
    *(f"{prefix}/score" for prefix in ("/v1", "")),
    *(f"{prefix}/rerank" for prefix in ("/v1", "/v2", "")),
)
REQUESTS_PER_SEQUENCE = 2
"""Requests submitted for each sequence that can run at once, so that the engine never waits for the next one."""
SERVER_FAULT = 500
REFUSED = 3
"""Exit code of a batch some of whose lines are refused; 2 is a usage error."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the input."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of a route."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a line could not be passed to a route."""

    code: str
    message: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the output: either `response`, which may be an HTTP error, or `error`."""

    id: str
    custom_id: str | None
    response: Answer | None
    error: Problem | None

    @property
    def is_final(self) -> bool:
        """True if repeating the request would not change the result."""
        return self.custom_id is not None and (self.response is None or self.response.status_code < SERVER_FAULT)


class Summary(NamedTuple):
    """Numbers of lines of the output; `failed` are those that another run repeats."""

    answered: int
    refused: int
    failed: int


class _Name(msgspec.Struct, frozen=True):
    custom_id: str


class _Flags(msgspec.Struct, frozen=True):
    """Fields of a body that ask for what a file cannot hold."""

    stream: Any = None
    background: Any = None


_decode_line = msgspec.json.Decoder(Line).decode
_decode_result = msgspec.json.Decoder(Result).decode
_decode_name = msgspec.json.Decoder(_Name).decode
_decode_flags = msgspec.json.Decoder(_Flags).decode


class Output(NamedTuple):
    """An output file that is open for further lines.

    Attributes:
        file: the output, which still has the lines that another run repeats.
        kept: a copy of its final lines.
        answered: the ids of these.
        counts: their numbers by `Summary`.
        num_lines: the number of lines that it has in the end.
    """

    file: BinaryIO
    kept: BinaryIO
    answered: set[str | None]
    counts: list[int]
    num_lines: int

    def drop_others(self) -> None:
        """Leave only the final lines in the file, and go to its end. Raises InvalidRequest if that cannot be written.

        The file remains the same one, for whoever has it open.
        """
        try:
            if self.kept.tell() != self.file.seek(0, os.SEEK_END):
                self.kept.seek(0)
                self.file.seek(0)
                shutil.copyfileobj(self.kept, self.file)
                self.file.truncate()
        except OSError as error:
            raise InvalidRequest(f"cannot write {self.file.name}: {error.strerror}") from error


def run(
    frontend: Frontend, config: ServerConfig, *, source: pathlib.Path, output: Output, progress: bool = True
) -> Summary:
    """Answer the requests of `source` that `output` has no final answer to.

    Raises InvalidRequest if the input cannot be read or no more can be written, EngineDead when the engine has died;
    what was answered until then is in the file.
    """
    output.drop_others()
    lines = (text for text in _lines(source) if _custom_id(text) not in output.answered)
    batch = _Batch(frontend, config, output, progress=progress)
    asyncio.run(batch.run(lines))
    return Summary(*output.counts)


@contextlib.contextmanager
def open_output(
    destination: pathlib.Path, wanted: "Input", *, source: pathlib.Path, overwrite: bool
) -> Iterator[Output]:
    """Open the output for what it does not answer yet, and change nothing in it; with `overwrite` it answers nothing.

    Raises InvalidRequest if it cannot be written, or is not the output of this input.
    """
    if destination.exists():
        if not destination.is_file():  # a device would take no answers back
            raise InvalidRequest(f"cannot write {destination}: it is no regular file")
        if destination.samefile(source):
            raise InvalidRequest(f"{destination} is the input: choose another file")
    counts, answered = [0, 0, 0], set[str | None]()
    with contextlib.ExitStack() as files:
        try:
            # On the same disk, which thus has room for what is kept.
            kept = files.enter_context(tempfile.TemporaryFile(dir=destination.parent))
            for result, text in () if overwrite else _final_lines(destination, wanted):
                kept.write(text)
                counts[_kind(result)] += 1
                answered.add(result.custom_id)
            file = destination.open("r+b" if destination.exists() else "w+b")
        except OSError as error:
            raise InvalidRequest(f"cannot write {destination}: {error.strerror}") from error
        try:
            yield Output(file, kept, answered, counts, wanted.num_lines)
        except BaseException:
            with contextlib.suppress(OSError):  # of a line that could not be written, which has been told
                file.close()
            raise
        file.close()


class Input(NamedTuple):
    """The ids of an input file, and its number of lines."""

    custom_ids: frozenset[str]
    num_lines: int


def check_input(path: pathlib.Path) -> Input:
    """Read the ids of all lines. Raises InvalidRequest for a file that cannot be read or that repeats an id."""
    seen: dict[str, int] = {}
    number = 0
    for number, text in enumerate(_lines(path), 1):
        custom_id = _custom_id(text)
        if custom_id is not None and seen.setdefault(custom_id, number) != number:
            raise InvalidRequest(
                f"{path}: request {number} has the custom_id of request {seen[custom_id]}, {custom_id!r:.100}",
                param="custom_id",
            )
    return Input(frozenset(seen), number)


def _lines(path: pathlib.Path) -> Iterator[bytes]:
    """Yield the lines of a file that are not blank. Raises InvalidRequest if it cannot be read."""
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            raise InvalidRequest(f"cannot read {path}: it is no regular file, which can be read twice")
        with path.open("rb") as file:
            for number, text in enumerate(file):
                text = text if number else text.removeprefix(codecs.BOM_UTF8)
                if text.strip():
                    yield text
    except OSError as error:
        raise InvalidRequest(f"cannot read {path}: {error.strerror}") from error


def _custom_id(text: bytes) -> str | None:
    """Return the id of a line, or None; a line that is otherwise incomplete may have one."""
    try:
        return _decode_name(text).custom_id
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None


def _final_lines(path: pathlib.Path, wanted: Input) -> Iterator[tuple[Result, bytes]]:
    """Yield the lines of an output file that can be kept, which excludes truncated lines and failures of the server.

    Raises InvalidRequest for a file that is not an output of this input, so that it is not overwritten by mistake.
    """
    for number, text in enumerate(_lines(path) if path.exists() else (), 1):
        try:
            result = _decode_result(text)
        except (msgspec.DecodeError, RecursionError, ValueError):
            if not text.endswith(b"\n"):
                return
            raise InvalidRequest(
                f"{path}: line {number} is not an answer of a batch: choose another file; --overwrite begins it anew"
            ) from None
        if result.custom_id is not None and result.custom_id not in wanted.custom_ids:
            raise InvalidRequest(
                f"{path} has an answer to {result.custom_id!r:.100}, which the input does not ask for: choose another "
                "file; --overwrite begins it anew"
            )
        if result.is_final and text.endswith(b"\n"):
            yield result, text


def _kind(result: Result) -> int:
    """Return the index in Summary: 0 answered, 1 refused, 2 failed."""
    if result.response is None:
        return 1
    return 0 if result.response.status_code < 400 else 1 if result.is_final else 2


class _Batch:
    """The running requests, and the file for their answers."""

    def __init__(self, frontend: Frontend, config: ServerConfig, output: Output, *, progress: bool):
        from tqdm import tqdm

        self._client = frontend.client
        self._state = make_state(frontend, config)
        self._app = create_app(self._state, config)
        self._output = output.file
        self._counts = output.counts
        total, initial = output.num_lines, sum(output.counts)
        self._bar = tqdm(total=total, initial=initial, desc="answering", unit="request", disable=not progress)

    async def run(self, lines: Iterator[bytes]) -> None:
        """Answer these lines, with enough at once to keep the engine busy."""
        room = asyncio.Semaphore(REQUESTS_PER_SEQUENCE * self._client.info.max_num_seqs)

        async def answer(text: bytes) -> None:
            try:
                self._write(await self._answer(http, text))
            finally:
                room.release()

        try:
            async with self._connected() as http, asyncio.TaskGroup() as tasks:
                for text in lines:
                    await room.acquire()
                    tasks.create_task(answer(text))
        except* JaxserveError as errors:
            raise errors.exceptions[0] from None
        finally:
            self._bar.close()
            self._state.responses.store.close()

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[httpx.AsyncClient]:
        """Return a client that calls the routes without a socket."""
        async with self._app.router.lifespan_context(self._app) as state:

            async def app(scope: Scope, receive: Receive, send: Send) -> None:
                await self._app({**scope, "state": state}, receive, send)

            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                yield http

    async def _answer(self, http: httpx.AsyncClient, text: bytes) -> Result:
        result_id = f"batch_req_{uuid.uuid4().hex}"
        try:
            line = _decode_line(text)
            problem = _problem(line)
        except (msgspec.DecodeError, RecursionError, ValueError) as error:
            problem = Problem(code="invalid_line", message=f"the line is not a request: {error}")
            return Result(id=result_id, custom_id=_custom_id(text), response=None, error=problem)
        if problem is not None:
            return Result(id=result_id, custom_id=line.custom_id, response=None, error=problem)
        answer = await self._post(http, line)
        if answer.status_code >= SERVER_FAULT and not self._client.is_alive():
            raise EngineDead("the engine has stopped: run the command again for the rest of the answers")
        response = Answer(
            status_code=answer.status_code, request_id=answer.headers["x-request-id"], body=msgspec.Raw(answer.content)
        )
        return Result(id=result_id, custom_id=line.custom_id, response=response, error=None)

    async def _post(self, http: httpx.AsyncClient, line: Line) -> httpx.Response:
        """Post a request to its route, repeatedly while it is refused because others use the resources it needs."""
        headers = {"content-type": "application/json"}
        while True:
            answer = await http.post(line.url, content=bytes(line.body), headers=headers)
            if (seconds := answer.headers.get("retry-after")) is None:
                return answer
            await asyncio.sleep(int(seconds))

    def _write(self, result: Result) -> None:
        try:
            self._output.write(msgspec.json.encode(result) + b"\n")
            self._output.flush()
        except OSError as error:
            raise InvalidRequest(
                f"cannot write {self._output.name}: {error.strerror}; run the command again, and without --overwrite, "
                "for the rest of the answers"
            ) from error
        self._counts[_kind(result)] += 1
        self._bar.update()


def _problem(line: Line) -> Problem | None:
    """Return why a request cannot be in a batch, or None."""
    if line.method != "POST":
        return Problem(code="invalid_method", message=f"method must be POST, got {line.method!r:.100}")
    if line.url not in ENDPOINTS:
        return Problem(code="invalid_url", message=f"url must be one of {', '.join(ENDPOINTS)}, got {line.url!r:.100}")
    # the route reports what is wrong with it
    with contextlib.suppress(msgspec.DecodeError, RecursionError, ValueError):
        flags = _decode_flags(line.body)
        for name in ("stream", "background"):
            if getattr(flags, name):
                return Problem(code="invalid_request", message=f"{name} is not available in a batch")
    return None


def tell(summary: Summary, destination: pathlib.Path) -> int:
    """Print the summary of a batch to standard error. Returns the exit code: 0 if every line is answered, 1 if another
    run may answer more, REFUSED if all that is left are lines that no run will answer.
    """
    words = [f"{count} {word}" for word, count in summary._asdict().items() if count]
    again = "; run the command again for those that have failed" if summary.failed else ""
    text = ", ".join(words) or "nothing to answer, the input holds no requests"
    print(f"{destination}: {text}{again}", file=sys.stderr)  # noqa: T201
    return 1 if summary.failed else REFUSED if summary.refused else 0
