"""LLM and generate: the Python API, for scripts and notebooks. The engine runs in a thread of this process.

All calls block the calling thread, so they work the same with an event loop running (Jupyter) and from several threads
at once. jax is imported when an engine starts.
"""

import contextlib
import itertools
import logging
import secrets
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, overload

from jaxserve import vllm_flags
from jaxserve.config import DEFAULT_MODEL, DTypeName, EngineConfig, Quantization, WarmUp, convert_option
from jaxserve.engine.client import EngineClient, EngineInfo, EngineStats
from jaxserve.engine.embedding import EmbeddingOutput, check_dimensions, finish_embedding
from jaxserve.engine.frontend import Frontend, sampling_defaults
from jaxserve.engine.output import RequestGroup
from jaxserve.engine.prompts import Prompt, PromptDict, as_prompt_list, tokenize_prompts
from jaxserve.errors import ConfigError, InvalidRequest, RequestFailed
from jaxserve.interrupts import while_waiting_for_threads
from jaxserve.loading.builtin import resolve_names
from jaxserve.progress import Progress
from jaxserve.request import DEFAULT_MAX_LOGPROBS, Pooling, RequestOutput, SamplingParams
from jaxserve.tokenizer import Tokenizer
from jaxserve.values import convert, names_options, rule

if TYPE_CHECKING:
    from jax.sharding import Mesh

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]

_FLAG = rule(bool)
_OPTIONAL_TEXT = rule(str | None)
_POOLING = rule(Pooling)


class LLM:
    """A model that generates in this process.

        with LLM("path/to/model") as llm:
            for output in llm.generate(["Once upon a time", "The capital of France is"]):
                print(output.prompt, output.outputs[0].text)

    Options have the names of `jaxserve serve`'s flags; `EngineConfig` describes them.
    `mesh` puts the model on a device mesh of your own instead of `tensor_parallel_size` devices. The engine holds the
    device until `close`, the end of a `with`, or the end of this object.

    The same `seed` and the same calls give the same texts; parallel calls from several threads have no fixed order.
    """

    @names_options("LLM", advice=vllm_flags.verdict)
    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        mesh: "Mesh | None" = None,
        progress: bool = True,
        revision: str | None = None,
        tokenizer: str | None = None,
        dtype: DTypeName = "auto",
        quantization: Quantization | None = None,
        max_model_len: int | None = None,
        load_format: Literal["auto", "safetensors", "dummy"] = "auto",
        seed: int = 0,
        block_size: int = 16,
        kv_cache_memory: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enable_prefix_caching: bool = True,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        max_num_waiting: int | None = None,
        scheduling_policy: Literal["fcfs", "priority"] = "fcfs",
        scheduler: Literal["continuous", "static"] = "continuous",
        tensor_parallel_size: int = 1,
        kernels: Literal["auto", "xla", "sm90"] = "auto",
        overlap: bool = True,
        dequantize: bool | None = None,
        quantize_activations: bool | None = None,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        warmup: WarmUp = "full",
        compilation_cache_dir: str | None = None,
    ):
        """Load the model and compile its steps; `progress` shows bars meanwhile. Raises StartupError."""
        _check_mesh(mesh)
        progress = convert_option("progress", progress, _FLAG)
        config = EngineConfig(
            model=model,
            revision=revision,
            tokenizer=tokenizer,
            dtype=dtype,
            quantization=quantization,
            max_model_len=max_model_len,
            load_format=load_format,
            seed=seed,
            block_size=block_size,
            kv_cache_memory=kv_cache_memory,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_waiting=max_num_waiting,
            scheduling_policy=scheduling_policy,
            scheduler=scheduler,
            tensor_parallel_size=tensor_parallel_size,
            kernels=kernels,
            overlap=overlap,
            dequantize=dequantize,
            quantize_activations=quantize_activations,
            max_logprobs=max_logprobs,
            warmup=warmup,
            compilation_cache_dir=compilation_cache_dir,
        )
        # The tokenizer comes first: a directory without one fails before any weight is read.
        config = resolve_names(config, progress=progress)
        loaded_tokenizer = Tokenizer.load(config.tokenizer or config.model)
        defaults = sampling_defaults(config.model)

        from jaxserve.engine.local import LocalEngineClient

        client = LocalEngineClient.start(config, mesh=mesh, progress=progress)
        self._attach(Frontend(client, loaded_tokenizer, default_sampling=defaults, seed=config.seed))

    @classmethod
    def from_frontend(cls, frontend: Frontend) -> "LLM":
        """Return an LLM on an engine that runs already; closing the LLM closes the engine."""
        llm = cls.__new__(cls)
        llm._attach(frontend)
        return llm

    def _attach(self, frontend: Frontend) -> None:
        self._frontend = frontend
        self._id_prefix = f"llm-{secrets.token_hex(4)}"
        self._counter = itertools.count()
        # Also at interpreter exit, while jax still works: a daemon thread inside XLA would crash it.
        self._finalizer = weakref.finalize(self, _close, frontend.client)

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

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Run `generate` for the next message of one conversation or of many, through the model's chat template."""
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise InvalidRequest(
                f"messages must be a list of dicts, or of such lists, got {messages!r:.100}", param="messages"
            )
        is_single = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_single else messages
        prompts = [
            self._render(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        return self._run(self._prepare(prompts, sampling_params), use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Continue one prompt; yield new output as it arrives. Closing the iterator aborts the request.

        Raises InvalidRequest at once, except for a grammar that becomes too complex; this, RequestFailed and EngineDead
        are raised while iterating.
        """
        return self._stream(self._prepare([prompt], sampling_params)[0])

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[RequestOutput]:
        """Run `stream` for the next message of a conversation."""
        prompt = self._render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.stream(prompt, sampling_params)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: Pooling = "last",
        dimensions: int | None = None,
        normalize: bool = True,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """Return a vector for each prompt, from the hidden states after the final norm; prompts are as in `generate`.

        `pooling` takes the last token's state or the mean over all tokens. `dimensions` keeps only the first entries;
        `normalize` scales vectors to length 1. Raises InvalidRequest (before anything runs), RequestFailed, EngineDead.
        """
        pooling = convert("pooling", pooling, _POOLING)
        dimensions = check_dimensions(
            dimensions, hidden_size=self.info.hidden_size, allowed=self.info.embedding_dimensions
        )
        normalize = convert("normalize", normalize, _FLAG)
        tokenized = tokenize_prompts(as_prompt_list(prompts), self._frontend.tokenizer)
        groups = [
            self._frontend.prepare_embedding(
                prompt.token_ids,
                pooling=pooling,
                request_id=f"{self._id_prefix}-{next(self._counter)}",
                prompt_text=prompt.text,
            )
            for prompt in tokenized
        ]
        outputs = []
        for group, result in zip(groups, self._run(groups, use_tqdm=use_tqdm), strict=True):
            if group.embedding is None:
                raise RequestFailed(group.error or "the engine could not finish a prompt")
            outputs.append(
                EmbeddingOutput(
                    prompt=result.prompt,
                    prompt_token_ids=result.prompt_token_ids,
                    embedding=finish_embedding(group.embedding, dimensions=dimensions, normalize=normalize),
                    num_cached_tokens=result.num_cached_tokens,
                )
            )
        return outputs

    def encode(
        self, prompts: Prompt | Sequence[Prompt], *, pooling: Pooling = "last", use_tqdm: bool = True
    ) -> list[EmbeddingOutput]:
        """Return the hidden state of each prompt as the model has it: `embed` without scaling to length 1."""
        return self.embed(prompts, pooling=pooling, normalize=False, use_tqdm=use_tqdm)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        pooling: Pooling = "last",
        use_tqdm: bool = True,
    ) -> list[float]:
        """Return the cosine between the vectors of two texts, for each text of `text_2`.

        `text_1` is one text for all, or one for each. Useful with models that were trained for embeddings. Raises as
        `embed` does.
        """
        first, second = ([each] if isinstance(each, str) else list(each) for each in (text_1, text_2))
        if len(first) not in (1, len(second)):
            raise InvalidRequest(
                f"text_1 must have one text, or as many as text_2: {len(first)} and {len(second)}", param="text_1"
            )
        texts = list(dict.fromkeys([*first, *second]))
        vectors = dict(zip(texts, self.embed(texts, pooling=pooling, use_tqdm=use_tqdm), strict=True))
        first *= len(second) if len(first) == 1 else 1
        return [float(vectors[a].embedding @ vectors[b].embedding) for a, b in zip(first, second, strict=True)]

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
        return self._client.info

    def stats(self) -> EngineStats:
        """Return the engine's gauges and counters: blocks, prefix hits, preemptions, steps."""
        return self._client.stats()

    def reset_prefix_cache(self) -> bool:
        """Drop cached prefixes. Returns false, and does nothing, while a request runs."""
        return self._client.reset_prefix_cache()

    def close(self) -> None:
        """Stop the engine and free the device. Idempotent; later calls raise EngineDead."""
        self._client.close()
        self._frontend.grammars.close()
        self._finalizer.detach()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _client(self) -> EngineClient:
        return self._frontend.client

    def _render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template: str | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> PromptDict:
        _check_mappings("messages", messages)
        _check_mappings("tools", tools or ())
        if not isinstance(chat_template_kwargs, Mapping | None):
            raise InvalidRequest(
                f"chat_template_kwargs must be a dict, got {chat_template_kwargs!r:.100}", param="chat_template_kwargs"
            )
        add_generation_prompt = convert("add_generation_prompt", add_generation_prompt, _FLAG)
        continue_final_message = convert("continue_final_message", continue_final_message, _FLAG)
        chat_template = convert("chat_template", chat_template, _OPTIONAL_TEXT)
        tokenizer = self._frontend.tokenizer
        text = tokenizer.render_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template=chat_template,
            template_kwargs=chat_template_kwargs,
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
                    prompt.token_ids,
                    params,
                    request_id=f"{self._id_prefix}-{next(self._counter)}",
                    prompt_text=prompt.text,
                    shorten_output=True,
                )
            except InvalidRequest as error:
                if len(prompts) > 1:
                    error.add_note(f"in prompts[{number}]")
                raise
            groups.append(group)
        return groups

    def _run(self, groups: list[RequestGroup], *, use_tqdm: bool) -> list[RequestOutput]:
        use_tqdm = convert("use_tqdm", use_tqdm, _FLAG)
        if not groups:
            return []
        self.stats()  # raises in a forked child, before the progress bar waits for a lock that no thread there releases
        # closing: a traceback that is kept (as in Jupyter) would keep the generator, and its requests, alive.
        with (
            Progress(len(groups), is_shown=use_tqdm) as progress,
            contextlib.closing(self._frontend.generate(groups)) as events,
        ):
            for group, delta in events:
                progress.update(group, delta)
        for number, group in enumerate(groups):
            if group.error is not None:
                logger.error("prompts[%d] could not be finished: %s", number, group.error)
        return [group.result() for group in groups]

    def _stream(self, group: RequestGroup) -> Iterator[RequestOutput]:
        with contextlib.closing(self._frontend.generate([group])) as events:
            for _, delta in events:
                if group.error is not None:
                    raise RequestFailed(group.error) if group.refusal is None else group.refusal.error()
                yield delta
                group.forget_logprobs()


def _close(client: EngineClient) -> None:
    """Close the engine of an LLM that was not closed; a KeyboardInterrupt raised here would get lost."""
    with while_waiting_for_threads(is_last=True):
        client.close()


def _check_mesh(mesh: object) -> None:
    """Raise ConfigError for an object that is not a mesh, or a mesh without devices."""
    if mesh is None:
        return
    from jax.sharding import Mesh

    if not isinstance(mesh, Mesh) or mesh.devices.size == 0:
        raise ConfigError(f"mesh must be a jax.sharding.Mesh of at least one device, got {mesh!r:.100}")


def _check_mappings(param: str, values: object) -> None:
    """Raise InvalidRequest for anything but a sequence of mappings."""
    if not isinstance(values, Sequence) or not all(isinstance(value, Mapping) for value in values):
        raise InvalidRequest(f"{param} must be a list of dicts, got {values!r:.100}", param=param)


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

    `sampling` are fields of SamplingParams. `model` is a model directory or a built-in model's name, by default the
    built-in one. The first call for a model starts its engine, which compiles steps as they are first needed and is
    kept for later calls until the program ends; use `LLM` to set its options, or to close it.

    Returns one RequestOutput for a text, a list for a list. Raises TypeError for an unknown sampling field,
    InvalidRequest for a value out of range, StartupError when the model cannot be loaded.
    """
    SamplingParams(**sampling)  # checks them before an engine is started
    llm = _default_llms.get(DEFAULT_MODEL if model is None else model)
    is_single = isinstance(prompts, str)
    outputs = llm.generate(prompts, llm.sampling_params(sampling), use_tqdm=not is_single)
    return outputs[0] if is_single else outputs
