"""From EngineOutput to RequestOutput: text, stop strings and logprobs of one prompt's sequences, on the caller's side.

A `RequestGroup` is the front end's state of one prompt: it takes the outputs of the engine's steps and returns what is
new since the last time, or everything at the end.
"""

from collections.abc import Iterable, Sequence

from jaxserve.request import (
    CompletionOutput,
    EngineOutput,
    EngineRequest,
    FinishReason,
    Logprob,
    Refusal,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from jaxserve.sampling_params import BeamSearchParams
from jaxserve.tokenizer import IncrementalDetokenizer, Tokenizer


class StopChecker:
    """Finds stop strings in a text that arrives in pieces, and holds back what may still become one.

    The text is read character by character, so that token boundaries make no difference: the stop string that is
    complete first wins, the longest of those that end together.
    """

    def __init__(self, stop_strings: Sequence[str], *, include_in_output: bool = False):
        self._matchers = [_Matcher(stop) for stop in sorted(stop_strings, key=len, reverse=True)]
        self._include = include_in_output
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Return the text that can be shown now, and the stop string if one is complete: nothing follows it then.

        With `may_stop=False` a stop string that ends in this piece is ordinary text (min_tokens).
        """
        if not self._matchers:
            return text, None
        found: _Matcher | None = None
        found_end = 0
        for matcher in self._matchers:
            end = matcher.push(text, may_stop=may_stop)
            if end is not None and (found is None or end < found_end):
                found, found_end = matcher, end
        seen = self._held + text
        if found is not None:
            end = len(self._held) + found_end
            self._held = ""
            return seen[: end if self._include else end - len(found.stop)], found.stop
        num_held = 0 if self._include else max(matcher.matched for matcher in self._matchers)
        shown = len(seen) - num_held
        self._held = seen[shown:]
        return seen[:shown], None

    def flush(self) -> str:
        """End the sequence and return what was held back."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Knuth-Morris-Pratt for one stop string: `matched` is the longest prefix of it that ends the text so far.

    `_border[k]` is the longest proper prefix of stop[:k] that also ends it. The table grows with `matched`, so that a
    huge stop string costs no more than the text that is compared with it.
    """

    def __init__(self, stop: str):
        self.stop = stop
        self.matched = 0
        self._border = [0, 0]

    def push(self, text: str, *, may_stop: bool) -> int | None:
        """Return how many characters of `text` complete the stop string first; the matcher is done then."""
        stop, border, matched = self.stop, self._border, self.matched
        start = 0
        if matched == 0:
            start = text.find(stop[0])
            if start < 0:
                return None
        for position in range(start, len(text)):
            character = text[position]
            while matched and stop[matched] != character:
                matched = border[matched]
            if stop[matched] == character:
                matched += 1
                if matched == len(border):
                    self._grow_border()
            if matched == len(stop):
                if may_stop:
                    return position + 1
                matched = border[matched]
        self.matched = matched
        return None

    def _grow_border(self) -> None:
        last = self.stop[len(self._border) - 1]
        length = self._border[-1]
        while length and self.stop[length] != last:
            length = self._border[length]
        self._border.append(length + 1 if self.stop[length] == last else 0)


class _Sequence:
    """One of the n continuations: the engine's outputs, and how much of them has been returned."""

    def __init__(
        self, request: EngineRequest, tokenizer: Tokenizer, *, index: int, visible_special_tokens: frozenset[int]
    ):
        params = request.params
        self.request_id = request.request_id
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._tokenizer = tokenizer
        self._params = params
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[dict[int, Logprob]] | None = None if params.logprobs is None else []
        self._num_forgotten = 0  # logprobs that came before those
        self._stop_tokens: dict[int, str] = {}  # stop strings that are a token which the text does not show
        self._stops = StopChecker(params.stop_strings, include_in_output=params.include_stop_str_in_output)
        self._detokenizer: IncrementalDetokenizer | None = None
        if params.detokenize:
            self._detokenizer = IncrementalDetokenizer(
                tokenizer,
                prompt_token_ids=request.prompt_token_ids,
                skip_special_tokens=params.skip_special_tokens,
                visible_special_tokens=visible_special_tokens,
                keeps_first_space=bool(request.grammar),  # it is a part of the form
            )
            self._stop_tokens = {
                token_id: stop
                for stop in params.stop_strings
                if (token_id := tokenizer.added_token_id(stop)) is not None and self._detokenizer.skips(token_id)
            }
        self._num_given = (0, 0)  # token ids, pieces of text
        self._finish_given = False

    def push(self, output: EngineOutput) -> bool:
        """Take one step's output. Returns whether a stop string has ended the sequence, unknown to the engine."""
        if self.finish_reason is not None:
            return False  # the engine was a step ahead of a stop string
        for position, token_id in enumerate(output.new_token_ids):
            self._token_ids.append(token_id)
            if self._logprobs is not None and output.logprobs is not None:
                self._logprobs.append(logprob_entry(self._tokenizer, output.logprobs[position]))
            ends = output.finish_reason == "stop" and position == len(output.new_token_ids) - 1
            if ends and token_id == output.stop_reason and not self._params.include_stop_str_in_output:
                continue  # a stop token is not text
            stop = self._push_text(token_id)
            if stop is not None:
                self.finish_reason, self.stop_reason = "stop", stop
                return output.finish_reason is None
        if output.finish_reason is not None:
            self._finish(output)
        return False

    def _push_text(self, token_id: int) -> str | None:
        if self._detokenizer is None:
            return None
        may_stop = len(self._token_ids) > self._params.min_tokens
        if may_stop and (stop := self._stop_tokens.get(token_id)) is not None:
            if rest := self._rest() + (stop if self._params.include_stop_str_in_output else ""):
                self._text.append(rest)
            return stop
        piece = self._detokenizer.push(token_id)
        if not piece:
            return None
        shown, stop = self._stops.push(piece, may_stop=may_stop)
        if shown:
            self._text.append(shown)
        return stop

    def _rest(self) -> str:
        """End the text; return what was held back."""
        return self._stops.flush() + ("" if self._detokenizer is None else self._detokenizer.flush())

    def _finish(self, output: EngineOutput) -> None:
        if rest := self._rest():
            self._text.append(rest)
        self.finish_reason = output.finish_reason
        if output.stop_reason in (
            self._params.stop_token_ids or ()
        ):  # EOS is the ordinary end, which has no stop_reason
            self.stop_reason = output.stop_reason

    def take_delta(self) -> CompletionOutput | None:
        """Return what is new since the last call, or None."""
        num_tokens, num_pieces = self._num_given
        is_new = num_tokens < len(self._token_ids) or num_pieces < len(self._text)
        if not is_new and (self.finish_reason is None or self._finish_given):
            return None
        self._num_given = len(self._token_ids), len(self._text)
        self._finish_given = self.finish_reason is not None
        return self._output(num_tokens, num_pieces)

    def forget_logprobs(self) -> None:
        """Drop those that `take_delta` has given out."""
        if self._logprobs is not None:
            del self._logprobs[: self._num_given[0] - self._num_forgotten]
            self._num_forgotten = self._num_given[0]

    @property
    def is_begun(self) -> bool:
        """True if `take_delta` has returned anything."""
        return self._finish_given or self._num_given != (0, 0)

    def result(self) -> CompletionOutput:
        """Everything so far."""
        return self._output(0, 0)

    def _output(self, first_token: int, first_piece: int) -> CompletionOutput:
        return CompletionOutput(
            index=self.index,
            text="".join(self._text[first_piece:]),
            token_ids=self._token_ids[first_token:],
            logprobs=None if self._logprobs is None else self._logprobs[max(0, first_token - self._num_forgotten) :],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class RequestGroup:
    """One prompt with its n sequences, from `Frontend.prepare` until all of them have finished.

    Attributes:
        requests: the engine requests, one per sequence.
        error: the reason why the engine could not finish one of the sequences, or None.
        beams: how its sequences are searched (`beam_search`), None if they are drawn.
        refusal: set with `error` if the caller is at fault: not queued, or a grammar that cannot be followed further.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        requests: list[EngineRequest],
        tokenizer: Tokenizer,
        *,
        visible_special_tokens: frozenset[int] = frozenset(),
    ):
        """`visible_special_tokens` are in the text even where special tokens are skipped."""
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = requests[0].prompt_token_ids
        self.requests = requests
        self.error: str | None = None
        self.refusal: Refusal | None = None
        self.beams: BeamSearchParams | None = None
        self._embeddings: dict[int, bytes] = {}
        self._tokenizer = tokenizer
        self._sequences = {
            request.request_id: _Sequence(
                request, tokenizer, index=index, visible_special_tokens=visible_special_tokens
            )
            for index, request in enumerate(requests)
        }
        wants_prompt_logprobs = requests[0].params.prompt_logprobs is not None
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = [None] if wants_prompt_logprobs else None
        self._prompt_logprobs_given = False
        self._has_logprobs = wants_prompt_logprobs or requests[0].params.logprobs is not None
        self._num_cached_tokens = 0
        self._queue_seconds = 0.0
        self._metrics: RequestMetrics | None = None

    def push(self, outputs: Iterable[EngineOutput]) -> list[str]:
        """Take outputs of these sequences. Returns the ids of those that a stop string has ended: abort them."""
        stopped = []
        for output in outputs:
            sequence = self._sequences[output.request_id]
            if sequence.index == 0:  # the siblings find the prompt in the cache because the first put it there
                if output.num_cached_tokens > self._num_cached_tokens:
                    self._num_cached_tokens = output.num_cached_tokens
                if output.queue_seconds > self._queue_seconds:
                    self._queue_seconds = output.queue_seconds
            if output.num_draft_tokens:
                self._metrics = self._metrics or RequestMetrics()
                num_accepted = max(0, len(output.new_token_ids) - 1)
                self._metrics.add(num_draft_tokens=output.num_draft_tokens, num_accepted=num_accepted)
            if self._prompt_logprobs is not None and output.prompt_logprobs:
                self._prompt_logprobs += [logprob_entry(self._tokenizer, entry) for entry in output.prompt_logprobs]
            if output.embedding is not None:
                self._embeddings[sequence.index] = output.embedding
            if sequence.push(output):
                stopped.append(output.request_id)
            if output.finish_reason == "error" and self.error is None:
                self.error = output.error or "the engine could not finish this request"
                self.refusal = output.refusal
        return stopped

    @property
    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Logprobs of the prompt so far, if requested and not dropped."""
        return self._prompt_logprobs

    @property
    def embedding(self) -> bytes | None:
        """The results of a pooling request as returned by the engine (`EngineOutput.embedding`), concatenated."""
        if len(self._embeddings) < len(self._sequences):
            return None
        return b"".join(embedding for _, embedding in sorted(self._embeddings.items()))

    @property
    def unfinished_ids(self) -> list[str]:
        """Ids of the sequences that the engine still works on."""
        return [sequence.request_id for sequence in self._sequences.values() if sequence.finish_reason is None]

    @property
    def is_finished(self) -> bool:
        """True if no more output will come."""
        for sequence in self._sequences.values():  # noqa: SIM110 - asked for with every token: `all` takes thrice as long
            if sequence.finish_reason is None:
                return False
        return True

    def take_delta(self) -> RequestOutput | None:
        """Return what is new since the last call, or None; it contains only the sequences with new output.

        `prompt_logprobs` are returned once, complete, with the first tokens.
        """
        deltas = [delta for sequence in self._sequences.values() if (delta := sequence.take_delta()) is not None]
        if not deltas:
            return None
        prompt_logprobs = None if self._prompt_logprobs_given else self._prompt_logprobs
        self._prompt_logprobs_given = True
        return self._output(deltas, prompt_logprobs)

    def forget_logprobs(self) -> None:
        """Drop the logprobs that `take_delta` has returned; those of the prompt once each sequence has begun.

        For callers that only take deltas, as `result` lacks them then. Those of 20,000 tokens with 20 each take 46 MiB.
        """
        if not self._has_logprobs:
            return
        for sequence in self._sequences.values():
            sequence.forget_logprobs()
        if all(sequence.is_begun for sequence in self._sequences.values()):
            self._prompt_logprobs = None

    def result(self) -> RequestOutput:
        """Everything so far, all sequences in order."""
        return self._output([sequence.result() for sequence in self._sequences.values()], self._prompt_logprobs)

    def _output(
        self, outputs: list[CompletionOutput], prompt_logprobs: list[dict[int, Logprob] | None] | None
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            queue_seconds=self._queue_seconds,
            metrics=self._metrics,
            finished=self.is_finished,
        )


def logprob_entry(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[int, Logprob]:
    """Return token id -> Logprob at one position: the token itself, then the most likely ones in order, then those
    asked for.
    """
    logprobs = {entry.token_id: Logprob(entry.logprob, entry.rank, tokenizer.token_text(entry.token_id))}
    for rank, (token_id, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), start=1):
        logprobs.setdefault(token_id, Logprob(logprob, rank, tokenizer.token_text(token_id)))
    for token_id, logprob, rank in entry.asked:
        logprobs.setdefault(token_id, Logprob(logprob, rank, tokenizer.token_text(token_id)))
    return logprobs
