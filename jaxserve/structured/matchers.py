"""The state of each constrained request in its grammar, and the tokens that may come next: the engine's side.

A grammar is compiled in a thread while its requests wait outside the scheduler. From then on a request has a matcher,
which consumes the request's drawn tokens lazily: only when the mask for the next one is needed. So nothing has to be
undone when a request is preempted, and a request that ends costs nothing more.
"""

import concurrent.futures
import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import llguidance.numpy
import numpy as np
from jaxtyping import UInt32
from llguidance import LLExecutor, LLMatcher, LLTokenizer

from jaxserve.errors import InvalidRequest, JaxserveError
from jaxserve.request import EngineRequest, Request
from jaxserve.structured.deep_stack import with_deep_stack
from jaxserve.structured.grammar import limit_of, parser_limits
from jaxserve.structured.reasons import in_our_words
from jaxserve.structured.vocabulary import grammar_tokenizer
from jaxserve.tokenizer import Tokenizer

COMPILE_TIMEOUT = 60.0
"""Maximum seconds for compiling a grammar; for the first one this includes loading the tokenizer."""

COPY_SECONDS = 0.02
"""A grammar that took longer than this to compile is copied for each of its requests; others are compiled again.

Copies share a lexer and its lock, so that their masks are computed one after another: 64 rows on 16 cores of an H200
host take 7 ms per step.
"""

SMALL_BYTES = 32 * 1024
"""Grammars up to this size compile in milliseconds, in a thread of their own, so that none waits behind a large one."""

_MAX_COMPILED = 64  # compiled grammars kept for later requests
_POLL_SECONDS = 0.01


class _Limited(NamedTuple):
    """The state of a `Limit`: the number of tokens left, and matchers of its grammars. `opening` is None once it is
    complete.
    """

    max_tokens: int
    opening: LLMatcher | None
    during: LLMatcher
    after: LLMatcher

    @property
    def matchers(self) -> list[LLMatcher]:
        """All matchers of the limit."""
        return [*([] if self.opening is None else [self.opening]), self.during, self.after]


class _Matching(NamedTuple):
    """The initial matchers of a request."""

    matcher: LLMatcher
    limited: _Limited | None

    def copy(self) -> "_Matching":
        """Return a copy that shares the lexers."""
        limited = self.limited
        if limited is not None:
            opening = limited.opening and limited.opening.deep_copy()
            limited = _Limited(limited.max_tokens, opening, limited.during.deep_copy(), limited.after.deep_copy())
        return _Matching(self.matcher.deep_copy(), limited)


class _Grammar(NamedTuple):
    matching: _Matching
    seconds: float


class _Compiling(NamedTuple):
    requests: list[EngineRequest]
    matchers: "concurrent.futures.Future[list[_Matching]]"
    deadline: float


class _Constraint:
    """One request's matcher, the number of its output tokens that the matcher has seen, and its further
    restrictions.
    """

    __slots__ = ("_limited", "allowed", "matcher", "num_seen")

    def __init__(self, matching: _Matching, allowed: UInt32[np.ndarray, " W"] | None):
        self.matcher, self._limited = matching
        self.num_seen = 0
        self.allowed = allowed

    @property
    def is_limited(self) -> bool:
        """True if tokens are counted, so that they must go through `take`."""
        return self._limited is not None

    def take(self, token_ids: Sequence[int]) -> bool:
        """Consume tokens. Returns False if they violate the grammar."""
        for token_id in token_ids:
            if not self.matcher.consume_token(token_id):
                return False
            if self._limited is not None:
                self._count(self._limited, token_id)
        return True

    def _count(self, limited: _Limited, token_id: int) -> None:
        max_tokens = limited.max_tokens - 1
        if limited.opening is not None:
            if not limited.opening.consume_token(token_id):
                self._limited = None
            elif limited.opening.is_accepting():
                self._limited = limited._replace(opening=None)
        elif not limited.during.consume_token(token_id) or limited.during.is_accepting():
            self._limited = None  # the limited part has ended, or never began
        elif max_tokens:
            self._limited = limited._replace(max_tokens=max_tokens)
        else:
            self.matcher, self._limited = limited.after, None


class Matchers:
    """The matchers of one engine, used by the engine's thread only."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], *, vocab_size: int, eos_token_ids: Iterable[int] = ()):
        """Create an empty set of matchers.

        `load_tokenizer` is called once, in a thread, when it is first needed. `vocab_size` is the width of the logits.
        A complete text may end with one of `eos_token_ids` or of the tokenizer's own.
        """
        self._load_tokenizer = load_tokenizer
        self._num_words = -(-vocab_size // 32)
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._eos_mask = np.zeros(self._num_words, np.uint32)
        self._small, self._large = (
            concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix=f"jaxserve-{size}-grammars")
            for size in ("small", "large")
        )
        self._executor = LLExecutor()
        self._tokenizer: concurrent.futures.Future[LLTokenizer] | None = None
        self._grammars: OrderedDict[str, concurrent.futures.Future[_Grammar]] = OrderedDict()
        self._compiling: list[_Compiling] = []
        self._constraints: dict[str, _Constraint] = {}

    @property
    def num_compiling(self) -> int:
        """Number of requests whose grammar is still being compiled."""
        return sum(len(entry.requests) for entry in self._compiling)

    def warm_up(self) -> None:
        """Begin to load the tokenizer, so that the first request need not wait for it."""
        if self._tokenizer is None:
            self._tokenizer = self._large.submit(self._make_tokenizer)

    def start(self, requests: Sequence[EngineRequest]) -> None:
        """Begin to compile the grammar of sibling requests, which must all have the same one."""
        self.warm_up()
        text = requests[0].grammar
        assert text
        assert all(request.grammar == text for request in requests)
        pool = self._small if len(text) <= SMALL_BYTES else self._large
        future = self._grammars.get(text)
        if future is None:
            future = self._grammars[text] = pool.submit(self._compile, text)
            if len(self._grammars) > _MAX_COMPILED:
                self._grammars.popitem(last=False)
        self._grammars.move_to_end(text)
        matchers = pool.submit(self._make_matchers, future, text, len(requests))
        self._compiling.append(_Compiling(list(requests), matchers, time.monotonic() + COMPILE_TIMEOUT))

    def take_compiled(
        self, *, wait: bool
    ) -> tuple[list[list[EngineRequest]], list[tuple[list[EngineRequest], JaxserveError]]]:
        """Return the sibling requests whose grammar is ready, and those whose grammar failed, with the reason.

        With `wait`, wait a moment for the first to become ready.
        """
        if wait and self._compiling:
            futures = [entry.matchers for entry in self._compiling]
            concurrent.futures.wait(futures, _POLL_SECONDS, return_when=concurrent.futures.FIRST_COMPLETED)
        ready, failed, rest = [], [], []
        for entry in self._compiling:
            if not entry.matchers.done():
                if time.monotonic() < entry.deadline:
                    rest.append(entry)
                else:
                    failed.append((entry.requests, refusal("it took too long to compile")))
                continue
            if (error := entry.matchers.exception()) is not None:
                self._grammars.pop(entry.requests[0].grammar, None)
                failed.append((entry.requests, _as_refusal(error)))
                continue
            # There may be more matchers than requests: some have been aborted.
            for request, matching in zip(entry.requests, entry.matchers.result(), strict=False):
                self._constraints[request.request_id] = _Constraint(matching, self._allowed(request))
            ready.append(entry.requests)
        self._compiling = rest
        return ready, failed

    def forget(self, request_ids: Collection[str]) -> None:
        """Drop requests that have ended, during compilation or later. Unknown ids are ignored."""
        for request_id in request_ids:
            self._constraints.pop(request_id, None)
        self._compiling = [
            entry._replace(requests=rest)
            for entry in self._compiling
            if (rest := [request for request in entry.requests if request.request_id not in request_ids])
        ]

    def masks(
        self,
        requests: Sequence[Request],
        pending: Mapping[str, Sequence[int]],
        drafts: Sequence[Sequence[int]] | None = None,
        *,
        num_columns: int = 1,
    ) -> tuple[UInt32[np.ndarray, "R Q W"], list[int], dict[Request, str]]:
        """Return the masks of allowed tokens per request (token i: bit i % 32 of word i // 32): of the next token, then
        of those behind each of its `drafts`; for how many drafts there are masks; and the failed requests with reasons.

        `pending` are tokens that have been drawn for a request but are not in its `token_ids` yet. Rows of requests
        that these tokens end, or that have failed, are undefined.
        """
        words = llguidance.numpy.allocate_token_bitmask(len(requests) * num_columns, self._vocab_size)
        wanted: list[tuple[int, _Constraint]] = []
        failed: dict[Request, str] = {}
        num_masked = [0] * len(requests)
        for index, (request, constraint, is_followed) in enumerate(self._feed(requests, pending)):
            if is_followed:
                wanted.append((index, constraint))
            elif is_followed is not None:
                failed[request] = "the grammar cannot be followed further"
        drafted: list[tuple[LLMatcher, int, list[int]]] = []
        for index, constraint in wanted if num_columns > 1 else ():
            if not constraint.is_limited:
                followed = _before_stop((drafts or ())[index], requests[index].asked.stop_token_ids)
                num_masked[index] = len(followed)
                if followed:
                    drafted.append((constraint.matcher, index * num_columns, followed))
        if drafted:
            llguidance.numpy.fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, words)
        for index, constraint in wanted:
            if num_masked[index] and constraint.matcher.is_error():  # which is final, but may be due to the drafts
                num_masked[index] = 0
                self._restore(requests[index], constraint, pending.get(requests[index].request_id, ()))
        matchers = [(constraint.matcher, index * num_columns) for index, constraint in wanted if not num_masked[index]]
        if matchers:
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, matchers, words)
        masks = words.view(np.uint32).reshape(len(requests), num_columns, -1)
        for index, constraint in wanted:
            if constraint.matcher.is_error():
                failed[requests[index]] = "the grammar has become too complex"
                continue
            for mask in masks[index, : 1 + num_masked[index]]:
                self._narrow(mask, constraint, ignores_eos=requests[index].asked.params.ignore_eos)
        return masks, num_masked, failed

    def _restore(self, request: Request, constraint: _Constraint, pending: Sequence[int]) -> None:
        """Replace the matcher of a request by a new one that has consumed the same tokens."""
        again = _Constraint(with_deep_stack(lambda: self._matching(request.asked.grammar)), None)
        again.take([*request.token_ids[request.num_prompt_tokens :], *pending])
        constraint.matcher = again.matcher

    def forced(self, request: Request) -> list[int]:
        """Return the only tokens that the grammar of a request allows from the next one on, after `masks`."""
        constraint = self._constraints[request.request_id]
        return [] if constraint.is_limited else constraint.matcher.compute_ff_tokens()

    def _feed(
        self, requests: Sequence[Request], pending: Mapping[str, Sequence[int]]
    ) -> list[tuple[Request, _Constraint, bool | None]]:
        """Let the matchers consume new tokens. The flag is False if they violate the grammar, None if they end the
        request.
        """
        fed: list[tuple[Request, _Constraint, bool | None]] = []
        steps: list[tuple[LLMatcher, int]] = []
        indices: list[int] = []
        for request in requests:
            constraint = self._constraints[request.request_id]
            known, first = request.token_ids, request.num_prompt_tokens + constraint.num_seen
            drawn = pending.get(request.request_id, ())
            # With several stages some of those that are drawn have been consumed while they were pending.
            news = [*known[first:], *drawn[max(0, first - len(known)) :]]
            is_followed = True
            if not request.asked.stop_token_ids.isdisjoint(news):
                is_followed = None  # with speculation, more tokens may have been drawn behind the last
            # the usual case: these are consumed together, on all cores
            elif len(news) == 1 and not constraint.is_limited:
                constraint.num_seen += 1
                indices.append(len(fed))
                steps.append((constraint.matcher, news[0]))
            elif news:
                constraint.num_seen += len(news)
                is_followed = constraint.take(news)
            fed.append((request, constraint, is_followed))
        if steps:
            for index, is_followed in zip(indices, self._executor.consume_token_par(steps), strict=True):
                fed[index] = (*fed[index][:2], is_followed)
        return fed

    def close(self) -> None:
        """Shut the threads down; nothing is compiled any more."""
        for pool in (self._small, self._large):
            pool.shutdown(wait=False, cancel_futures=True)

    def _narrow(self, mask: UInt32[np.ndarray, " W"], constraint: _Constraint, *, ignores_eos: bool) -> None:
        """Apply the request's other restrictions, unless they would leave no token."""
        for kept in (~self._eos_mask if ignores_eos else None, constraint.allowed):
            if kept is not None and np.any(mask & kept):
                mask &= kept

    def _allowed(self, request: EngineRequest) -> UInt32[np.ndarray, " W"] | None:
        token_ids = request.params.allowed_token_ids
        return None if token_ids is None else self._bits([*token_ids, *self._wait_for_tokenizer().eos_tokens])

    def _bits(self, token_ids: Iterable[int]) -> UInt32[np.ndarray, " W"]:
        ids = np.fromiter((token_id for token_id in token_ids if 0 <= token_id < self._vocab_size), np.int64)
        mask = np.zeros(self._num_words, np.uint32)
        np.bitwise_or.at(mask, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
        return mask

    def _make_tokenizer(self) -> LLTokenizer:
        tokenizer = self._load_tokenizer()
        compiled = grammar_tokenizer(tokenizer, vocab_size=self._vocab_size, eos_token_ids=self._eos_token_ids)
        self._eos_mask = self._bits(compiled.eos_tokens)
        return compiled

    def _compile(self, text: str) -> _Grammar:
        self._wait_for_tokenizer()
        start = time.perf_counter()
        matching = with_deep_stack(lambda: self._matching(text))
        for matcher in (matching.matcher, *(matching.limited.matchers if matching.limited else ())):
            if matcher.is_error():
                raise refusal(in_our_words(matcher.get_error()))
        return _Grammar(matching, time.perf_counter() - start)

    def _make_matchers(
        self, grammar: "concurrent.futures.Future[_Grammar]", text: str, num_matchers: int
    ) -> list[_Matching]:
        """Make a matcher per request. Runs in the same thread as the job behind `grammar`, after it, so it never blocks
        the pool.
        """
        matching, seconds = grammar.result()
        if seconds > COPY_SECONDS:
            return [matching.copy() for _ in range(num_matchers)]
        return with_deep_stack(lambda: [self._matching(text) for _ in range(num_matchers)])

    def _matching(self, text: str) -> _Matching:
        limit = limit_of(text)
        if limit is None:
            return _Matching(self._matcher(text), None)
        opening = self._matcher(limit.opening) if limit.opening else None
        limited = _Limited(limit.max_tokens, opening, self._matcher(limit.during), self._matcher(limit.after))
        return _Matching(self._matcher(text), limited)

    def _matcher(self, text: str) -> LLMatcher:
        return LLMatcher(self._wait_for_tokenizer(), text, log_level=0, limits=parser_limits(text))

    def _wait_for_tokenizer(self) -> LLTokenizer:
        assert self._tokenizer is not None
        return self._tokenizer.result()


def _before_stop(token_ids: Sequence[int], stop_token_ids: Collection[int]) -> list[int]:
    """Return the tokens up to the first that ends a request; what follows it does not matter."""
    return list(itertools.takewhile(lambda token_id: token_id not in stop_token_ids, token_ids))


def refusal(reason: str) -> InvalidRequest:
    """Return the error for a grammar that cannot be followed, or not any further."""
    return InvalidRequest(f"structured_outputs: {reason}", param="structured_outputs", code="unsupported_grammar")


def _as_refusal(error: BaseException) -> JaxserveError:
    return error if isinstance(error, JaxserveError) else JaxserveError(f"the grammar could not be compiled: {error}")
