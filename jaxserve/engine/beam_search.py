"""Beam search above the engine: of all continuations of several sequences by one token, the most likely go on. No jax.

Each step of a search is a request of one token for each beam, whose prompt is the text so far, with the log
probabilities of the most likely tokens. The prefix cache has the KV of all but the last blocks, so that a step computes
at most a block a beam. The order, the scores and the end of a search are those of transformers (`generate` with
`num_beams`).
"""

import contextlib
import dataclasses
import heapq
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import msgspec

from jaxserve.engine.frontend import Frontend
from jaxserve.engine.output import RequestGroup
from jaxserve.errors import InvalidRequest, RequestFailed
from jaxserve.request import EngineOutput, FinishReason, RequestOutput
from jaxserve.sampling_params import BeamSearchParams, SamplingParams


class BeamSearchSequence(msgspec.Struct, kw_only=True):
    """One sequence that a search has found.

    `tokens` are those of the prompt and of the continuation, `text` is all of them as text, `output_text` the
    continuation. `score` is what sequences are ordered by: `cum_logprob` with the length penalty.
    """

    tokens: list[int]
    text: str
    output_text: str
    cum_logprob: float
    score: float
    finish_reason: FinishReason
    stop_reason: int | None = None


class BeamSearchOutput(msgspec.Struct, kw_only=True):
    """What was found for one prompt, the best sequence first. `num_cached_tokens` of the prompt came from the cache."""

    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence]
    num_cached_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class _Beam:
    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0


class BeamSearch:
    """The search for one prompt. `run_beams` and `run_beams_async` go through its steps, `result` or `outputs` is what
    has been found.

    `step` returns the groups to run, None at the end; `advance` takes them when they have finished.
    """

    def __init__(self, frontend: Frontend, prompt: RequestGroup, params: BeamSearchParams):
        """`prompt` is a prepared group, which is not run itself: it says what ends a sequence, max_tokens included."""
        request = prompt.requests[0]
        self._frontend, self._prompt, self._params = frontend, prompt, params
        self._stop_token_ids = request.stop_token_ids
        self._max_tokens = request.max_tokens
        self._num_steps = 0
        self._running = [_Beam()]
        self._finished: list[tuple[float, _Beam]] = []  # the best of them, in order
        self._num_cached_tokens = 0

    def step(self) -> list[RequestGroup] | None:
        """Return a group of one token for each beam, or None if the search has ended."""
        if not self._running:
            return None
        request = self._prompt.requests[0]
        params = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, seed=0, detokenize=False, logprobs=self._num_candidates
        )
        return [
            self._frontend.prepare(
                request.prompt_token_ids + list(beam.token_ids),
                params,
                request_id=f"{self._prompt.request_id}-{self._num_steps}-{index}",
                priority=request.priority,
                cache_salt=request.cache_salt,
            )
            for index, beam in enumerate(self._running)
        ]

    def advance(self, groups: Sequence[RequestGroup]) -> None:
        """Choose the beams that go on, by the log probabilities of finished groups. Raises RequestFailed."""
        results = [_result(group) for group in groups]
        if self._num_steps == 0:
            self._num_cached_tokens = results[0].num_cached_tokens
        self._num_steps += 1
        candidates = (
            _Beam((*beam.token_ids, token_id), beam.logprob + entry.logprob)
            for beam, result in zip(self._running, results, strict=True)
            for token_id, entry in (result.outputs[0].logprobs or [{}])[0].items()
        )
        width = self._params.beam_width
        best = heapq.nlargest(width * (1 + len(self._stop_token_ids)), candidates, key=lambda beam: beam.logprob)
        ended = [self._is_complete(beam) for beam in best]
        # Only sequences among the best `width` can finish; the others are there so that enough beams go on.
        finished = [(self._score(beam), beam) for beam, is_end in zip(best[:width], ended, strict=False) if is_end]
        self._finished = heapq.nlargest(width, [*self._finished, *finished], key=lambda scored: scored[0])
        self._running = [beam for beam, is_end in zip(best, ended, strict=True) if not is_end][:width]
        if self._is_over():
            self._running = []

    def result(self) -> BeamSearchOutput:
        """Return what has been found."""
        return BeamSearchOutput(
            prompt=self._prompt.prompt,
            prompt_token_ids=list(self._prompt.requests[0].prompt_token_ids),
            sequences=[self._sequence(score, beam) for score, beam in self._finished],
            num_cached_tokens=self._num_cached_tokens,
        )

    def outputs(self) -> list[EngineOutput]:
        """Return what has been found as outputs of the prompt's requests, the best sequence of the first one."""
        outputs = []
        for index, request in enumerate(self._prompt.requests):
            found = list(self._finished[index][1].token_ids) if index < len(self._finished) else []
            stopped = bool(found) and found[-1] in self._stop_token_ids
            outputs.append(
                EngineOutput(
                    request_id=request.request_id,
                    new_token_ids=found,
                    finish_reason="stop" if stopped else "length",
                    stop_reason=found[-1] if stopped else None,
                    num_cached_tokens=self._num_cached_tokens,
                )
            )
        return outputs

    @property
    def _num_candidates(self) -> int:
        """How many of a beam's tokens can matter: if all that end it are among them, `beam_width` others."""
        return min(self._params.beam_width + len(self._stop_token_ids), self._frontend.client.info.vocab_size)

    def _is_complete(self, beam: _Beam) -> bool:
        return len(beam.token_ids) == self._max_tokens or beam.token_ids[-1] in self._stop_token_ids

    def _is_over(self) -> bool:
        params = self._params
        if not self._running or len(self._finished) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        # With a positive penalty the score of a sequence rises with its length.
        can_grow = params.early_stopping == "never" and params.length_penalty > 0
        length = self._max_tokens if can_grow else self._num_steps
        return self._running[0].logprob / length**params.length_penalty <= self._finished[-1][0]

    def _score(self, beam: _Beam) -> float:
        return beam.logprob / len(beam.token_ids) ** self._params.length_penalty

    def _sequence(self, score: float, beam: _Beam) -> BeamSearchSequence:
        token_ids = beam.token_ids
        stopped = token_ids[-1] in self._stop_token_ids
        if stopped and not self._params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        tokenizer, prompt_ids = self._frontend.tokenizer, self._prompt.requests[0].prompt_token_ids
        return BeamSearchSequence(
            tokens=[*prompt_ids, *token_ids],
            text=tokenizer.decode([*prompt_ids, *token_ids]),
            output_text=tokenizer.decode(list(token_ids)),
            cum_logprob=beam.logprob,
            score=score,
            finish_reason="stop" if stopped else "length",
            stop_reason=beam.token_ids[-1] if stopped else None,
        )


def prepare_beams(
    frontend: Frontend, prompt: str | Iterable[SupportsIndex], params: BeamSearchParams, **options: Any
) -> BeamSearch:
    """Prepare the search for one prompt; `options` and errors are those of `Frontend.prepare`.

    Raises InvalidRequest, naming beam_width, for more beams than the engine has log probabilities for.
    """
    group = frontend.prepare(
        prompt,
        SamplingParams(max_tokens=params.max_tokens, ignore_eos=params.ignore_eos, temperature=0.0, seed=0),
        **options,
    )
    check_width(frontend, group, params, field="beam_width")
    return BeamSearch(frontend, group, params)


def check_width(frontend: Frontend, prompt: RequestGroup, params: BeamSearchParams, *, field: str) -> None:
    """Raise InvalidRequest, naming the field, for more beams than the engine has log probabilities for."""
    needed, available = params.beam_width + len(prompt.requests[0].stop_token_ids), frontend.client.info.max_logprobs
    if 0 <= available < min(needed, frontend.client.info.vocab_size):
        raise InvalidRequest(
            f"{field} {params.beam_width} needs the log probabilities of {needed} tokens, and {available} are "
            "allowed here (max_logprobs of the engine)",
            param=field,
        )


def run_beams(frontend: Frontend, searches: Sequence[BeamSearch]) -> None:
    """Run searches side by side to their ends. Raises what `Frontend.generate` raises, and RequestFailed."""
    while running := _steps(searches):
        # closing: a search that is interrupted leaves no request behind
        with contextlib.closing(frontend.generate([group for _, groups in running for group in groups])) as events:
            for _ in events:
                pass
        for search, groups in running:
            search.advance(groups)


async def run_beams_async(frontend: Frontend, searches: Sequence[BeamSearch]) -> None:
    """Run searches in the event loop; cancelling aborts them. Raises what `Frontend.run` raises."""
    while running := _steps(searches):
        await frontend.run([group for _, groups in running for group in groups], lambda _index, _delta: None)
        for search, groups in running:
            search.advance(groups)


def _steps(searches: Sequence[BeamSearch]) -> list[tuple[BeamSearch, list[RequestGroup]]]:
    return [(search, groups) for search in searches if (groups := search.step()) is not None]


def _result(group: RequestGroup) -> RequestOutput:
    if group.error is not None:
        raise RequestFailed(group.error)
    return group.result()
