"""Flags of `vllm serve` and keywords of its `LLM` that jaxserve has under another name, does without, or does not
support: one table, and one judge for both.

The command line and the constructor of LLM accept or refuse them by it, and docs/vllm.md is printed from it
(`vllm_page`). Flags that are not here are spelled alike in both, or unknown to both. The names were collected from vLLM
0.11 to 0.24.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

Nargs = Literal[0, 1, "?", "*"]


class Verdict(NamedTuple):
    """What to say about an option with a value. The option is named as it was given; "" if it is not known yet."""

    text: str
    is_refused: bool
    option: str = ""


class Harmless(NamedTuple):
    """An option that needs nothing here. `values` are those that are harmless; others are refused. Empty: all are.

    A flag without arguments (`nargs` is 0) is a switch: vLLM has it as --name and as --no-name.
    """

    why: str
    nargs: Nargs = 0
    values: Sequence[str] = ()

    def judge(self, value: object) -> Verdict:
        """Return what to say about the option with this value: a text, a switch's state, or any object in Python."""
        if self.values and value is not None and str(value) not in self.values:
            return Verdict(f"{value!r:.100} is not supported; only {', '.join(self.values)} ({self.why})", True)
        return Verdict(f"nothing is needed: {self.why}", False)


class Refused(NamedTuple):
    """An option that jaxserve does not have. `instead` says what to do; empty: it is not supported."""

    instead: str = ""
    nargs: Nargs = 1

    def judge(self, value: object) -> Verdict:
        """Return what to say about the option with this value, which may ask for nothing, as False and None do."""
        if value in (None, False, [], (), {}):
            return Verdict("nothing is needed: it is off", False)
        return Verdict(f"instead: {self.instead}" if self.instead else "not supported", True)


class NotTaken(NamedTuple):
    """A value that an option does not take here. `instead` says what to do."""

    instead: str

    def judge(self, value: object) -> Verdict:
        """Return what to say about the option with this value."""
        return Verdict(f"{value!r} is not supported: {self.instead}", True)


Row = Harmless | Refused


def _each(row: Row, names: str) -> dict[str, Row]:
    return {f"--{name}": row for name in names.split()}


_COMPILED = "every step is a compiled XLA program; which kernels run is chosen and printed at start"
_SCHEDULED = "the scheduler has one token budget a step: --max-num-batched-tokens"
_TEXT_ONLY = "models of text only are served"
_LORA = "merge the adapter into the model with peft before it is served"
_BIASES = "logit_bias, bad_words and structured_outputs are fields of requests"
_ONE_ENGINE, _ONE_HOST, _ONE_CONTEXT = "there is one engine", "one host is used", "a context is not split"
_PLUGIN = "a checkpoint's response_template is read; see docs/syntaxes.md"

_ONLY_OURS = (
    "access-log admin-api-key admin-api-key-file api-key-file api-workers compilation-cache-dir dequantize "
    "disable-additional-properties kernels keep-alive-timeout kv-cache-memory log-format log-level max-body-size "
    "max-cached-states "
    "max-num-waiting max-stored-responses metrics-names overlap pooling profile-dir programs quantize-activations "
    "receive-timeout request-timeout response-ttl scheduler send-timeout warmup watchdog-timeout"
)
ONLY_OURS = tuple(f"--{name}" for name in _ONLY_OURS.split())
"""Flags of `jaxserve serve` that `vllm serve` does not have."""

RENAMED: Mapping[str, str] = {
    "--disable-uvicorn-access-log": "--no-access-log",
    "--no-disable-uvicorn-access-log": "--access-log",
    "--ssl-ca-cert": "--ssl-ca-certs",
    "--compilation-cache": "--compilation-cache-dir",
    "--timeout-keep-alive": "--keep-alive-timeout",
    "-asc": "--api-workers",
    "--rope-scaling": "--hf-overrides.rope_scaling",
    "--rope-theta": "--hf-overrides.rope_theta",
}
"""Flags that mean what a flag of another name means here."""

SHORT: Mapping[str, str] = {
    "--data-parallel-rank": "-dpn",
    "--data-parallel-start-rank": "-dpr",
    "--data-parallel-size-local": "-dpl",
    "--data-parallel-address": "-dpa",
    "--data-parallel-rpc-port": "-dpp",
    "--data-parallel-backend": "-dpb",
    "--data-parallel-hybrid-lb": "-dph",
    "--data-parallel-external-lb": "-dpe",
    "--decode-context-parallel-size": "-dcp",
    "--prefill-context-parallel-size": "-pcp",
    "--nnodes": "-n",
    "--node-rank": "-r",
    "--optimization-level": "-O",
    "--compilation-config": "-cc",
    "--attention-config": "-ac",
}
"""Short names of flags in the table below."""

_NO_CACHE_DTYPE = NotTaken(
    "keys and values are held as fp8, fp8_e4m3, fp8_e5m2 or int8, or in the dtype of the activations"
)
_SAFETENSORS = Harmless("safetensors are read, files in parallel")
_NO_PICKLES = NotTaken("convert it to safetensors: files of pickles are not read")

VALUES: Mapping[str, Mapping[str, Harmless | NotTaken]] = {
    "kv_cache_dtype": dict.fromkeys(["fp8_inc", "fp8_ds_mla", "nvfp4", "turboquant_3bit"], _NO_CACHE_DTYPE),
    "load_format": {
        **dict.fromkeys(["fastsafetensors", "hf", "instanttensor", "mistral", "runai_streamer"], _SAFETENSORS),
        **dict.fromkeys(("npcache", "pt"), _NO_PICKLES),
        "bitsandbytes": Harmless("formats are read off the checkpoint"),
        "gguf": Harmless("a .gguf file is read if it is the model"),
    },
    "workload": dict.fromkeys(
        ["burstgpt", "hf", "custom", "prefix_repetition", "spec_bench", "random-mm", "random-rerank"],
        NotTaken("random, sonnet, sharegpt, azure and mooncake are"),
    ),
}
"""Values that options of the same name have in vLLM only. A harmless one means the default."""

KEYWORDS: Mapping[str, Row] = {
    "served_model_name": Harmless("calls name no model"),
    "reasoning_parser": Harmless("answers are texts as the model writes them"),
    "data_parallel_size": Harmless("an LLM is one engine, jaxserve serve has several", 1, ("1",)),
    "otlp_traces_endpoint": Refused("only the server writes traces"),
    "rope_scaling": Refused("hf_overrides={'rope_scaling': ...}"),
    "rope_theta": Refused("hf_overrides={'rope_theta': ...}"),
    "pooler_config": Refused("the argument pooling of embed"),
    "override_pooler_config": Refused("the argument pooling of embed"),
}
"""Keywords of vLLM's `LLM` about which there is something else to say than about the flags, or that are no flags."""

# fmt: off
FLAGS: Mapping[str, Row] = {
    # model
    "--task": Harmless("what a request asks for decides", 1, ("auto", "generate", "embed", "embedding", "classify")),
    "--runner": Harmless("what a request asks for decides", 1, ("auto", "generate", "pooling")),
    "--convert": Harmless("vectors and labels come from the model as it is", 1, ("auto", "none", "embed", "classify")),
    "--tokenizer-mode": Harmless("the checkpoint's fast tokenizer is used", 1, ("auto", "hf", "mistral")),
    "--skip-tokenizer-init": Refused("give token ids as the prompt; a tokenizer is needed all the same", 0),
    "--trust-remote-code": Harmless("no code of a checkpoint is ever run; families are built in"),
    "--allow-deprecated-quantization": Harmless("formats are read off the checkpoint"),
    "--hf-config-path": Refused("put config.json beside the weights"),
    "--hf-token": Refused("set HF_TOKEN, or log in with `hf auth login`", "?"),
    "--config-format": Harmless("config.json is read", 1, ("auto", "hf", "mistral")),
    "--code-revision": Harmless("no code of a checkpoint is ever run", 1),
    "--tokenizer-revision": Refused("give the tokenizer as org/name@REV with --tokenizer"),
    "--logprobs-mode": Harmless("log probabilities are those before temperature and filters", 1, ("raw_logprobs",)),
    "--disable-sliding-window": Refused("--max-model-len up to the window has the same effect", 0),
    "--model-impl": Harmless("every family is jaxserve's own", 1, ("auto", "vllm")),
    "--logits-processors": Refused(_BIASES, "*"),
    "--logits-processor-pattern": Refused(_BIASES),
    **_each(Refused("--pooling"), "pooler-config override-pooler-config"),
    # loading
    "--download-dir": Refused("set HF_HOME"),
    "--safetensors-load-strategy": Harmless("files are read in parallel and never held twice", 1),
    "--ignore-patterns": Harmless("only the files that are needed are downloaded", "*"),
    "--use-tqdm-on-load": Harmless("progress is shown on a terminal"),
    "--pt-load-map-location": Harmless("weights go to their device directly", 1),
    # structured answers
    "--guided-decoding-backend": Harmless("grammars run on llguidance", 1),
    "--structured-outputs-config": Refused("grammars run on llguidance; options are fields of requests"),
    "--guided-decoding-disable-fallback": Harmless("there is one backend"),
    "--guided-decoding-disable-any-whitespace": Refused("structured_outputs.disable_any_whitespace in a request", 0),
    "--guided-decoding-disable-additional-properties": Harmless("--disable-additional-properties is the default"),
    "--enable-reasoning": Harmless("reasoning is read wherever the model writes it"),
    "--reasoning-config": Refused("--reasoning-parser; thinking_token_budget is a field of requests"),
    "--reasoning-parser-plugin": Refused(_PLUGIN),
    # several devices
    "--distributed-executor-backend": Harmless("one process drives all devices", 1, ("mp", "uni")),
    "--data-parallel-backend": Harmless("each engine is a process of its own", 1, ("mp",)),
    "--disable-nccl-for-dp-synchronization": Harmless("engines do not wait for each other"),
    **_each(Harmless(_ONE_CONTEXT, 1, ("1",)), "decode-context-parallel-size prefill-context-parallel-size"),
    **_each(Harmless(_ONE_CONTEXT, 1), "cp-kv-cache-interleave-size dcp-kv-cache-interleave-size"),
    "--distributed-timeout-seconds": Harmless("one process drives all devices", 1),
    "--all2all-backend": Harmless("partial sums go through peers' memory, there is no all-to-all", 1),
    "--expert-placement-strategy": Harmless("experts are placed in order", 1, ("linear",)),
    "--max-parallel-loading-workers": Harmless("the loader holds one weight at a time", 1),
    "--disable-custom-all-reduce": Harmless("sums go through peers' memory, or, with --kernels=xla, through XLA"),
    "--nnodes": Harmless(_ONE_HOST, 1, ("1",)),
    "--node-rank": Harmless(_ONE_HOST, 1, ("0",)),
    # cache
    "--swap-space": Harmless("a request that gives way is computed again; nothing is swapped", 1),
    "--num-gpu-blocks-override": Refused("--kv-cache-memory BYTES"),
    "--prefix-caching-hash-algo": Harmless("prefixes are found by sha256", 1, ("sha256", "sha256_cbor", "builtin")),
    "--cpu-offload-gb": Harmless("weights stay on the GPU", 1, ("0", "0.0")),
    "--use-v2-block-manager": Harmless("there is one block manager"),
    "--disable-hybrid-kv-cache-manager": Harmless("blocks outside a window are always given back"),
    **_each(Harmless("states are float32", 1, ("auto", "float32")), "mamba-cache-dtype mamba-ssm-cache-dtype"),
    "--mamba-block-size": Harmless("states are kept where prompts end and part, and behind answers", 1),
    "--mamba-cache-mode": Harmless("--max-cached-states says how many states are kept", 1, ("none", "align")),
    # scheduling
    "--enable-chunked-prefill": Harmless("prompts are read in chunks; raise --max-num-batched-tokens for longer ones"),
    **_each(Harmless(_SCHEDULED, 1), "max-num-partial-prefills max-long-partial-prefills long-prefill-token-threshold"),
    "--num-lookahead-slots": Harmless(_SCHEDULED, 1, ("0",)),
    "--scheduler-delay-factor": Harmless(_SCHEDULED, 1, ("0", "0.0")),
    "--scheduler-reserve-full-isl": Harmless(_SCHEDULED),
    "--preemption-mode": Harmless("a request that gives way is computed again", 1, ("recompute",)),
    "--num-scheduler-steps": Harmless("the next step is planned while the last one runs", 1),
    "--disable-async-output-proc": Harmless("texts are made while the next step runs"),
    "--multi-step-stream-outputs": Harmless("every token is streamed when it is there", "?"),
    "--stream-interval": Harmless("every token is streamed when it is there", 1),
    "--scheduler-cls": Refused("--scheduler=continuous or --scheduler=static"),
    # adapters
    **_each(Refused(_LORA, 0), "enable-lora enable-lora-bias fully-sharded-loras"),
    **_each(Refused(_LORA), "max-loras max-lora-rank max-cpu-loras lora-dtype lora-extra-vocab-size default-mm-loras"),
    "--lora-modules": Refused(_LORA, "*"),
    # observation
    "--show-hidden-metrics-for-version": Refused("--metrics-names=vllm gives vLLM's names"),
    "--collect-detailed-traces": Refused("/start_profile, with --profile-dir"),
    "--profiler-config": Refused("/start_profile, with --profile-dir"),
    "--disable-log-stats": Harmless("nothing is logged at intervals; /metrics and stats() have the figures"),
    "--aggregate-engine-logging": Harmless(_ONE_ENGINE),
    "--disable-log-requests": Harmless("prompts are never logged; --no-access-log leaves out a line a request"),
    **_each(Refused("the access log; it has no prompts and answers", 0), "enable-log-requests enable-log-outputs"),
    "--enable-log-deltas": Harmless("answers are never logged"),
    "--max-log-len": Harmless("prompts are never logged", 1),
    "--log-config-file": Refused("--log-level and --log-format"),
    "--uvicorn-log-level": Harmless("--log-level is that of all", 1),
    "--disable-access-log-for-endpoints": Harmless("probes and /metrics are never in the access log", 1),
    # compilation, kernels
    "--enforce-eager": Harmless(f"{_COMPILED}; --warmup=none compiles a step when it is first needed"),
    **_each(
        Harmless(_COMPILED, 1),
        "compilation-config optimization-level max-cudagraph-capture-size max-context-len-to-capture "
        "max-seq-len-to-capture attention-backend "
        "attention-config moe-backend kernel-config linear-backend gdn-prefill-backend mamba-backend",
    ),
    **_each(Harmless(_COMPILED, "*"), "cudagraph-capture-sizes cuda-graph-sizes"),
    **_each(Harmless(_COMPILED), "disable-cascade-attn enable-flashinfer-autotune"),
    "--device": Harmless(
        "the device is a GPU if jax finds one; with JAX_PLATFORMS=cpu in the environment, the CPU", 1, ("auto", "cuda")
    ),
    # images and the like
    **_each(
        Harmless(_TEXT_ONLY, 1),
        "limit-mm-per-prompt mm-processor-kwargs mm-processor-cache-gb mm-processor-cache-type mm-encoder-tp-mode "
        "mm-encoder-attn-backend mm-shm-cache-max-object-size-mb media-io-kwargs video-pruning-rate "
        "allowed-local-media-path",
    ),
    **_each(
        Harmless(_TEXT_ONLY),
        "disable-mm-preprocessor-cache disable-chunked-mm-input interleave-mm-strings skip-mm-profiling "
        "language-model-only",
    ),
    "--allowed-media-domains": Harmless("no URL is fetched for a client", "*"),
    # the HTTP side
    "--uds": Refused("--host=127.0.0.1, behind a proxy that listens on the socket"),
    **_each(Harmless("every method and header is allowed", 1), "allowed-methods allowed-headers"),
    "--ssl-cert-reqs": Refused("--ssl-ca-certs asks clients for certificates"),
    "--enable-ssl-refresh": Refused("restart the server, or end TLS in a proxy", 0),
    "--middleware": Refused("put a proxy before the server"),
    "--enable-request-id-headers": Harmless("X-Request-Id is in every answer"),
    "--disable-fastapi-docs": Refused("/openapi.json needs the API key where there is one", 0),
    "--enable-offline-docs": Harmless("/openapi.json and the playground need no network"),
    **_each(Harmless("headers are bounded", 1), "h11-max-incomplete-event-size h11-max-header-count"),
    "--chat-template-content-format": Harmless("which form a template takes is found out", 1, ("auto",)),
    "--trust-request-chat-template": Refused("--chat-template at start; chat_template_kwargs in a request", 0),
    "--response-role": Harmless("answers are the assistant's", 1, ("assistant",)),
    "--enable-auto-tool-choice": Harmless("tools are always offered; --tool-call-parser is found out"),
    "--exclude-tools-when-tool-choice-none": Refused("leave out tools in such a request", 0),
    "--tool-parser-plugin": Refused(_PLUGIN),
    "--enable-prompt-tokens-details": Harmless("cached tokens are always in usage"),
    "--enable-server-load-tracking": Harmless("/metrics has the number of running and waiting requests"),
    "--enable-per-request-metrics": Refused("--otlp-traces-endpoint", 0),
    "--log-error-stack": Harmless("--log-level=debug shows tracebacks"),
    "--fingerprint-mode": Harmless("system_fingerprint is a hash of version and model", 1, ("hash",)),
    **_each(
        Harmless("--api-workers counts the processes that tokenize", 1),
        "renderer-num-workers tokenizer-pool-extra-config tokenizer-pool-size tokenizer-pool-type",
    ),
    "--disable-frontend-multiprocessing": Harmless("the engine always has a process of its own"),
    # not supported
    **_each(
        Refused(nargs=0),
        "allow-credentials calculate-kv-scales cudagraph-metrics data-parallel-external-lb data-parallel-hybrid-lb "
        "enable-dbo enable-elastic-ep enable-eplb enable-layerwise-nvtx-tracing enable-logging-iteration-details "
        "enable-mfu-metrics enable-mm-embeds enable-prompt-adapter enable-prompt-embeds "
        "enable-return-routed-experts enable-sleep-mode enable-tokenizer-info-endpoint fail-on-environ-validation "
        "grpc headless kv-cache-metrics kv-sharing-fast-prefill mm-encoder-only numa-bind ray-workers-use-nsight "
        "tokens-only worker-use-ray",
    ),
    **_each(
        Refused(),
        "additional-config data-parallel-address data-parallel-rank data-parallel-rpc-port data-parallel-size-local "
        "data-parallel-start-rank dbo-decode-token-threshold dbo-prefill-token-threshold ec-transfer-config "
        "eplb-config io-processor-plugin kv-cache-metrics-sample kv-events-config kv-offloading-backend "
        "kv-offloading-size kv-transfer-config master-addr master-port model-loader-extra-config "
        "num-redundant-experts num-speculative-tokens override-attention-dtype quantization-param-path spec-method "
        "spec-model spec-tokens speculative-model ssl-ciphers tool-server ubatch-size "
        "weight-transfer-config worker-cls worker-extension-cls",
    ),
}

BENCH_FLAGS: Mapping[str, Row] = {
    "--backend": Harmless("--endpoint chat loads the chat route", 1, ("vllm", "openai", "openai-completions")),
    "--trust-remote-code": Harmless("no code of a checkpoint is ever run"),
    "--tokenizer-mode": Harmless("the checkpoint's fast tokenizer is used", 1, ("auto", "hf")),
    "--ready-check-timeout-sec": Harmless("start when the server answers /health", 1),
    "--request-id-prefix": Harmless("requests are counted by the client", 1),
    "--percentile-metrics": Harmless("the report has ttft, tpot, itl and e2el", 1),
    "--metric-percentiles": Harmless(
        "the report has 50, 90 and 99", 1, ("50", "90", "99", "50,90", "50,99", "90,99", "50,90,99")
    ),
    "--disable-tqdm": Refused("--no-progress", 0),
    "--save-result": Refused("--save-json FILE", 0),
    "--append-result": Refused("--save-json FILE, one a run", 0),
    "--result-dir": Refused("--save-json DIR/FILE"),
    "--result-filename": Refused("--save-json FILE"),
    "--metadata": Refused("--save-json notes the options", "*"),
    "--label": Refused("--save-json notes the options"),
    "--plot-timeline": Refused("--save-plot FILE", 0),
    **{
        f"--{field.replace('_', '-')}": Refused(f"""--extra-body '{{"{field}": {value}}}'""")
        for field, value in {
            "logprobs": "N", "top_p": "X", "top_k": "N", "min_p": "X",
            "frequency_penalty": "X", "presence_penalty": "X", "repetition_penalty": "X",
        }.items()
    },
    "--profile": Refused("POST /start_profile and /stop_profile around the run", 0),
    "--use-beam-search": Refused(nargs=0),
    **_each(Refused(), "ramp-up-strategy ramp-up-start-rps ramp-up-end-rps"),
    **_each(Refused("download the data set, and give it with --file"), "hf-split hf-subset hf-name"),
    **_each(Refused("--output-len"), "hf-output-len custom-output-len"),
    **_each(Refused(nargs="*"), "lora-modules header"),
}
"""Flags of `vllm bench serve`."""
# fmt: on


def said_of(option: str, value: object, row: Row | NotTaken) -> Verdict:
    """Return what to say about a flag or a keyword with this value, in the spelling of the option."""
    text, is_refused, _ = row.judge(value)
    return Verdict(text if option.startswith("-") else in_python(text), is_refused, option)


def sentences(verdicts: Sequence[Verdict]) -> list[str]:
    """Return a sentence for each reason, which names all options that have it."""
    options: dict[str, list[str]] = {}
    for verdict in verdicts:
        options.setdefault(verdict.text, []).append(verdict.option)
    return [f"{', '.join(names)}: {text}" for text, names in options.items()]


def in_python(text: str) -> str:
    """Return advice with the flags in it as keywords: --max-model-len is max_model_len."""
    text = re.sub(r"--no-([a-z-]+[a-z])", r"--\1=False", text)
    text = re.sub(r"(--[a-z-]+)=(?!False)(\w+)", r"\1='\2'", text)
    return re.sub(r"--([a-z-]+[a-z])", lambda match: match[1].replace("-", "_"), text)


class Keywords(NamedTuple):
    """Keywords of a call, as they were judged: those to pass on, what to say about others, and the rest."""

    taken: dict[str, Any]
    harmless: list[Verdict]
    refused: list[Verdict]
    unknown: list[str]


def judge_keywords(given: Mapping[str, Any], *, known: Sequence[str], aliases: Mapping[str, str]) -> Keywords:
    """Judge the keywords of a call that takes those in `known`. `aliases` are other names of these."""
    judged = Keywords({}, [], [], [])
    for name, value in given.items():
        row: Row | NotTaken | None = VALUES.get(name, {}).get(value) if isinstance(value, str) else None
        if row is None:
            row = KEYWORDS.get(name) or FLAGS.get("--" + name.replace("_", "-"))
        if row is not None:
            verdict = said_of(name, value, row)
            (judged.refused if verdict.is_refused else judged.harmless).append(verdict)
        elif name in known or name in aliases:
            judged.taken[aliases.get(name, name)] = value
        else:
            judged.unknown.append(name)
    return judged
