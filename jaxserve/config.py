"""Every option of the engine and the server: frozen dataclasses, validated once, no jax.

A field is its command-line flag too (`max_num_seqs` is `--max-num-seqs`): its `help` and `group` stand in its metadata.
"""

import dataclasses
import typing
from typing import Any, Literal

from jaxserve.errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]


def _option(default: Any, group: str, text: str, *, is_size: bool = False, alias: str | None = None) -> Any:
    """A field that is a flag: `is_size` takes bytes with a suffix (4GiB), `alias` is the name vLLM has for the same."""
    metadata = {"group": group, "help": text, "is_size": is_size, "alias": alias}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """One engine. None means: chosen from the model or the device at start-up, and logged."""

    model: str = _option("", "model", "model directory, or the name of a built-in model; default: scribe-15m")
    tokenizer: str | None = _option(None, "model", "directory of the tokenizer; default: the model's")
    dtype: DType = _option(
        "auto", "model", "dtype of weights, activations and KV; auto: the checkpoint's, float32 on CPU"
    )
    max_model_len: int | None = _option(None, "model", "longest prompt plus output, in tokens; default: the model's")
    load_format: Literal["auto", "safetensors", "dummy"] = _option(
        "auto", "model", "dummy: random weights of the model's shape, for benchmarks"
    )
    seed: int = _option(0, "model", "seed of requests that bring none, and of dummy weights")

    block_size: int = _option(16, "cache", "KV positions a block")
    kv_cache_memory: int | None = _option(
        None,
        "cache",
        "bytes for KV blocks (suffixes KiB, MiB, GiB); default: what is free on a GPU, 1GiB on CPU",
        is_size=True,
        alias="--kv-cache-memory-bytes",
    )
    gpu_memory_utilization: float = _option(
        0.9, "cache", "share of the GPU's memory that weights, KV and steps may use"
    )
    enable_prefix_caching: bool = _option(True, "cache", "share the KV of equal prompt prefixes between requests")

    max_num_seqs: int | None = _option(
        None, "scheduling", "requests that run at once; default: 256 on a GPU, 64 on CPU"
    )
    max_num_batched_tokens: int | None = _option(
        None, "scheduling", "token budget of a step; default: 2048 on a GPU, 512 on CPU"
    )
    max_num_waiting: int | None = _option(
        None, "scheduling", "requests that may wait before new ones are refused; default: no limit"
    )
    scheduling_policy: Literal["fcfs", "priority"] = _option("fcfs", "scheduling", "who runs first")
    scheduler: Literal["continuous", "static"] = _option(
        "continuous", "scheduling", "static: fixed padded batches, a baseline to compare with"
    )

    tensor_parallel_size: int = _option(1, "execution", "devices that share each layer", alias="-tp")
    attention: Literal["auto", "xla"] = _option(
        "auto", "execution", "attention implementation; xla must be asked for on a GPU"
    )
    overlap: bool = _option(
        True, "execution", "plan the next step while the device runs the last one", alias="--async-scheduling"
    )
    warmup: bool = _option(True, "execution", "compile every step shape at start-up")
    compilation_cache_dir: str | None = _option(
        None, "execution", "persistent compilation cache; default: ~/.cache/jaxserve/xla, '' for none"
    )

    def __post_init__(self) -> None:
        _check_literals(self)
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_num_waiting", "kv_cache_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")
        if not 1 <= self.block_size <= 512 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two up to 512, got {self.block_size}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization}")
        if self.tensor_parallel_size < 1:
            raise ConfigError(f"tensor_parallel_size must be at least 1, got {self.tensor_parallel_size}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The HTTP side of `jaxserve serve`."""

    host: str = _option("127.0.0.1", "server", "address to listen on")
    port: int = _option(8000, "server", "port to listen on; 0 takes a free one")
    api_key: str | None = _option(
        None, "server", "key that clients must send as a bearer token; default: none is needed"
    )
    served_model_name: str | None = _option(None, "server", "name of the model in the API; default: the model argument")
    shutdown_timeout: float = _option(30.0, "server", "seconds that running requests may take after SIGTERM")
    max_body_size: int = _option(32 * 2**20, "server", "largest request body, in bytes", is_size=True)
    log_level: Literal["debug", "info", "warning", "error"] = _option("info", "server", "what is logged")

    def __post_init__(self) -> None:
        _check_literals(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be in [0, 65535], got {self.port}")
        if self.shutdown_timeout < 0:
            raise ConfigError(f"shutdown_timeout must not be negative, got {self.shutdown_timeout}")
        if self.max_body_size < 1:
            raise ConfigError(f"max_body_size must be at least 1, got {self.max_body_size}")


def _check_literals(config: EngineConfig | ServerConfig) -> None:
    for name, hint in typing.get_type_hints(type(config)).items():
        if typing.get_origin(hint) is Literal and getattr(config, name) not in typing.get_args(hint):
            choices = ", ".join(map(str, typing.get_args(hint)))
            raise ConfigError(f"{name} must be one of {choices}, got {getattr(config, name)!r}")
