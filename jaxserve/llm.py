"""LLM and generate: the Python API, for scripts and notebooks. The engine runs in a thread of this process.

All calls block the calling thread, so they work the same with an event loop running (Jupyter) and from several threads
at once. jax is imported when an engine starts.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Unpack, overload

from jaxserve.config import DEFAULT_MODEL
from jaxserve.engine.beam_search import BeamSearchOutput, run_beams
from jaxserve.engine.embedding import ClassificationOutput, EmbeddingOutput
from jaxserve.engine.output import RequestGroup
from jaxserve.engine.prompts import Prompt, as_prompt_list
from jaxserve.engine.scoring import NO_INSTRUCTION, check_pair_options, pair_scorer
from jaxserve.errors import InvalidRequest, RequestFailed
from jaxserve.garbage import full_collections
from jaxserve.local_model import ChatOptions, LocalModel, Message, classification_of, embedding_of, flag, optional_flag
from jaxserve.progress import Progress
from jaxserve.request import Pooling, RequestOutput
from jaxserve.sampling_params import BeamSearchParams, SamplingParams
from jaxserve.values import convert, rule

logger = logging.getLogger(__name__)

_CONCURRENCY = rule(int | None)
_TEXTS = rule(str | Sequence[str])


class LLM(LocalModel):
    """A model that generates in this process.

        with LLM("path/to/model") as llm:
            for output in llm.generate(["Once upon a time", "The capital of France is"]):
                print(output.prompt, output.outputs[0].text)

    Options have the names of `jaxserve serve`'s flags; `EngineConfig` describes them. Keywords of vLLM's LLM are judged
    as its flags are: those that need nothing are logged, others raise one ConfigError with all reasons.
    `mesh` puts the model on a device mesh of your own instead of `tensor_parallel_size` devices. The engine holds the
    device until `close`, the end of a `with`, or the end of this object.

    The same `seed` and the same calls give the same texts; parallel calls from several threads have no fixed order.
    """

    @full_collections.later()
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue one prompt or many, all together; results are in the order of the prompts.

        A prompt is a text, a list of token ids, or {"prompt_token_ids": [...]}; `prompt_token_ids` takes the place of
        `prompts` for token ids. `sampling_params` apply to all prompts, or there is one per prompt; None uses the
        model's defaults and 16 tokens. A max_tokens beyond the context is reduced to what fits. Interrupting the call
        aborts its requests.

        A prompt that the engine could not finish has finish_reason "error" and is logged; the others are complete.
        Raises InvalidRequest (before anything runs) and EngineDead.
        """
        if (prompts is None) == (prompt_token_ids is None):
            raise InvalidRequest("give either prompts or prompt_token_ids", param="prompts")
        given: Any = prompt_token_ids if prompts is None else prompts
        return self._run(self._prepare(as_prompt_list(given), sampling_params), use_tqdm=use_tqdm)

    @full_collections.later()
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **options: Unpack[ChatOptions],
    ) -> list[RequestOutput]:
        """Run `generate` for the next message of one conversation or of many, through the model's chat template."""
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise InvalidRequest(
                f"messages must be a list of dicts, or of such lists, got {messages!r:.100}", param="messages"
            )
        is_single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_single else messages
        prompts = [self._render(conversation, options) for conversation in conversations]
        return self._run(self._prepare(prompts, sampling_params), use_tqdm=use_tqdm)

    @full_collections.later()
    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, concurrency_limit: int | None = None
    ) -> list[BeamSearchOutput]:
        """Search the most likely continuations of each prompt; prompts are as in `generate`, results in their order.

        Each token is a step of its own for every beam, so that a search takes longer than `generate` with as many
        sequences. `concurrency_limit` is how many prompts are searched at once, None for all. A max_tokens beyond the
        context is reduced to what fits. Raises InvalidRequest (before anything runs), RequestFailed and EngineDead.
        """
        concurrency_limit = convert("concurrency_limit", concurrency_limit, _CONCURRENCY)
        if concurrency_limit is not None and concurrency_limit < 1:
            raise InvalidRequest(
                f"concurrency_limit must be at least 1, got {concurrency_limit}", param="concurrency_limit"
            )
        searches = self._prepare_beams(as_prompt_list(prompts), params)
        at_once = concurrency_limit or max(1, len(searches))
        for first in range(0, len(searches), at_once):
            run_beams(self._frontend, searches[first : first + at_once])
        return [search.result() for search in searches]

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Continue one prompt; yield new output as it arrives. Closing the iterator aborts the request.

        Raises InvalidRequest at once, except for a grammar that becomes too complex; this, RequestFailed and EngineDead
        are raised while iterating.
        """
        return self._stream(self._prepare([prompt], sampling_params)[0])

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> Iterator[RequestOutput]:
        """Run `stream` for the next message of a conversation."""
        return self.stream(self._render(messages, options), sampling_params)

    @full_collections.later()
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """Return a vector for each prompt, from the hidden states after the final norm; prompts are as in `generate`.

        `pooling` says which tokens' states it is made of, `dimensions` keeps only the first entries, `normalize` scales
        vectors to length 1; None for each does what the model's files of sentence-transformers say, or else takes the
        last token's state and scales it. `prompt_name` is one of the prompts that these files have; it comes before
        each text. Raises InvalidRequest (before anything runs), RequestFailed, EngineDead.
        """
        dimensions = self._checked_dimensions(dimensions)
        normalize = optional_flag("normalize", normalize)
        groups = self._prepare_embeddings(prompts, pooling, prompt_name)
        self._run(groups, use_tqdm=use_tqdm)
        embedder = self._frontend.embedder
        return [embedding_of(group, embedder, dimensions=dimensions, normalize=normalize) for group in groups]

    def encode(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: Pooling | None = None, use_tqdm: bool = True
    ) -> list[EmbeddingOutput]:
        """Return the hidden state of each prompt as the model has it: `embed` without scaling to length 1."""
        return self.embed(prompts, pooling=pooling, normalize=False, use_tqdm=use_tqdm)

    def classify(self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True) -> list[ClassificationOutput]:
        """Return the probabilities of the labels of each prompt, by the model's classification head.

        Raises InvalidRequest (before anything runs; also for a model without such a head), RequestFailed, EngineDead.
        """
        head = self._head()
        groups = self._prepare_embeddings(prompts, "last")
        self._run(groups, use_tqdm=use_tqdm)
        return [classification_of(group, head) for group in groups]

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        pooling: Pooling | None = None,
        instruct: str | None = None,
        use_tqdm: bool = True,
    ) -> list[float]:
        """Return how well each text of `text_2` fits the one of `text_1`, which is one text for all, or one for each.

        Rerankers score a pair by their classification head or their next token, of which `instruct` says what to look
        for; all other models compare the vectors of both texts, by the cosine unless their files name another function.
        Raises as `embed` does, and InvalidRequest for a classification head of several labels.
        """
        first, second = (
            [each] if isinstance(each, str) else each
            for each in (convert("text_1", text_1, _TEXTS), convert("text_2", text_2, _TEXTS))
        )
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"text_1 must have one text, or as many as text_2: {len(first)} and {len(second)}", param="text_1"
            )
        first = first * len(second) if len(first) == 1 else first
        if (scorer := pair_scorer(self._frontend)) is not None:
            check_pair_options(scorer, pooling=pooling)
            groups = [
                scorer.prepare(query, document, request_id=self._next_id(), instruction=instruct)
                for query, document in zip(first, second, strict=True)
            ]
            self._run(groups, use_tqdm=use_tqdm)
            if failed := next((group for group in groups if group.error is not None), None):
                raise RequestFailed(failed.error)
            return [scorer.score(group) for group in groups]
        if instruct is not None:
            raise InvalidRequest(NO_INSTRUCTION, param="instruct")
        texts = list(dict.fromkeys([*first, *second]))
        embedder = self._frontend.embedder
        outputs = self.embed(
            texts, pooling=pooling, normalize=True if embedder.similarity == "cosine" else None, use_tqdm=use_tqdm
        )
        vectors = {text: output.embedding for text, output in zip(texts, outputs, strict=True)}
        return [embedder.similarity_of(vectors[a], vectors[b]) for a, b in zip(first, second, strict=True)]

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, groups: list[RequestGroup], *, use_tqdm: bool) -> list[RequestOutput]:
        use_tqdm = flag("use_tqdm", use_tqdm)
        if not groups:
            return []
        self.stats()  # raises in a forked child, before the progress bar waits for a lock that no thread there releases
        # closing: a traceback that is kept (as in Jupyter) would keep the generator, and its requests, alive.
        with (
            Progress(len(groups), is_shown=use_tqdm) as progress,
            contextlib.closing(self._frontend.generate(groups)) as events,
        ):
            for group, news in events:
                progress.update(group, news)
        for number, group in enumerate(groups):
            if group.error is not None:
                logger.error("prompts[%d] could not be finished: %s", number, group.error)
        return [group.result() for group in groups]

    def _stream(self, group: RequestGroup) -> Iterator[RequestOutput]:
        with contextlib.closing(self._frontend.generate([group])) as events:
            for _ in events:
                if group.error is not None:
                    raise RequestFailed(group.error) if group.refusal is None else group.refusal.error()
                if (delta := group.take_delta()) is not None:
                    yield delta
                    group.forget_logprobs()


class _DefaultLLMs:
    """One LLM per model name for `generate`, started when it is first needed, closed at exit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._llms: dict[str, LLM] = {}

    def get(self, model: str) -> LLM:
        with self._lock:
            if model not in self._llms:
                self._llms[model] = LLM(model, warmup="none")  # few of the shapes will be used
            return self._llms[model]


_default_llms = _DefaultLLMs()


@overload
def generate(prompts: str, *, model: str | None = None, **sampling: Any) -> RequestOutput: ...


@overload
def generate(prompts: list[str], *, model: str | None = None, **sampling: Any) -> list[RequestOutput]: ...


def generate(
    prompts: str | list[str], *, model: str | None = None, **sampling: Any
) -> RequestOutput | list[RequestOutput]:
    """Continue a prompt, or a list of them: print(generate("Once upon a time", max_tokens=50)).

    `sampling` are fields of SamplingParams; those that are left out have the values that the model's authors recommend,
    if they do. `model` is a model directory or a built-in model's name, by default the built-in one. The first call for
    a model starts its engine, which compiles steps as they are first needed and is kept for later calls until the
    program ends; use `LLM` to set its options, or to close it.

    Returns one RequestOutput for a text, a list for a list. Raises TypeError for an unknown sampling field,
    InvalidRequest for a value out of range and for what is no prompt, StartupError when the model cannot be loaded.
    """
    SamplingParams(**sampling)  # before an engine is started
    given = as_prompt_list(prompts)
    llm = _default_llms.get(DEFAULT_MODEL if model is None else model)
    is_single = isinstance(prompts, str)
    outputs = llm.generate(given, llm.sampling_params(sampling), use_tqdm=not is_single)
    return outputs[0] if is_single else outputs
