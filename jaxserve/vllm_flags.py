"""Flags of `vllm serve` that jaxserve has under another name, does without, or does not support: one table.

`cli` accepts or refuses them by it, and docs/vllm.md is printed from it (`vllm_page`). Flags that are not here are
spelled alike in both, or unknown to both. The names were collected from vLLM 0.11 to 0.24.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

Nargs = Literal[0, 1, "?", "*"]


@dataclasses.dataclass(frozen=True)
class Harmless:
    """A flag that needs nothing here. `values` are those that are harmless; others are refused. Empty: all are."""

    why: str
    nargs: Nargs = 0
    values: Sequence[str] = ()

    def accepts(self, value: str) -> bool:
        """Return whether the flag asks with this value for nothing that jaxserve does not do."""
        return not self.values or value in self.values


@dataclasses.dataclass(frozen=True)
class Refused:
    """A flag that jaxserve does not have. `instead` says what to do; empty: it is not supported."""

    instead: str = ""
    nargs: Nargs = 1


_COMPILED = "every step is a compiled XLA program; which kernels run is chosen and printed at start"
_SCHEDULED = "the scheduler has one token budget a step: --max-num-batched-tokens"
_TEXT_ONLY = Harmless("models of text only are served, so there is nothing to limit", nargs=1)
_EPLB = Refused()
_LORA = "merge the adapter into the model with peft before it is served"

RENAMED: Mapping[str, str] = {
    "--disable-uvicorn-access-log": "--no-access-log",
    "--ssl-ca-cert": "--ssl-ca-certs",
    "--compilation-cache": "--compilation-cache-dir",
    "--timeout-keep-alive": "--keep-alive-timeout",
}
"""Flags that mean what a flag of another name means here."""

_OF_CHECKPOINT = "leave the flag out: a quantized checkpoint says its format, and is served in it"

VALUES: Mapping[str, Mapping[str, str]] = {
    "quantization": dict.fromkeys(
        [
            "awq",
            "awq_marlin",
            "gptq",
            "gptq_marlin",
            "compressed-tensors",
            "modelopt",
            "modelopt_fp4",
            "fbgemm_fp8",
            "mxfp4",
            "gguf",
            "quark",
            "auto-round",
        ],
        _OF_CHECKPOINT,
    ),
    "workload": dict.fromkeys(
        ("burstgpt", "hf", "custom", "prefix_repetition", "spec_bench", "random-mm", "random-rerank"),
        "not supported; random, sonnet, sharegpt, azure and mooncake are",
    ),
    "load_format": {
        "pt": "convert it to safetensors: files of pickles are not read",
        "gguf": "give the .gguf file as the model",
    },
}
"""What to do instead of values that flags of the same name have in vLLM only."""

# fmt: off
FLAGS: Mapping[str, Harmless | Refused] = {
    # model
    "--task": Harmless("what a request asks for decides", 1, ("auto", "generate", "embed", "embedding", "classify")),
    "--runner": Harmless("what a request asks for decides", 1, ("auto", "generate", "pooling")),
    "--convert": Harmless("vectors and labels come from the model as it is", 1, ("auto", "none", "embed", "classify")),
    "--tokenizer-mode": Harmless("the checkpoint's fast tokenizer is used", 1, ("auto", "hf")),
    "--skip-tokenizer-init": Refused("the server needs a tokenizer; send token ids as the prompt", 0),
    "--trust-remote-code": Harmless("no code of a checkpoint is ever run; families are built in"),
    "--allow-deprecated-quantization": Harmless("formats are read off the checkpoint"),
    "--hf-config-path": Refused("put config.json beside the weights"),
    "--hf-token": Refused("set HF_TOKEN, or log in with `hf auth login`", "?"),
    "--hf-overrides": Refused("edit the config.json of a local copy"),
    "--rope-scaling": Refused("edit rope_parameters in the config.json of a local copy"),
    "--rope-theta": Refused("edit rope_theta in the config.json of a local copy"),
    "--config-format": Harmless("config.json is read", 1, ("auto", "hf")),
    "--code-revision": Harmless("no code of a checkpoint is ever run", 1),
    "--tokenizer-revision": Refused("give the tokenizer as org/name@REV with --tokenizer"),
    "--allowed-local-media-path": Harmless("no file is read for a client", 1),
    "--allowed-media-domains": Harmless("no URL is fetched for a client", "*"),
    "--logprobs-mode": Harmless("log probabilities are those before temperature and filters", 1, ("raw_logprobs",)),
    "--disable-sliding-window": Refused("--max-model-len up to the window has the same effect", 0),
    "--disable-cascade-attn": Harmless(_COMPILED),
    "--enable-prompt-embeds": Refused(nargs=0),
    "--generation-config": Harmless("generation_config.json of the model gives the defaults", 1, ("auto",)),
    "--override-generation-config": Refused("edit generation_config.json of a local copy"),
    "--enable-sleep-mode": Refused(nargs=0),
    "--model-impl": Harmless("every family is jaxserve's own", 1, ("auto", "vllm")),
    "--override-attention-dtype": Refused(),
    "--logits-processors": Refused("logit_bias, bad_words and structured_outputs are fields of requests", "*"),
    "--logits-processor-pattern": Refused("logit_bias, bad_words and structured_outputs are fields of requests"),
    "--io-processor-plugin": Refused(),
    "--pooler-config": Refused("--pooling"),
    "--override-pooler-config": Refused("--pooling"),
    "--renderer-num-workers": Harmless("--api-workers counts the processes that tokenize", 1),
    # loading
    "--download-dir": Refused("set HF_HOME"),
    "--safetensors-load-strategy": Harmless("files are read in parallel and never held twice", 1),
    "--model-loader-extra-config": Refused(),
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
    "--reasoning-parser-plugin": Refused("a checkpoint's response_template is read; see docs/syntaxes.md"),
    # several devices
    "--distributed-executor-backend": Harmless("one process drives all devices", 1, ("mp", "uni")),
    "--pipeline-parallel-size": Harmless("there is one stage", 1, ("1",)),
    "-pp": Harmless("there is one stage", 1, ("1",)),
    "--data-parallel-size": Harmless("there is one engine", 1, ("1",)),
    "-dp": Harmless("there is one engine", 1, ("1",)),
    "--data-parallel-rank": Refused(),
    "--data-parallel-start-rank": Refused(),
    "--data-parallel-size-local": Refused(),
    "--data-parallel-address": Refused(),
    "--data-parallel-rpc-port": Refused(),
    "--data-parallel-backend": Harmless("there is one engine", 1, ("mp",)),
    "--data-parallel-hybrid-lb": Refused(nargs=0),
    "--data-parallel-external-lb": Refused(nargs=0),
    "--decode-context-parallel-size": Harmless("a context is not split", 1, ("1",)),
    "-dcp": Harmless("a context is not split", 1, ("1",)),
    "--prefill-context-parallel-size": Harmless("a context is not split", 1, ("1",)),
    "--enable-expert-parallel": Harmless("whole experts are put on each device where their number divides"),
    "--all2all-backend": Harmless("partial sums go through peers' memory, there is no all-to-all", 1),
    "--enable-eplb": _EPLB,
    "--eplb-config": _EPLB,
    "--expert-placement-strategy": Harmless("experts are placed in order", 1, ("linear",)),
    "--enable-dbo": Refused(nargs=0),
    "--max-parallel-loading-workers": Harmless("the loader holds one weight at a time", 1),
    "--ray-workers-use-nsight": Refused(nargs=0),
    "--disable-custom-all-reduce": Refused("--kernels xla leaves sums to XLA", 0),
    "--worker-cls": Refused(),
    "--worker-extension-cls": Refused(),
    "--nnodes": Harmless("one host is used", 1, ("1",)),
    "--node-rank": Harmless("one host is used", 1, ("0",)),
    "--master-addr": Refused(),
    "--master-port": Refused(),
    "--headless": Refused(nargs=0),
    # cache
    "--swap-space": Harmless("a request that gives way is computed again; nothing is swapped", 1),
    "--kv-cache-dtype": Harmless("keys and values have the dtype of the activations", 1, ("auto", "bfloat16")),
    "--num-gpu-blocks-override": Refused("--kv-cache-memory BYTES"),
    "--prefix-caching-hash-algo": Harmless("prefixes are found by sha256", 1, ("sha256", "sha256_cbor", "builtin")),
    "--cpu-offload-gb": Harmless("weights stay on the GPU", 1, ("0", "0.0")),
    "--calculate-kv-scales": Refused(nargs=0),
    "--kv-sharing-fast-prefill": Refused(nargs=0),
    "--mamba-cache-dtype": Refused(),
    "--mamba-ssm-cache-dtype": Refused(),
    "--mamba-block-size": Refused(),
    "--kv-offloading-size": Refused(),
    "--kv-offloading-backend": Refused(),
    "--kv-transfer-config": Refused(),
    "--kv-events-config": Refused(),
    "--use-v2-block-manager": Harmless("there is one block manager"),
    "--enable-mm-embeds": Refused(nargs=0),
    # scheduling
    "--enable-chunked-prefill": Harmless("prompts are always read in chunks of the token budget"),
    "--no-enable-chunked-prefill": Harmless("raise --max-num-batched-tokens to read longer prompts in one step"),
    "--max-num-partial-prefills": Harmless(_SCHEDULED, 1),
    "--max-long-partial-prefills": Harmless(_SCHEDULED, 1),
    "--long-prefill-token-threshold": Harmless(_SCHEDULED, 1),
    "--num-lookahead-slots": Harmless(_SCHEDULED, 1, ("0",)),
    "--scheduler-delay-factor": Harmless(_SCHEDULED, 1, ("0", "0.0")),
    "--preemption-mode": Harmless("a request that gives way is computed again", 1, ("recompute",)),
    "--num-scheduler-steps": Harmless("the next step is planned while the last one runs", 1),
    "--multi-step-stream-outputs": Harmless("every token is streamed when it is there"),
    "--stream-interval": Harmless("every token is streamed when it is there", 1, ("1",)),
    "--disable-chunked-mm-input": Harmless("models of text only are served"),
    "--scheduler-cls": Refused("--scheduler continuous or static"),
    "--disable-hybrid-kv-cache-manager": Refused(nargs=0),
    "--scheduler-reserve-full-isl": Harmless(_SCHEDULED),
    # adapters, speculation
    "--enable-lora": Refused(_LORA, 0),
    "--lora-modules": Refused(_LORA, "*"),
    "--max-loras": Refused(_LORA),
    "--max-lora-rank": Refused(_LORA),
    "--max-cpu-loras": Refused(_LORA),
    "--lora-dtype": Refused(_LORA),
    "--fully-sharded-loras": Refused(_LORA, 0),
    "--lora-extra-vocab-size": Refused(_LORA),
    "--speculative-config": Refused(),
    "--speculative-model": Refused(),
    "--num-speculative-tokens": Refused(),
    # observation
    "--show-hidden-metrics-for-version": Refused("--metrics-names vllm gives vLLM's names"),
    "--collect-detailed-traces": Refused("/start_profile, with --profile-dir"),
    "--disable-log-stats": Harmless("nothing is logged at intervals; /metrics has the figures"),
    "--disable-log-requests": Harmless("prompts are never logged; --no-access-log leaves out a line a request"),
    "--enable-log-requests": Refused("prompts are never logged", 0),
    "--enable-log-outputs": Refused("answers are never logged", 0),
    "--max-log-len": Harmless("prompts are never logged", 1),
    "--log-config-file": Refused("--log-level and --log-format"),
    "--uvicorn-log-level": Refused("--log-level"),
    "--disable-access-log-for-endpoints": Harmless("probes and /metrics are never in the access log", 1),
    # compilation, kernels
    "--enforce-eager": Harmless(f"{_COMPILED}; --warmup none compiles a step when it is first needed"),
    "--compilation-config": Harmless(_COMPILED, 1),
    "--optimization-level": Harmless(_COMPILED, 1),
    "-O": Harmless(_COMPILED, 1),
    "-O0": Harmless(_COMPILED),
    "-O1": Harmless(_COMPILED),
    "-O2": Harmless(_COMPILED),
    "-O3": Harmless(_COMPILED),
    "-cc": Harmless(_COMPILED, 1),
    "--cudagraph-capture-sizes": Harmless(_COMPILED, "*"),
    "--cuda-graph-sizes": Harmless(_COMPILED, "*"),
    "--max-cudagraph-capture-size": Harmless(_COMPILED, 1),
    "--max-seq-len-to-capture": Harmless(_COMPILED, 1),
    "--attention-backend": Harmless(_COMPILED, 1),
    "--attention-config": Harmless(_COMPILED, 1),
    "--moe-backend": Harmless(_COMPILED, 1),
    "--kernel-config": Harmless(_COMPILED, 1),
    "--additional-config": Refused(),
    "--device": Harmless("the device is the one that jax finds; JAX_PLATFORMS chooses", 1, ("auto", "cuda", "cpu")),
    # images and the like
    "--limit-mm-per-prompt": _TEXT_ONLY,
    "--mm-processor-kwargs": _TEXT_ONLY,
    "--mm-processor-cache-gb": _TEXT_ONLY,
    "--mm-processor-cache-type": _TEXT_ONLY,
    "--mm-encoder-tp-mode": _TEXT_ONLY,
    "--media-io-kwargs": _TEXT_ONLY,
    "--disable-mm-preprocessor-cache": Harmless(_TEXT_ONLY.why),
    "--interleave-mm-strings": Harmless(_TEXT_ONLY.why),
    "--skip-mm-profiling": Harmless(_TEXT_ONLY.why),
    "--language-model-only": Harmless(_TEXT_ONLY.why),
    # the HTTP side
    "--uds": Refused("--host 127.0.0.1, behind a proxy that listens on the socket"),
    "--allow-credentials": Refused(nargs=0),
    "--allowed-methods": Harmless("every method that a route has is allowed", 1),
    "--allowed-headers": Harmless("every header is allowed", 1),
    "--ssl-cert-reqs": Refused("--ssl-ca-certs asks clients for certificates"),
    "--ssl-ciphers": Refused(),
    "--enable-ssl-refresh": Refused("restart the server, or end TLS in a proxy", 0),
    "--middleware": Refused("put a proxy before the server"),
    "--enable-request-id-headers": Harmless("X-Request-Id is in every answer"),
    "--disable-fastapi-docs": Refused("/openapi.json needs the API key where there is one", 0),
    "--enable-offline-docs": Harmless("/openapi.json and the playground need no network"),
    "--h11-max-incomplete-event-size": Harmless("headers are bounded", 1),
    "--h11-max-header-count": Harmless("headers are bounded", 1),
    "--chat-template-content-format": Harmless("which form a template takes is found out", 1, ("auto",)),
    "--trust-request-chat-template": Refused("--chat-template at start; chat_template_kwargs in a request", 0),
    "--default-chat-template-kwargs": Refused("chat_template_kwargs in a request"),
    "--response-role": Harmless("answers are the assistant's", 1, ("assistant",)),
    "--return-tokens-as-token-ids": Refused("return_tokens_as_token_ids in a request", 0),
    "--enable-auto-tool-choice": Harmless("tools are always offered; --tool-call-parser is found out"),
    "--exclude-tools-when-tool-choice-none": Refused("leave out tools in such a request", 0),
    "--tool-parser-plugin": Refused("a checkpoint's response_template is read; see docs/syntaxes.md"),
    "--tool-server": Refused(),
    "--enable-prompt-tokens-details": Harmless("cached tokens are always in usage"),
    "--enable-server-load-tracking": Harmless("/metrics has the number of running and waiting requests"),
    "--enable-force-include-usage": Refused("stream_options.include_usage in a request", 0),
    "--enable-tokenizer-info-endpoint": Refused(nargs=0),
    "--enable-per-request-metrics": Refused("--otlp-traces-endpoint", 0),
    "--log-error-stack": Harmless("--log-level debug shows tracebacks"),
    "--tokens-only": Refused(nargs=0),
    "--enable-log-deltas": Harmless("answers are never logged"),
    "--fingerprint-mode": Harmless("system_fingerprint is a hash of version and model", 1, ("hash",)),
}

BENCH_FLAGS: Mapping[str, Harmless | Refused] = {
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
    "--logprobs": Refused("""--extra-body '{"logprobs": N}'"""),
    "--top-p": Refused("""--extra-body '{"top_p": X}'"""),
    "--top-k": Refused("""--extra-body '{"top_k": N}'"""),
    "--min-p": Refused("""--extra-body '{"min_p": X}'"""),
    "--frequency-penalty": Refused("""--extra-body '{"frequency_penalty": X}'"""),
    "--presence-penalty": Refused("""--extra-body '{"presence_penalty": X}'"""),
    "--repetition-penalty": Refused("""--extra-body '{"repetition_penalty": X}'"""),
    "--profile": Refused("POST /start_profile and /stop_profile around the run", 0),
    "--use-beam-search": Refused(nargs=0),
    "--lora-modules": Refused(nargs="*"),
    "--ramp-up-strategy": Refused(),
    "--ramp-up-start-rps": Refused(),
    "--ramp-up-end-rps": Refused(),
    "--hf-split": Refused("download the data set, and give it with --file"),
    "--hf-subset": Refused("download the data set, and give it with --file"),
    "--hf-name": Refused("download the data set, and give it with --file"),
    "--hf-output-len": Refused("--output-len"),
    "--custom-output-len": Refused("--output-len"),
    "--header": Refused(nargs="*"),
}
"""Flags of `vllm bench serve`."""
# fmt: on


def verdict(flag: str, value: str | None = None) -> str | None:
    """Return what to say about a flag of vLLM with this value, or None where jaxserve does not know it either.

    `flag` may be a flag (`--swap-space`) or a keyword of `LLM` (`swap_space`). A text that ends in "not supported" or
    begins with "instead" belongs to a flag that is refused.
    """
    name = flag if flag.startswith("-") else "--" + flag.replace("_", "-")
    row = FLAGS.get(name)
    if row is None:
        return f"instead: {RENAMED[name]}" if name in RENAMED else None
    if isinstance(row, Harmless):
        if value is None or row.accepts(value):
            return f"nothing is needed: {row.why}"
        return f"{value!r} is not supported; only {', '.join(row.values)} ({row.why})"
    return f"instead: {row.instead}" if row.instead else "not supported"
