"""A real server on a free port of 127.0.0.1, in a thread, over a scripted engine and a byte-level tokenizer."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import tokenizers
from fake_client import FakeEngineClient, Script, echo
from waiting import PATIENCE, wait_until

from jaxserve.config import ServerConfig
from jaxserve.engine.frontend import Frontend
from jaxserve.request import EngineRequest
from jaxserve.server.process.lifecycle import Server
from jaxserve.server.process.listening import bind
from jaxserve.tokenizer import Tokenizer

SPECIAL_TOKENS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BOS, EOS = 1, 2
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if enable_thinking %}THINK{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte, after five special tokens; BOS before every text; a chat template in
    ChatML.
    """
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(
        backend,
        special_tokens={"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"},
        chat_templates={"default": CHAT_TEMPLATE},
    )


class Running:
    """A running server over any engine."""

    def __init__(self, frontend: Frontend, config: ServerConfig):
        self.frontend = frontend
        self.tokenizer = frontend.tokenizer
        self.server = Server(frontend, config, listener=bind(config))
        self.url = f"http://127.0.0.1:{self.server.address[1]}"
        self.exit_code: int | None = None
        self._thread = threading.Thread(target=self._run, name="server", daemon=True)

    def _run(self) -> None:
        self.exit_code = self.server.run()

    def start(self) -> None:
        self._thread.start()
        wait_until(lambda: self.server.is_serving)

    def wait(self) -> int | None:
        """Return the exit code, when the server has ended."""
        self._thread.join(timeout=PATIENCE)
        assert not self._thread.is_alive(), "the server did not end"
        return self.exit_code

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send one request on a connection of its own. verify=False: reading certificates takes longer than the
        request.
        """
        return httpx.request(method, self.url + path, timeout=PATIENCE, verify=False, **options)

    def connection(self) -> socket.socket:
        """Return a connection to the server, for `with`."""
        return socket.create_connection(self.server.address, timeout=PATIENCE)

    def stream(self, path: str, body: Any, *, on_data: Callable[[bytes], Any] = lambda _: None) -> httpx.Response:
        """Send a request and read its answer as it comes: `on_data` is called with everything received so far."""
        content = b""
        with httpx.stream("POST", self.url + path, json=body, timeout=PATIENCE, verify=False) as response:
            for data in response.iter_bytes():
                content += data
                on_data(content)
        return httpx.Response(response.status_code, headers=response.headers, content=content, request=response.request)


class RunningFake(Running):
    """A running server over a scripted engine. Set `play` to script it; it is `echo` until then."""

    def __init__(self, tokenizer: Tokenizer, config: ServerConfig, **client_options: Any):
        self.play: Callable[[EngineRequest], Script] = echo
        self.client = FakeEngineClient(
            lambda request: self.play(request), vocab_size=tokenizer.vocab_size, **client_options
        )
        super().__init__(Frontend(self.client, tokenizer, seed=0), config)

    def says(self, text: str, **options: Any) -> None:
        """Script the engine: every sequence is `text`."""
        token_ids = self.tokenizer.encode(text, add_special_tokens=False)
        self.play = lambda request: Script(token_ids=token_ids, **options)

    def prompt(self, index: int = -1, *, skip_special_tokens: bool = False) -> str:
        """Return the text of a prompt that the engine got: the last one, if no other is asked for."""
        return self.tokenizer.decode(self.client.submitted[index].prompt_token_ids, skip_special_tokens)


def raw_post(path: str, body: Any) -> bytes:
    """Return a whole request as it is sent on a connection."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    return f"{head}\r\n\r\n".encode() + content


@contextlib.contextmanager
def running(
    tokenizer: Tokenizer, *, client_options: dict[str, Any] | None = None, **config: Any
) -> Iterator[RunningFake]:
    """A server from start to end; `config` are fields of ServerConfig."""
    server = RunningFake(tokenizer, ServerConfig(port=0, **config), **(client_options or {}))
    try:
        server.start()
        yield server
        server.server.stop()
        server.server.stop()
        server.wait()
    finally:
        server.client.close()


@contextlib.contextmanager
def serving(frontend: Frontend, **config: Any) -> Iterator[Running]:
    """A server over any engine, from start to end; `config` are fields of ServerConfig."""
    server = Running(frontend, ServerConfig(port=0, **config))
    server.start()
    try:
        yield server
    finally:
        server.server.stop()
        assert server.wait() == 0


def synchronous(server: Running) -> openai.OpenAI:
    """Return OpenAI's client, for `with`."""
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def asynchronous(server: Running) -> openai.AsyncOpenAI:
    """Return OpenAI's client for an event loop."""
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def frames(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, and check its grammar: `data: <json>` and an empty line each, [DONE] at the
    end.
    """
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = response.content.decode("utf-8").split("\n\n")
    assert done == "data: [DONE]"
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event.removeprefix("data: ")) for event in events]


def response_events(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream of /v1/responses, and check its grammar."""
    assert answer.status_code == 200, answer.text
    *frames, rest = answer.text.split("\n\n")
    assert rest == ""
    found = []
    for number, frame in enumerate(frames):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        found.append(event)
    return found


def assert_error(answer: httpx.Response, status: int, param: str | None, kind: str = "invalid_request_error") -> None:
    """Check that the answer is this refusal, in the format of all refusals on its path."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    error = body.pop("error")
    if answer.url.path.startswith("/v1/messages"):
        assert body == {"type": "error", "request_id": answer.headers["x-request-id"]}
        assert set(error) == {"message", "type", "param"}
    else:
        assert not body
        assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == kind
    assert error["param"] == param, error
    assert "Traceback" not in answer.text


def assert_well(server: RunningFake) -> None:
    """Check that the server answers the next good request, and that nothing is left of earlier ones."""
    answer = server.post("/v1/completions", {"prompt": "ab", "max_tokens": 2})
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["text"] == "ab"
    wait_until(lambda: server.client.num_running == server.server.state.life.num_inside == 0)
