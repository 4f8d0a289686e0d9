"""Frontend: everything between text and EngineClient, used by LLM and the server. No jax here.

`prepare` turns a prompt and its SamplingParams into validated EngineRequests; `generate` (in a blocking thread) and
`run` (asyncio) run them and return text.
"""

import asyncio
import functools
import operator
import pathlib
import queue
import random
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import msgspec

from jaxserve.config import GENERATION_FIELDS
from jaxserve.engine.client import EngineClient, EngineInfo
from jaxserve.engine.embedding import NO_LM_HEAD, POOLING_PARAMS
from jaxserve.engine.output import RequestGroup
from jaxserve.engine.prompts import Truncation, truncate
from jaxserve.engine.stream import Dispatcher, Take
from jaxserve.errors import CheckpointError, ContextLengthExceeded, EngineDead, InvalidRequest
from jaxserve.loading.affixes import Affixes
from jaxserve.loading.classifier import ClassificationHead, read_head
from jaxserve.loading.overrides import origin
from jaxserve.loading.reranking import PairTemplate, read_pair_template
from jaxserve.loading.sentence_transformers import Embedder, read_embedder
from jaxserve.request import EngineOutput, EngineRequest, Pooling, TruncationSide
from jaxserve.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SEED_LIMIT, SamplingParams
from jaxserve.structured.pool import GrammarPool
from jaxserve.tokenizer import Tokenizer, read_generation_config

_ALIVE_CHECK_SECONDS = 1.0
_SIBLING_SEED_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: seeds of siblings are far apart, in all their bits


class Frontend:
    """The text side of one engine. `prepare` and `generate` may be called from any thread.

    A request without a seed draws one from the front end's generator. With `seed` given that generator is
    reproducible (LLM: the same calls give the same texts); without it, every run of a server differs.
    """

    def __init__(
        self,
        client: EngineClient,
        tokenizer: Tokenizer,
        *,
        default_sampling: Mapping[str, Any] | None = None,
        seed: int | None = None,
        grammars: GrammarPool | None = None,
    ):
        """`default_sampling` are SamplingParams fields that the model's authors recommend (`sampling_defaults`)."""
        self.client = client
        self.tokenizer = tokenizer
        self.grammars = GrammarPool() if grammars is None else grammars
        self.default_sampling = dict(default_sampling or {})
        self._eos_token_ids = frozenset((*tokenizer.eos_token_ids, *client.info.eos_token_ids))
        self._random = random.Random(seed)
        self._dispatcher: Dispatcher | None = None

    def sampling_params(
        self, given: Mapping[str, Any] | None = None, *, fallback: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """SamplingParams from the fields that a caller has given, else the model's defaults, else `fallback`.

        Raises InvalidRequest for a value out of range, TypeError for an unknown field.
        """
        return SamplingParams(**{**(fallback or {}), **self.default_sampling, **(given or {})})

    @property
    def model(self) -> str:
        """The path of the model's own files, whatever options put in place of their values."""
        return origin(self.client.info.model)

    @functools.cached_property
    def head(self) -> ClassificationHead | None:
        """What classifies texts, where the model has that in place of an LM head. Raises CheckpointError."""
        return read_head(self.client.info.model, hidden_size=self.client.info.hidden_size)

    @functools.cached_property
    def embedder(self) -> Embedder:
        """What makes an embedding of hidden states. Raises CheckpointError."""
        return read_embedder(self.client.info.model, hidden_size=self.client.info.hidden_size)

    @functools.cached_property
    def pair_template(self) -> PairTemplate:
        """The chat template that the model has for pairs to score. Raises CheckpointError."""
        return read_pair_template(self.client.info.model)

    def embedded_text(self, text: str, prompt_name: str | None = None) -> str:
        """Return what is tokenized of a text to embed: with one of the model's prompts, by default its default one.

        Raises InvalidRequest, naming `prompt_name`, for a prompt that the model does not have.
        """
        prompts = self.embedder.prompts
        if prompt_name is not None and prompt_name not in prompts:
            known = f"its prompts are {', '.join(prompts)}" if prompts else "it has no prompts"
            raise InvalidRequest(f"this model has no prompt {prompt_name!r:.100}: {known}", param="prompt_name")
        return self.embedder.text(text, prompt_name)

    def prepare(
        self,
        prompt: str | Iterable[SupportsIndex],
        params: SamplingParams,
        *,
        request_id: str,
        prompt_text: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        truncation_side: TruncationSide = "left",
        shorten_output: bool = False,
        grammar: str | None = None,
        visible_special_tokens: frozenset[int] = frozenset(),
    ) -> RequestGroup:
        """Tokenize and validate: afterwards only the engine itself can refuse the request.

        `prompt_text` is what RequestOutput shows as the prompt if `prompt` is token ids (a rendered chat, for example).
        `add_special_tokens` adds the tokenizer's own (such as BOS) to a text. `truncate_prompt_tokens=k` keeps k
        tokens, -1 as many as leave room for the output; what is cut off, at `truncation_side`, is the prompt's own, not
        the special tokens that were added to it. `shorten_output` reduces a max_tokens beyond the context, instead of
        refusing the request. `grammar` is the grammar text of the output, see `structured.grammar`; None makes it from
        `params.structured_outputs`, which may take seconds.
        `visible_special_tokens` are in the text even if special tokens are skipped.

        Raises InvalidRequest, naming the field, or ContextLengthExceeded.
        """
        _check_params(params, self.client.info.vocab_size)
        params = _with_num_logprobs(params, self.client.info)
        if not self.client.info.can_generate:
            raise InvalidRequest(NO_LM_HEAD, param="model")
        truncation = Truncation(
            limit=truncate_prompt_tokens,
            side=truncation_side,
            room=max(1, self.client.info.max_model_len - (params.max_tokens or 1)),
        )
        text, token_ids = self._tokenize(prompt, truncation, add_special_tokens=add_special_tokens)
        max_tokens = self._max_tokens(len(token_ids), params, shorten_output=shorten_output)
        bad_word_ids = self._bad_word_ids(params.bad_words or ())
        stop_token_ids = frozenset(params.stop_token_ids or ())
        if grammar is None:
            constraint = params.structured_outputs
            grammar = "" if constraint is None else self.grammars.answer(constraint).result()
        if grammar or not params.ignore_eos:  # a text that is complete must end
            stop_token_ids |= self._eos_token_ids
        if params.structured_outputs is not None:
            params = msgspec.structs.replace(params, structured_outputs=None)
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        # Prompt logprobs are the same for all siblings: the first computes them.
        sibling_params = msgspec.structs.replace(params, prompt_logprobs=None)
        requests = [
            EngineRequest(
                request_id=f"{request_id}-{index}",
                group_id=f"{request_id}-0",
                prompt_token_ids=token_ids,
                params=params if index == 0 else sibling_params,
                max_tokens=max_tokens,
                stop_token_ids=stop_token_ids,
                bad_word_ids=bad_word_ids,
                grammar=grammar,
                seed=(seed + index * _SIBLING_SEED_STRIDE) % SEED_LIMIT,
                priority=priority,
                cache_salt=cache_salt,
            )
            for index in range(params.n)
        ]
        return RequestGroup(
            request_id,
            prompt_text if text is None else text,
            requests,
            self.tokenizer,
            visible_special_tokens=visible_special_tokens,
        )

    def prepare_embedding(
        self,
        prompt: str | Iterable[SupportsIndex],
        *,
        pooling: Pooling | None,
        request_id: str,
        prompt_text: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
        truncate_prompt_tokens: int | None = None,
        truncation_side: TruncationSide = "left",
        prompt_name: str | None = None,
    ) -> RequestGroup:
        """Prepare a group that returns an `embedding` instead of text; other arguments and errors as in `prepare`.

        `pooling` None is the model's own. A text gets the model's prompt of the name `prompt_name`, see
        `embedded_text`.
        """
        max_model_len = self.client.info.max_model_len
        truncation = Truncation(limit=truncate_prompt_tokens, side=truncation_side, room=max_model_len)
        text = prompt if isinstance(prompt, str) else None
        # A rendered chat has its own text, to which no prompt of the model is added.
        read = prompt if text is None or prompt_text is not None else self.embedded_text(text, prompt_name)
        _, token_ids = self._tokenize(read, truncation, add_special_tokens=add_special_tokens)
        if len(token_ids) > max_model_len:
            raise ContextLengthExceeded.beyond(max_model_len, f"the prompt has {len(token_ids)} tokens", param="prompt")
        requests = [
            EngineRequest(
                request_id=f"{request_id}-{index}",
                group_id=f"{request_id}-0",
                prompt_token_ids=token_ids,
                params=POOLING_PARAMS,
                max_tokens=1,
                priority=priority,
                cache_salt=cache_salt,
                pooling=each,
            )
            for index, each in enumerate(self.embedder.pooling if pooling is None else (pooling,))
        ]
        return RequestGroup(request_id, prompt_text if text is None else text, requests, self.tokenizer)

    def generate(self, groups: Sequence[RequestGroup]) -> Generator[tuple[RequestGroup, list[EngineOutput]]]:
        """Run prepared prompts together; yield (group, what it has taken) as it arrives, until all have finished.

        A sequence that the engine could not finish ends with finish_reason "error", and its group's `error` has the
        reason; the others go on. Ending the iteration early, also by an exception such as KeyboardInterrupt, aborts the
        rest. Raises what `EngineClient.submit` raises, and EngineDead when the engine dies.
        """
        outputs: queue.SimpleQueue[list[EngineOutput]] = queue.SimpleQueue()
        group_of = {request.request_id: group for group in groups for request in group.requests}
        unfinished = {group.request_id for group in groups}
        try:
            self.client.submit([request for group in groups for request in group.requests], outputs.put)
            while unfinished:
                for group, news in _by_group(self._next(outputs), group_of):
                    if stopped := group.push(news):
                        self.client.abort(stopped)
                    if group.error is not None and not self.client.is_alive():
                        raise EngineDead(group.error)
                    if group.is_finished:
                        unfinished.discard(group.request_id)
                    yield group, news
        finally:
            rest = [request_id for group in groups for request_id in group.unfinished_ids]
            if rest:
                self.client.abort(rest)

    async def run(self, groups: Sequence[RequestGroup], take: Take) -> None:
        """Run prepared prompts in the running event loop, until all have finished; cancelling aborts them.

        `take` is called in the event loop with the index of a prompt and its new output. The whole output so far is
        `group.result()`.

        Raises RequestFailed when the engine could not finish a sequence, EngineDead when it has died, and what `take`
        and `EngineClient.submit` raise, also for a refusal by an engine in another process; InvalidRequest if a grammar
        cannot be followed further. Earlier outputs are passed to `take` first, and the other prompts are aborted.
        """
        loop = asyncio.get_running_loop()
        if self._dispatcher is None or self._dispatcher.loop is not loop:
            self._dispatcher = Dispatcher(self.client, loop)
        await self._dispatcher.run(groups, take)

    def _tokenize(
        self, prompt: str | Iterable[SupportsIndex], truncation: Truncation, *, add_special_tokens: bool
    ) -> tuple[str | None, list[int]]:
        """Return the prompt's text, if it is one, and its token ids, truncated. Raises InvalidRequest."""
        text = prompt if isinstance(prompt, str) else None
        if isinstance(prompt, str):
            token_ids = self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
        else:
            token_ids = _as_token_ids("prompt", prompt)
        _check_token_ids("prompt", token_ids, self.client.info.vocab_size)
        if not token_ids:
            raise InvalidRequest("the prompt is empty", param="prompt")
        affixes = Affixes() if text is None or not add_special_tokens else self.tokenizer.affixes
        return text, truncate(token_ids, truncation, affixes=affixes, max_model_len=self.client.info.max_model_len)

    def _next(self, outputs: queue.SimpleQueue[list[EngineOutput]]) -> list[EngineOutput]:
        while True:
            self.client.stats()  # raises in a forked child, where nothing would ever come
            try:
                return outputs.get(timeout=_ALIVE_CHECK_SECONDS)
            except queue.Empty:
                if not self.client.is_alive():
                    raise EngineDead("the engine has died") from None

    def _max_tokens(self, num_prompt_tokens: int, params: SamplingParams, *, shorten_output: bool) -> int:
        """Return the output's limit in tokens. Raises ContextLengthExceeded when prompt and output do not fit the
        context.
        """
        max_model_len = self.client.info.max_model_len
        rest = max_model_len - num_prompt_tokens
        wanted = 1 if shorten_output or params.max_tokens is None else params.max_tokens
        if wanted > rest:
            raise ContextLengthExceeded.beyond(
                max_model_len,
                f"{num_prompt_tokens + wanted} tokens were requested: {num_prompt_tokens} in the prompt and {wanted} "
                "for the output",
                param="prompt" if num_prompt_tokens >= max_model_len else "max_tokens",
                lengths=(num_prompt_tokens, wanted if num_prompt_tokens < max_model_len else 0),
            )
        if params.max_tokens is not None and params.max_tokens <= rest:
            return params.max_tokens
        if params.min_tokens > rest:
            raise InvalidRequest(
                f"min_tokens ({params.min_tokens}) exceeds the {rest} tokens that the context has left",
                param="min_tokens",
            )
        return rest

    def _bad_word_ids(self, bad_words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return token sequences of each word, at the start of a text and after a space.

        The second one is omitted if it ends in the first, which forbids it already: this is so if the tokenizer puts a
        space before every text (sentencepiece).
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in bad_words:
            bare = tuple(self.tokenizer.encode(word.lstrip(), add_special_tokens=False))
            spaced = tuple(self.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
            if not bare:
                raise InvalidRequest(f"bad_words: {word!r} has no tokens", param="bad_words")
            for sequence in (bare,) if spaced[-len(bare) :] == bare else (bare, spaced):
                if len(sequence) > MAX_BAD_WORD_TOKENS:
                    raise InvalidRequest(
                        f"bad_words: {word!r} has {len(sequence)} tokens, at most {MAX_BAD_WORD_TOKENS} are allowed",
                        param="bad_words",
                    )
                sequences[sequence] = None
        if len(sequences) > MAX_BAD_WORDS:
            raise InvalidRequest(
                f"bad_words make {len(sequences)} token sequences (most words are two: with and without a space "
                f"before them), at most {MAX_BAD_WORDS} are allowed",
                param="bad_words",
            )
        return tuple(sequences)


def sampling_defaults(model: str | pathlib.Path) -> dict[str, Any]:
    """SamplingParams fields that the generation_config.json of a model directory recommends.

    Raises CheckpointError if it cannot be read, or requests could not have such values.
    """
    config = read_generation_config(model)
    defaults = {field: config[key] for key, field in GENERATION_FIELDS.items() if config.get(key) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequest as error:
        message = str(error).replace("max_tokens", "max_new_tokens")  # as it is called there
        raise CheckpointError(f"{model}/generation_config.json: {message}") from error
    return defaults


def _by_group(
    outputs: list[EngineOutput], group_of: Mapping[str, RequestGroup]
) -> Iterable[tuple[RequestGroup, list[EngineOutput]]]:
    news: dict[str, tuple[RequestGroup, list[EngineOutput]]] = {}
    for output in outputs:
        group = group_of[output.request_id]
        news.setdefault(group.request_id, (group, []))[1].append(output)
    return news.values()


def _check_params(params: SamplingParams, vocab_size: int) -> None:
    """Check what SamplingParams cannot check by itself."""
    if params.stop_strings and not params.detokenize:
        raise InvalidRequest("stop strings need detokenize=True", param="stop")
    _check_token_ids("logit_bias", tuple(params.logit_bias or ()), vocab_size)
    _check_token_ids("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_token_ids("stop_token_ids", params.stop_token_ids or (), vocab_size)
    _check_token_ids("logprob_token_ids", params.logprob_token_ids or (), vocab_size)
    if len(params.allowed_token_ids or ()) > vocab_size:
        raise InvalidRequest("allowed_token_ids has more entries than the vocabulary", param="allowed_token_ids")


def _with_num_logprobs(params: SamplingParams, info: EngineInfo) -> SamplingParams:
    """Return the parameters with the number of all tokens where a field says -1.

    Raises InvalidRequest, naming the field, for more than the engine computes.
    """
    for name in ("logprobs", "prompt_logprobs"):
        number = getattr(params, name)
        if number is None:
            continue
        wanted = info.vocab_size if number == -1 else number
        if 0 <= info.max_logprobs < wanted:
            asked = f" is {number}" if number != -1 else f"=-1 asks for all {wanted} tokens of the vocabulary"
            raise InvalidRequest(
                f"{name}{asked}, at most {info.max_logprobs} are allowed here (max_logprobs of the engine)"
                + (": logprob_token_ids names those that are wanted" if name == "logprobs" else ""),
                param=name,
            )
        params = msgspec.structs.replace(params, **{name: min(wanted, info.vocab_size)})
    return params


def _as_token_ids(name: str, token_ids: Iterable[Any]) -> list[int]:
    """Plain ints, also from a NumPy array."""
    try:
        return list(map(operator.index, token_ids))
    except TypeError as error:
        raise InvalidRequest(f"{name} must be token ids (integers): {error}", param=name) from error


def _check_token_ids(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = dict.fromkeys(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        what = "token id {} is" if len(wrong) == 1 else "token ids {} are"
        shown = ", ".join(map(str, wrong))
        raise InvalidRequest(f"{name}: {what.format(shown)} outside the vocabulary of {vocab_size}", param=name)
