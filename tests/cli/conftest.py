"""A language model that records what commands ask of it, and the state of a process that commands change."""

import signal

import pytest

import jaxserve.llm
from jaxserve.request import CompletionOutput, Logprob, RequestOutput
from jaxserve.sampling_params import SamplingParams


class FakeLLM:
    """Answers every prompt with its words in reverse, one word at a time; records the requests."""

    def __init__(self):
        self.options = None
        self.asked = []
        self.is_closed = False
        self.fails_with = None
        self.refuses_with = None
        self.finish_reason = "length"
        self.recommended = {}

    def __call__(self, **options):
        self.options = options
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_closed = True

    def sampling_params(self, given, *, fallback):
        return SamplingParams(**(fallback | self.recommended | given))

    def _outputs(self, prompt, params):
        words = [f" {word}" for word in reversed(prompt.split())]
        logprobs = [{0: Logprob(-0.5, 1, word), 7: Logprob(-1.25, 2, "other")} for word in words]
        return words, logprobs if params.logprobs is not None else None

    def generate(self, prompts, params):
        self.asked.append((prompts, params))
        results = []
        for prompt in prompts:
            words, logprobs = self._outputs(prompt, params)
            outputs = [
                CompletionOutput(
                    index=index,
                    text="".join(words),
                    token_ids=[0] * len(words),
                    logprobs=logprobs,
                    finish_reason=self.finish_reason,
                )
                for index in range(params.n)
            ]
            results.append(RequestOutput(request_id="r", prompt=prompt, prompt_token_ids=[], outputs=outputs))
        return results

    def stream(self, prompt, params):
        self.asked.append((prompt, params))
        if self.refuses_with is not None:
            raise self.refuses_with
        return self._stream(prompt, params)

    def _stream(self, prompt, params):
        words, logprobs = self._outputs(prompt, params)
        for number, word in enumerate(words):
            if self.fails_with is not None:
                raise self.fails_with
            entry = None if logprobs is None else [logprobs[number]]
            output = CompletionOutput(index=0, text=word, token_ids=[0], logprobs=entry)
            yield RequestOutput(request_id="r", prompt=None, prompt_token_ids=[], outputs=[output])

    def stream_chat(self, messages, params):
        self.messages = [dict(message) for message in messages]
        return self.stream(messages[-1]["content"], params)


@pytest.fixture
def llm(monkeypatch):
    fake = FakeLLM()
    monkeypatch.setattr(jaxserve.llm, "LLM", fake)
    return fake


@pytest.fixture
def served(monkeypatch):
    """The configs that `jaxserve serve` would start with."""
    found = []
    monkeypatch.setattr("jaxserve.server.process.supervisor.serve", lambda *configs: found.append(configs) or 0)
    return found


@pytest.fixture
def sigint():
    """Handle SIGINT as a new process does; this process goes on after `main`."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture
def platform(monkeypatch):
    """`models` and `convert` choose the platform of their process, which here is that of other tests too."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
