"""Every option of the engine and the server: frozen dataclasses, validated once, no jax.

A field is also a command-line flag (`max_num_seqs` is `--max-num-seqs`), with `help` and `group` in its metadata.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec

from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.request import Pooling
from jaxserve.sampling_params import DEFAULT_MAX_LOGPROBS, PARAMETERS
from jaxserve.speculation import Speculation, parse_speculation
from jaxserve.values import Rule, convert, rules

MAX_WORKERS = 64
MAX_ENGINES = 64
Positive = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
"""A count that devices hold as int32."""
Seconds = Annotated[float, msgspec.Meta(gt=0.0)]
DEFAULT_MODEL = "scribe-15m"
"""Name of the built-in model that is used if none is named."""
Name = Annotated[str, msgspec.Meta(min_length=1)]
"""The name of a file or model. An empty one would silently mean the default, which is None."""
DType = Literal["auto", "float32", "bfloat16", "float16"]
KVCacheDType = Literal["auto", "bfloat16", "float16", "float32", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"]
Quantization = Literal["int8", "fp8", "int4"]
StoredFormat = Literal[
    "auto-round", "awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "fbgemm_fp8", "gguf", "gptq",
    "gptq_marlin", "gpt_oss_mxfp4", "inc", "modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8", "moe_wna16",
    "mxfp4"
]  # fmt: skip
"""vLLM's names of formats that a quantized checkpoint has; `loading.overrides` compares them with what it says."""

# fmt: off
ToolCallParser = Literal[
    "auto", "none", "hf", "response_template", "deepseek_v32", "deepseek_v4", "deepseek_v41", "gigachat35", "kimi_k2",
    "kimi_k3", "mistral", "deepseek_v3", "deepseek_v31", "gpt_oss", "seed_oss", "qwen3_coder", "hy_v3", "hy_v4",
    "iquest_q1", "glm47", "glm45", "minimax_m2", "minimax_m3", "dots", "olmo3", "lfm2", "muse", "k2_horizon",
    "minicpm5", "step3", "solar_open", "plamo3", "gemma4", "functiongemma", "mirothinker", "functionary_v3_2",
    "granite", "granite-20b-fc", "phi4_mini_json", "cohere_command3", "hunyuan_a13b", "jamba", "minimax", "hyperclovax",
    "nemotron_json", "internlm", "apertus", "longcat", "inkling", "gigachat3", "xlam", "ernie45", "hermes", "pythonic",
    "llama4_pythonic", "llama3_json", "apertus2509", "cohere_command4", "deepseekv3", "deepseekv31", "deepseekv32",
    "deepseekv4", "deepseekv41", "glm", "spark", "spark25", "glm53_flash", "ling3", "poolside_v1", "gpt-oss", "openai",
    "granite4", "qwen", "qwen25", "qwen3_json", "trinity", "hunyuan", "hyperclovax_seed_think_14b", "interns1",
    "llama3", "llama4_json", "minimax-m2", "minimax-m3", "muse_glimmer", "musespark1x", "mimo", "nanbeige",
    "nemotron_v3", "qwen3_xml", "step3p5", "step5"
]
ReasoningParser = Literal[
    "auto", "none", "hf", "response_template", "deepseek_v3", "olmo3", "glm45", "kimi_k2", "minimax_m2", "mistral",
    "gemma4", "seed_oss", "apertus", "minimax_m3", "kimi_k3", "k2_horizon", "plamo3", "muse", "muse_glimmer", "inkling",
    "solar_open", "hyperclovax", "gpt_oss", "cohere_command4", "cohere_command3", "hunyuan_a13b", "ernie45", "granite",
    "functionary_v3_2", "minimax_m2_append_think", "step3", "deepseek_r1", "qwen3", "deepseek-r1", "gigachat35",
    "hunyuan", "hy_v3", "hy_v4", "iquest_q1", "step5", "deepseek-v3", "deepseek-v4", "deepseek-v41", "deepseek_v4",
    "deepseek_v41", "glm47", "glm53_flash", "ling3", "gpt-oss", "openai_gptoss", "hyperclovax_seed_think_14b", "kimi",
    "minimax", "minimax-append-think", "minimax-m3", "musespark1x", "dots", "granite_thinking_parser", "holo2",
    "interns1", "mimo", "minicpmv", "nanbeige", "nemotron_3", "nemotron_v3", "poolside_v1", "qwen3-thinking", "step3p5"
]
# fmt: on


GENERATION_FIELDS = {parameter.hub: name for name, parameter in PARAMETERS.items() if parameter.hub}
"""Fields of generation_config.json that are requests' default values, by the field of SamplingParams that each is.
`do_sample` is not read, as vLLM does not.
"""

WarmUp = Literal["background", "full", "none"]
MaxModelLen = int | Literal["auto"] | None
DTypeName = Literal["auto", "float32", "float", "bfloat16", "float16", "half"]
DTYPE_WORDS: Mapping[str, DType] = {
    "half": "float16",
    "float": "float32",
    "torch.float32": "float32",
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
}
"""Names that PyTorch has for dtypes, and its dtypes themselves as text."""


def _option(
    default: Any,
    group: str,
    text: str,
    *,
    is_size: bool = False,
    aliases: Sequence[str] = (),
    words: Mapping[str, Any] | None = None,
    many: bool = False,
) -> Any:
    """Declare a field that is a flag.

    `is_size` accepts bytes with a suffix (4GiB), `aliases` are vLLM's names of the flag, `words` are further values by
    name, `many` lets several values follow the flag.
    """
    metadata = {"group": group, "help": text, "is_size": is_size, "aliases": aliases, "words": words, "many": many}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of one engine. None means: chosen from the model or the device at start-up, and logged."""

    model: Name = _option(
        DEFAULT_MODEL,
        "model",
        "model directory, GGUF file, name of a built-in model, or id on the Hugging Face hub (org/name, org/name@REV, "
        "org/name/FILE.gguf), unless that is a path; default: scribe-15m",
    )
    revision: Name | None = _option(None, "model", "branch, tag or commit of a model of the hub; default: main")
    tokenizer: Name | None = _option(
        None, "model", "directory, GGUF file or id on the hub of the tokenizer; default: the model's"
    )
    dtype: DTypeName = _option(
        "auto",
        "model",
        "dtype of weights, activations and KV; auto: the checkpoint's, float32 on CPU, float16 in place of bfloat16 "
        "on GPUs without it",
    )
    quantization: Quantization | StoredFormat | None = _option(
        None,
        "quantization",
        "quantize the matrices of a checkpoint of floats to 8 or 4 bits while it loads; awq, gptq and the like must be "
        "the checkpoint's own format; default: as the checkpoint is",
        aliases=("-q",),
        words={name: name for name in get_args(StoredFormat)},
    )
    max_model_len: MaxModelLen = _option(
        None,
        "model",
        "longest prompt plus output, in tokens (8k: 8000, 8K: 8192); auto: what memory holds of the model's; "
        "default: the model's",
        words={"auto": "auto", "-1": "auto"},
    )
    load_format: Literal["auto", "safetensors", "dummy"] = _option(
        "auto", "model", "dummy: random weights of the model's shape, for benchmarks"
    )
    hf_overrides: dict[str, Any] | None = _option(
        None, "overrides", "fields that take the place of those of config.json; objects are merged"
    )
    generation_config: Name = _option(
        "auto",
        "overrides",
        "where requests' default values come from; auto: generation_config.json of the model; vllm: none; "
        "or a directory with such a file",
    )
    override_generation_config: dict[str, Any] | None = _option(
        None, "overrides", "values that take the place of those of generation_config.json"
    )
    seed: int = _option(0, "model", "seed of requests that bring none, and of dummy weights")

    block_size: int = _option(16, "cache", "KV positions a block")
    kv_cache_memory: Positive | None = _option(
        None,
        "cache",
        "bytes for KV blocks (suffixes KiB, MiB, GiB); default: what is free on a GPU, 1GiB on CPU",
        is_size=True,
        aliases=("--kv-cache-memory-bytes",),
    )
    gpu_memory_utilization: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = _option(
        0.9, "cache", "fraction of the GPU's memory that weights, KV and steps may use"
    )
    kv_cache_dtype: KVCacheDType = _option(
        "auto",
        "cache",
        "how keys and values are held: in 8 bits with a scale for each token and head (fp8 is fp8_e4m3), or in the "
        "dtype of the activations; auto: as the checkpoint says, else that dtype",
    )
    enable_prefix_caching: bool = _option(True, "cache", "share the KV of equal prompt prefixes between requests")
    max_cached_states: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = _option(
        32,
        "cache",
        "for models with states: how many are kept for requests that continue the same prefix; 0: prefixes are not "
        "cached",
    )

    max_num_seqs: Count | None = _option(
        None, "scheduling", "requests that run at once; default: 256 on a GPU, 64 on CPU"
    )
    max_num_batched_tokens: Count | None = _option(
        None, "scheduling", "token budget of a step; default: 8192 on a GPU, 512 on CPU"
    )
    max_num_waiting: Positive | None = _option(
        None,
        "scheduling",
        "requests waiting for an engine from which on new ones are refused (n=3 counts as three); default: 4096 in "
        "serve, else no limit",
    )
    max_logprobs: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] = _option(
        DEFAULT_MAX_LOGPROBS, "scheduling", "most likely tokens whose log probabilities requests may have; -1: all"
    )
    scheduling_policy: Literal["fcfs", "priority"] = _option("fcfs", "scheduling", "who runs first")
    scheduler: Literal["continuous", "static"] = _option(
        "continuous", "scheduling", "static: fixed padded batches, a baseline to compare with"
    )

    speculative_config: dict[str, Any] | None = _option(
        None,
        "execution",
        'speculative decoding, as JSON with vLLM\'s fields: {"method": "ngram", "num_speculative_tokens": 4}; '
        "default: off",
        aliases=("-sc",),
    )
    tensor_parallel_size: Positive = _option(
        1, "execution", "number of devices over which each layer is split", aliases=("-tp",)
    )
    pipeline_parallel_size: Positive = _option(
        1,
        "execution",
        "number of stages, each with some of the layers on tensor_parallel_size devices of its own",
        aliases=("-pp",),
    )
    enable_expert_parallel: bool = _option(
        False,
        "execution",
        "whole experts on each of these devices, instead of a shard of each expert; counts how many tokens each has",
        aliases=("-ep",),
    )
    kernels: Literal["auto", "xla", "sm90"] = _option(
        "auto",
        "execution",
        "sm90: jaxserve's own kernels for Hopper GPUs; xla: plain XLA; auto: sm90 on Hopper GPUs, else xla, with a "
        "warning on other GPUs",
    )
    overlap: bool = _option(
        True, "execution", "plan the next step while the device runs the last one", aliases=("--async-scheduling",)
    )
    watchdog_timeout: Annotated[float, msgspec.Meta(ge=0.0, le=1e6)] | None = _option(
        None,
        "scheduling",
        "seconds in which a step's results must come, compilation not counted: after that the engine is taken to hang, "
        "and has died; 0: no limit; default: 300 on a GPU, no limit on CPU",
    )
    dequantize: bool | None = _option(
        None,
        "quantization",
        "hold the weights of a quantized checkpoint as floats; default: if no kernel multiplies by quantized weights",
    )
    quantize_activations: bool | None = _option(
        None,
        "quantization",
        "round activations to 8 bits, each token by itself, where more than 64 tokens (32 with FP8, 8 on a CPU) are "
        "multiplied by weights of 8 bits; default: for FP8 weights on GPUs with kernels for it, for INT8 if the "
        "checkpoint says so; off: 16 bits everywhere",
    )
    warmup: WarmUp = _option(
        "background",
        "compilation",
        "what is compiled before the first request is taken. background: on a CPU the three programs that every "
        "request needs, on a GPU those without which a request would wait for the compiler; the others follow while "
        "the server is at work. full: all of them. none: nothing, each is compiled when a request first needs it",
    )
    programs: Name | None = _option(
        None,
        "compilation",
        "folder of programs that `jaxserve compile` has compiled for this model and kind of device: they are loaded "
        "instead of compiled; trusted like code",
    )
    compilation_cache_dir: str | None = _option(
        None, "compilation", "persistent compilation cache; default: ~/.cache/jaxserve/xla, '' for none"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", DTYPE_WORDS.get(str(self.dtype), self.dtype))
        complaints = _convert_fields(self, _ENGINE_RULES)
        if self.max_model_len == -1:  # as vLLM has it
            object.__setattr__(self, "max_model_len", "auto")
        _raise_all([*complaints, *self._complaints()])

    @property
    def num_kept_states(self) -> int:
        """How many states of requests are kept for others, of a model that has states."""
        is_cached = self.enable_prefix_caching and self.scheduler == "continuous"
        return self.max_cached_states if is_cached else 0

    @property
    def speculation(self) -> Speculation | None:
        """`speculative_config`, checked. Raises ConfigError."""
        return parse_speculation(self.speculative_config)

    def _complaints(self) -> Iterator[str]:
        """Yield a sentence about each value out of range, where its type does not say the range."""
        if isinstance(self.max_model_len, int) and self.max_model_len < 1:
            yield f"max_model_len must be at least 1, or 'auto', got {self.max_model_len}"
        if unknown := sorted((self.override_generation_config or {}).keys() - {*GENERATION_FIELDS, "eos_token_id"}):
            known = ", ".join((*GENERATION_FIELDS, "eos_token_id"))
            yield f"override_generation_config: {', '.join(unknown)} is not read, only {known}"
        if not 1 <= self.block_size <= 512 or self.block_size & (self.block_size - 1):
            yield f"block_size must be a power of two up to 512, got {self.block_size}"
        try:
            if self.speculation is not None and self.scheduler != "continuous":
                yield "speculative_config: the static scheduler verifies no drafts"
        except ConfigError as error:
            yield str(error)
        if self.pipeline_parallel_size > 1 and self.speculative_config is not None:
            yield "speculative_config: stages of a pipeline verify no drafts, leave pipeline_parallel_size out"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The options of the HTTP side of `jaxserve serve`."""

    host: str = _option("127.0.0.1", "server", "address to listen on")
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = _option(
        8000, "server", "port to listen on; 0 takes a free one"
    )
    api_key: Sequence[str] = _option(
        (),
        "security",
        "key that clients must send as a bearer token, for all but /live, /health, /ping and static pages; repeatable",
    )
    api_key_file: Name | None = _option(
        None, "security", "file with such keys, one a line; another one may stand in JAXSERVE_API_KEY"
    )
    admin_api_key: Sequence[str] = _option(
        (), "security", "key of the admin routes, which are off without one; repeatable"
    )
    admin_api_key_file: Name | None = _option(
        None, "security", "file with such keys, one a line; another one may stand in JAXSERVE_ADMIN_API_KEY"
    )
    ssl_certfile: Name | None = _option(None, "security", "certificate chain of the server (PEM): serves HTTPS")
    ssl_keyfile: Name | None = _option(
        None, "security", "private key of the certificate (PEM); default: it is in the same file"
    )
    ssl_ca_certs: Name | None = _option(
        None, "security", "authorities (PEM), one of which must have signed the certificate that a client shows"
    )
    allowed_origins: Sequence[str] = _option(
        (), "security", "web origin whose pages may read answers (CORS), '*' for any; repeatable"
    )
    root_path: str = _option(
        "", "server", "path under which a proxy offers the server and which it leaves in requests, such as /llm"
    )
    served_model_name: Sequence[Name] = _option(
        (), "server", "names of the model in the API, the first in its answers; default: the model argument", many=True
    )
    chat_template: Name | None = _option(
        None, "chat", "jinja file, or a text with jinja in it, in place of the model's chat template"
    )
    default_chat_template_kwargs: dict[str, Any] | None = _option(
        None, "chat", "variables of the chat template, unless a request sets them"
    )
    tool_call_parser: ToolCallParser = _option(
        "auto", "chat", "how the model writes tool calls; auto: as the checkpoint or its chat template says"
    )
    reasoning_parser: ReasoningParser = _option(
        "auto", "chat", "how the model writes its reasoning; auto: as the checkpoint or its chat template says"
    )
    disable_additional_properties: bool = _option(
        True,
        "chat",
        "objects in JSON answers and tool calls have only the properties that their schema lists, unless it lists none "
        "or has additionalProperties",
    )
    enable_force_include_usage: bool = _option(
        False,
        "answers",
        "streams of completions and chats end with their usage, whether the request asks for it or not",
    )
    return_tokens_as_token_ids: bool = _option(
        False, "answers", 'log probabilities name tokens "token_id:" and their id, unless the request says otherwise'
    )
    api_workers: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)] = _option(
        1, "server", "processes that serve HTTP and text over the one engine", aliases=("--api-server-count",)
    )
    data_parallel_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_ENGINES)] = _option(
        1,
        "server",
        "engines behind the one server, each on devices of its own; a request goes where most of its prompt is cached",
        aliases=("-dp",),
    )
    shutdown_timeout: Annotated[float, msgspec.Meta(ge=0.0)] = _option(
        30.0, "timeouts", "seconds that running requests may take after SIGTERM"
    )
    request_timeout: Seconds | None = _option(
        None, "timeouts", "seconds that a request may take in all; default: no limit"
    )
    receive_timeout: Seconds = _option(
        60.0, "timeouts", "seconds for a request's headers, then for its body, to arrive"
    )
    send_timeout: Seconds = _option(60.0, "timeouts", "seconds until a client that reads none of its answer is cut off")
    keep_alive_timeout: Annotated[int, msgspec.Meta(ge=0)] = _option(
        30, "timeouts", "seconds that a connection may wait for its next request"
    )
    max_body_size: Positive = _option(8 * 2**20, "server", "largest request body, in bytes", is_size=True)
    pooling: Pooling | None = _option(
        None,
        "embeddings",
        "which hidden states make the vector; default: as the model's files say, else the last token's",
    )
    max_stored_responses: Annotated[int, msgspec.Meta(ge=0)] = _option(
        1000, "answers", "answers of /v1/responses that are kept for later turns; 0: none"
    )
    response_ttl: Seconds = _option(3600.0, "answers", "seconds that answers of /v1/responses are kept")
    metrics_names: Literal["jaxserve", "vllm"] = _option(
        "jaxserve", "server", "prefix of the names of /metrics; vllm: for dashboards and autoscalers made for it"
    )
    profile_dir: Name | None = _option(
        None, "server", "directory for what /start_profile records; default: the route is off"
    )
    log_level: Literal["debug", "info", "warning", "error"] = _option(
        "info", "logging", "log messages of this severity and above"
    )
    log_format: Literal["text", "json"] = _option("text", "logging", "json: one object a line")
    access_log: bool = _option(True, "logging", "log each request, with its X-Request-Id")
    otlp_traces_endpoint: Name | None = _option(
        None, "logging", "URL of an OpenTelemetry collector (OTLP over HTTP) that gets a span of each request"
    )

    def __post_init__(self) -> None:
        if isinstance(self.served_model_name, str):
            object.__setattr__(self, "served_model_name", (self.served_model_name,))
        complaints = _convert_fields(self, _SERVER_RULES)
        _raise_all([*complaints, *self._complaints()])

    def _complaints(self) -> Iterator[str]:
        """Yield a sentence about each value out of range."""
        if not all(self.served_model_name):
            yield "served_model_name must not be empty"
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            yield f"root_path must begin with '/' and not end with it, got {self.root_path!r}"
        if self.ssl_certfile is None and (self.ssl_keyfile or self.ssl_ca_certs):
            yield "ssl_keyfile and ssl_ca_certs need ssl_certfile"


_ENGINE_RULES = rules(EngineConfig)
_SERVER_RULES = rules(ServerConfig)


def _convert_fields(config: EngineConfig | ServerConfig, rules: Mapping[str, Rule]) -> list[str]:
    """Convert the given values to plain ones, and paths to str. Returns a sentence about each that is of another type,
    naming the field.
    """
    complaints = []
    for name, rule in rules.items():
        value = getattr(config, name)
        value = os.fspath(value) if isinstance(value, os.PathLike) else value
        try:
            object.__setattr__(config, name, convert_option(name, value, rule))
        except ConfigError as error:
            complaints.append(str(error))
            object.__setattr__(config, name, getattr(type(config), name))  # for the complaints about other fields
    return complaints


def _raise_all(complaints: Sequence[str]) -> None:
    if complaints:
        raise ConfigError("; ".join(complaints))


def convert_option(name: str, value: object, rule: Rule) -> Any:
    """Return the value of an option as plain Python data. Raises ConfigError, naming the option."""
    try:
        return convert(name, value, rule)
    except InvalidRequest as error:
        raise ConfigError(str(error)) from None
