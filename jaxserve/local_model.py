"""LocalModel: what LLM and AsyncLLM have in common. Its options, its engine, and how requests are made for it.

jax is imported when an engine starts.
"""

import dataclasses
import functools
import inspect
import itertools
import logging
import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from jaxserve import vllm_flags
from jaxserve.answers.choosing.message_style import as_template_reads
from jaxserve.config import (
    DEFAULT_MODEL,
    DTypeName,
    EngineConfig,
    KVCacheDType,
    MaxModelLen,
    Quantization,
    StoredFormat,
    WarmUp,
    convert_option,
)
from jaxserve.engine.beam_search import BeamSearch, prepare_beams
from jaxserve.engine.client import EngineClient, EngineInfo, EngineStats
from jaxserve.engine.embedding import (
    NO_HEAD,
    ClassificationOutput,
    EmbeddingOutput,
    check_dimensions,
    finish_embedding,
    pooled_vector,
)
from jaxserve.engine.frontend import Frontend, sampling_defaults
from jaxserve.engine.output import RequestGroup
from jaxserve.engine.prompts import Prompt, PromptDict, as_prompt_list, tokenize_prompts
from jaxserve.errors import ConfigError, InvalidRequest, RequestFailed
from jaxserve.interrupts import while_waiting_for_threads
from jaxserve.loading.builtin import resolve_names
from jaxserve.loading.classifier import ClassificationHead
from jaxserve.loading.sentence_transformers import Embedder
from jaxserve.request import Pooling
from jaxserve.sampling_params import DEFAULT_MAX_LOGPROBS, BeamSearchParams, SamplingParams
from jaxserve.tokenizer import Tokenizer
from jaxserve.values import check_names, convert, rule, unknown_names

if TYPE_CHECKING:
    from jax.sharding import Mesh

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]

_FLAG = rule(bool)
_OPTIONAL_TEXT = rule(str | None)
_POOLING = rule(Pooling | None)


class ChatOptions(TypedDict, total=False):
    """How a conversation becomes a prompt.

    Attributes:
        tools: tools that the model may call, as dicts of OpenAI's API.
        add_generation_prompt: true, by default, to let the template begin the assistant's message.
        continue_final_message: true to let the model continue the last message.
        chat_template: a Jinja template to use instead of the model's own.
        chat_template_kwargs: further variables of the template.
    """

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None


_CHAT_OPTIONS = tuple(ChatOptions.__annotations__)


_OPTIONS = {field.name: field for field in dataclasses.fields(EngineConfig)}
_ALIASES = {
    alias.removeprefix("--").replace("-", "_"): name
    for name, field in _OPTIONS.items()
    for alias in field.metadata["aliases"]
    if alias.startswith("--")
}
"""Names of vLLM's keywords for options that have another name here."""


def _judged[**P, R](constructor: Callable[P, R]) -> Callable[P, R]:
    """Decorate the constructor of a model: keywords of vLLM are taken, named in the log, or refused, as flags are.

    It raises ConfigError for all options that are refused or wrong, and TypeError if some are unknown.
    """
    known = list(inspect.signature(constructor).parameters)[1:]

    @functools.wraps(constructor)
    def checked(*args: Any, **options: Any) -> Any:
        judged = vllm_flags.judge_keywords(options, known=known, aliases=_ALIASES)
        unknown = unknown_names(type(args[0]).__name__, judged.unknown, known=known, kind="option")
        refused = [*unknown, *vllm_flags.sentences(judged.refused)]
        if refused:
            try:
                EngineConfig(**{name: value for name, value in judged.taken.items() if name in _OPTIONS})
            except ConfigError as error:
                refused.append(str(error))
            raise (TypeError if unknown else ConfigError)("; ".join(refused))
        for text in vllm_flags.sentences(judged.harmless):
            logger.warning(text)
        return constructor(*args, **judged.taken)

    same: Any = checked
    return same


class LocalModel:
    """A model whose engine runs in a thread of this process; LLM and AsyncLLM add the calls that generate."""

    @_judged
    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        mesh: "Mesh | None" = None,
        progress: bool = True,
        revision: str | None = None,
        tokenizer: str | None = None,
        dtype: DTypeName = "auto",
        quantization: Quantization | StoredFormat | None = None,
        max_model_len: MaxModelLen = None,
        load_format: Literal["auto", "safetensors", "dummy"] = "auto",
        hf_overrides: dict[str, Any] | None = None,
        generation_config: str = "auto",
        override_generation_config: dict[str, Any] | None = None,
        seed: int = 0,
        block_size: int = 16,
        kv_cache_memory: int | None = None,
        gpu_memory_utilization: float = 0.9,
        kv_cache_dtype: KVCacheDType = "auto",
        enable_prefix_caching: bool = True,
        max_cached_states: int = 32,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_num_waiting: int | None = None,
        scheduling_policy: Literal["fcfs", "priority"] = "fcfs",
        scheduler: Literal["continuous", "static"] = "continuous",
        speculative_config: dict[str, Any] | None = None,
        tensor_parallel_size: int = 1,
        pipeline_parallel_size: int = 1,
        enable_expert_parallel: bool = False,
        kernels: Literal["auto", "xla", "sm90"] = "auto",
        overlap: bool = True,
        watchdog_timeout: float | None = None,
        dequantize: bool | None = None,
        quantize_activations: bool | None = None,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        warmup: WarmUp = "background",
        programs: str | None = None,
        compilation_cache_dir: str | None = None,
    ):
        """Load the model and compile the steps that every request needs; `progress` shows bars meanwhile. The other
        steps are loaded from the compilation cache, or compiled, while requests run: `warmup="full"` waits for all.
        Raises StartupError.
        """
        options = {name: value for name, value in locals().items() if name in _OPTIONS}
        _check_mesh(mesh)
        progress = convert_option("progress", progress, _FLAG)
        config = EngineConfig(**options)
        # The tokenizer comes first: a directory without one fails before any weight is read.
        config = resolve_names(config, progress=progress)
        loaded_tokenizer = Tokenizer.load(config.tokenizer or config.model)
        defaults = sampling_defaults(config.model)

        from jaxserve.engine.local import LocalEngineClient

        client = LocalEngineClient.start(config, mesh=mesh, progress=progress)
        self._attach(Frontend(client, loaded_tokenizer, default_sampling=defaults, seed=config.seed))

    @classmethod
    def from_frontend[M](cls: type[M], frontend: Frontend) -> M:
        """Return a model on an engine that runs already; closing it closes the engine."""
        model: Any = cls.__new__(cls)
        model._attach(frontend)
        return model

    def _attach(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._id_prefix = f"llm-{secrets.token_hex(4)}"
        self._counter = itertools.count()
        # Also at interpreter exit, while jax still works: a daemon thread inside XLA would crash it.
        self._finalizer = weakref.finalize(self, _close, frontend.client)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the SamplingParams that the model's authors recommend, by its generation_config.json."""
        return self._frontend.sampling_params()

    def sampling_params(
        self, given: Mapping[str, Any] | None = None, *, fallback: Mapping[str, Any] | None = None
    ) -> SamplingParams:
        """Make SamplingParams of the given fields, else those that the model's authors recommend, else `fallback`."""
        return self._frontend.sampling_params(given, fallback=fallback)

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self._frontend.tokenizer

    @property
    def info(self) -> EngineInfo:
        """The engine's sizes, as chosen at start-up."""
        return self.client.info

    def stats(self) -> EngineStats:
        """Return the engine's gauges and counters: blocks, prefix hits, preemptions, steps."""
        return self.client.stats()

    def reset_prefix_cache(self) -> bool:
        """Drop cached prefixes. Returns false, and does nothing, while a request runs."""
        return self.client.reset_prefix_cache()

    def close(self) -> None:
        """Stop the engine and free the device. Idempotent; later requests raise EngineDead."""
        self.client.close()
        self._frontend.grammars.close()
        self._finalizer.detach()

    @property
    def client(self) -> EngineClient:
        """The engine's client: what takes requests of token ids."""
        return self._frontend.client

    def _render(self, messages: Sequence[Message], options: ChatOptions) -> PromptDict:
        check_names("chat", options, known=_CHAT_OPTIONS, kind="option")
        tools, template_kwargs = options.get("tools"), options.get("chat_template_kwargs")
        _check_mappings("messages", messages)
        _check_contents(messages)
        _check_mappings("tools", tools or ())
        if not isinstance(template_kwargs, Mapping | None):
            raise InvalidRequest(
                f"chat_template_kwargs must be a dict, got {template_kwargs!r:.100}", param="chat_template_kwargs"
            )
        chat_template = convert("chat_template", options.get("chat_template"), _OPTIONAL_TEXT)
        tokenizer = self._frontend.tokenizer
        text = tokenizer.render_chat_template(
            as_template_reads(messages, tokenizer, chat_template=chat_template),
            tools=tools,
            add_generation_prompt=flag("add_generation_prompt", options.get("add_generation_prompt", True)),
            continue_final_message=flag("continue_final_message", options.get("continue_final_message", False)),
            chat_template=chat_template,
            template_kwargs=template_kwargs,
        )
        return {"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)}

    def _prepare(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestGroup]:
        """Tokenize and validate everything before anything runs."""
        if sampling_params is None:
            sampling_params = self._frontend.sampling_params()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if not isinstance(sampling_params, Sequence) or not all(
            isinstance(params, SamplingParams) for params in sampling_params
        ):
            raise InvalidRequest(
                f"sampling_params must be SamplingParams, or a list of them, got {sampling_params!r:.100}",
                param="sampling_params",
            )
        if len(sampling_params) != len(prompts):
            raise InvalidRequest(
                f"{len(sampling_params)} sampling_params for {len(prompts)} prompts", param="sampling_params"
            )
        tokenized = tokenize_prompts(prompts, self._frontend.tokenizer)
        groups = []
        for number, (prompt, params) in enumerate(zip(tokenized, sampling_params, strict=True)):
            try:
                group = self._frontend.prepare(
                    prompt.token_ids, params, request_id=self._next_id(), prompt_text=prompt.text, shorten_output=True
                )
            except InvalidRequest as error:
                if len(prompts) > 1:
                    error.add_note(f"in prompts[{number}]")
                raise
            groups.append(group)
        return groups

    def _prepare_beams(self, prompts: Sequence[Prompt], params: BeamSearchParams) -> list[BeamSearch]:
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(f"params must be BeamSearchParams, got {params!r:.100}", param="params")
        return [
            prepare_beams(
                self._frontend,
                prompt.token_ids,
                params,
                request_id=self._next_id(),
                prompt_text=prompt.text,
                shorten_output=True,
            )
            for prompt in tokenize_prompts(prompts, self._frontend.tokenizer)
        ]

    def _prepare_embeddings(
        self, prompts: Prompt | Sequence[Prompt], pooling: Pooling | None, prompt_name: str | None = None
    ) -> list[RequestGroup]:
        pooling = convert("pooling", pooling, _POOLING)
        prompt_name = convert("prompt_name", prompt_name, _OPTIONAL_TEXT)

        def read(text: str) -> str:
            return self._frontend.embedded_text(text, prompt_name)

        return [
            self._frontend.prepare_embedding(
                prompt.token_ids, pooling=pooling, request_id=self._next_id(), prompt_text=prompt.text
            )
            for prompt in tokenize_prompts(as_prompt_list(prompts), self._frontend.tokenizer, read=read)
        ]

    def _checked_dimensions(self, dimensions: int | None) -> int | None:
        return check_dimensions(dimensions, size=self._frontend.embedder.size, allowed=self.info.embedding_dimensions)

    def _head(self) -> ClassificationHead:
        """Return what classifies texts. Raises InvalidRequest if the model generates texts instead."""
        if self._frontend.head is None:
            raise InvalidRequest(NO_HEAD, param="prompts")
        return self._frontend.head

    def _next_id(self) -> str:
        return f"{self._id_prefix}-{next(self._counter)}"


def flag(name: str, value: object) -> bool:
    """Return the argument `name` as True or False. Raises InvalidRequest."""
    return convert(name, value, _FLAG)


def optional_flag(name: str, value: object) -> bool | None:
    """Return the argument `name` as True, False or None. Raises InvalidRequest."""
    return None if value is None else flag(name, value)


def embedding_of(
    group: RequestGroup, embedder: Embedder, *, dimensions: int | None, normalize: bool | None
) -> EmbeddingOutput:
    """Return the vector of a request for one that has finished. Raises RequestFailed."""
    if group.embedding is None:
        raise RequestFailed(group.error or "the engine could not finish a prompt")
    result = group.result()
    return EmbeddingOutput(
        prompt=result.prompt,
        prompt_token_ids=result.prompt_token_ids,
        embedding=finish_embedding(group.embedding, embedder, dimensions=dimensions, normalize=normalize),
        num_cached_tokens=result.num_cached_tokens,
    )


def classification_of(group: RequestGroup, head: ClassificationHead) -> ClassificationOutput:
    """Return the probabilities of the labels of a text, from the state of its last token. Raises RequestFailed."""
    if group.embedding is None:
        raise RequestFailed(group.error or "the engine could not finish a prompt")
    return ClassificationOutput(
        prompt=group.prompt,
        prompt_token_ids=group.prompt_token_ids,
        probs=head.probs(pooled_vector(group.embedding)),
        labels=head.labels,
    )


def _close(client: EngineClient) -> None:
    """Close the engine of a model that was not closed; a KeyboardInterrupt raised here would get lost."""
    with while_waiting_for_threads(is_last=True):
        client.close()


def _check_mesh(mesh: object) -> None:
    """Raise ConfigError for an object that is not a mesh, or a mesh without devices."""
    if mesh is None:
        return
    from jax.sharding import Mesh

    if not isinstance(mesh, Mesh) or mesh.devices.size == 0:
        raise ConfigError(f"mesh must be a jax.sharding.Mesh of at least one device, got {mesh!r:.100}")


def _check_contents(messages: Sequence[Message]) -> None:
    """Raise InvalidRequest for a message without a role or, unless an assistant has written it, without content: a
    template would leave it empty.
    """
    for index, message in enumerate(messages):
        for name in ("role", "content"):
            if message.get(name) is None and (name, message.get("role")) != ("content", "assistant"):
                param = f"messages[{index}].{name}"
                raise InvalidRequest(f"{param} is missing in {message!r:.100}", param=param)


def _check_mappings(param: str, values: object) -> None:
    """Raise InvalidRequest for anything but a sequence of mappings."""
    if not isinstance(values, Sequence) or not all(isinstance(value, Mapping) for value in values):
        raise InvalidRequest(f"{param} must be a list of dicts, got {values!r:.100}", param=param)
