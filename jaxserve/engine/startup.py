"""From an EngineConfig to a running Engine: choose devices and sizes, load the weights, compile the steps."""

import contextlib
import dataclasses
import functools
import logging
import math
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.engine.client import EngineInfo
from jaxserve.engine.engine import Engine
from jaxserve.errors import ConfigError, OutOfMemory
from jaxserve.execution.compile import enable_persistent_cache
from jaxserve.execution.kv_cache import CPU_KV_CACHE_MEMORY, block_bytes, choose_num_blocks
from jaxserve.execution.runner import Runner
from jaxserve.layers.attention import paged_attention
from jaxserve.layers.params import Params, abstract_params, init_params, num_bytes
from jaxserve.layers.sharding import with_explicit_axes
from jaxserve.loading.builtin import resolve_model
from jaxserve.loading.huggingface import load_config, load_params, resolve_dtype
from jaxserve.models import get_family
from jaxserve.scheduling.scheduler import SchedulerLimits, make_scheduler
from pallas_kernels.paged_attention import Implementation

logger = logging.getLogger(__name__)

GPU_MEMORY_RESERVE = 512 * 2**20
"""Bytes left to what XLA's plan does not show: library workspaces, fragmentation."""

MEMINFO = pathlib.Path("/proc/meminfo")


def start_engine(config: EngineConfig, *, mesh: Mesh | None, progress: bool) -> tuple[Engine, EngineInfo]:
    """Everything between a model's name and the first step. Raises StartupError.

    `mesh` may have any axes; those that `layers.sharding` names split the model. None: `config.tensor_parallel_size`
    devices along one axis, "tensor".
    """
    started = time.perf_counter()
    path = resolve_model(config.model)
    hf_config = load_config(path)
    family = get_family(hf_config)
    model_config = family.Config.from_hf(hf_config)
    max_model_len = _max_model_len(config, model_config)

    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # read when the backend starts, if it has not yet
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(config.gpu_memory_utilization)
    enable_persistent_cache(config.compilation_cache_dir)
    mesh = with_explicit_axes(mesh or _make_mesh(config.tensor_parallel_size))
    platform = mesh.devices.flat[0].platform
    is_cpu = platform == "cpu"
    implementation = _attention_implementation(config, is_cpu=is_cpu)
    dtype = resolve_dtype(config.dtype, hf_config, is_cpu=is_cpu)
    max_num_seqs = config.max_num_seqs or (64 if is_cpu else 256)
    max_num_batched_tokens = config.max_num_batched_tokens or (512 if is_cpu else 2048)

    specs = family.param_specs(model_config)
    # Weights are declared for the context that the model was made for; from here on it is the one that is served, which
    # decides what LongRoPE does.
    model_config = dataclasses.replace(model_config, max_position_embeddings=max_model_len)
    params = _load(config, path, specs, dtype=dtype, mesh=mesh, progress=progress)
    loaded = time.perf_counter()
    runner = Runner(
        family=family,
        model_config=model_config,
        params=params,
        dtype=dtype,
        mesh=mesh,
        attention=functools.partial(paged_attention, implementation=implementation),
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        has_greedy_steps=not is_cpu,
    )
    bytes_per_block = block_bytes(family.kv_specs(model_config), block_size=config.block_size, dtype=dtype)
    with _closing_on_error(runner):
        memory = config.kv_cache_memory or (CPU_KV_CACHE_MEMORY if is_cpu else _kv_cache_memory(config, runner, mesh))
        num_blocks = choose_num_blocks(
            memory, bytes_per_block, max_model_len=max_model_len, block_size=config.block_size
        )
        runner.num_blocks = num_blocks
        with _naming_out_of_memory("compiling the steps"):
            compiled = runner.warm_up(progress=progress) if config.warmup else 0.0
        with _naming_out_of_memory(f"the KV cache of {num_blocks} blocks"):
            runner.allocate()

    num_positions = num_blocks * config.block_size
    logger.info(
        f"{path}: {num_bytes(specs, dtype=dtype) / 2**30:.2f} GiB of weights ({dtype}) in {loaded - started:.1f} s, "
        f"{runner.num_compiles} step shapes compiled in {compiled:.1f} s, ready after "
        f"{time.perf_counter() - started:.1f} s; attention: {implementation} on {platform}"
    )
    logger.info(
        f"KV cache: {num_blocks * bytes_per_block / 2**30:.2f} GiB in {num_blocks} blocks of {config.block_size}, room "
        f"for {num_positions} tokens, {num_positions / max_model_len:.1f} requests of {max_model_len} tokens"
    )
    info = EngineInfo(
        model=path,
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        eos_token_ids=_eos_token_ids(hf_config),
    )
    limits = SchedulerLimits(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        policy=config.scheduling_policy,
    )
    scheduler = make_scheduler(
        config.scheduler,
        limits,
        enable_prefix_caching=config.enable_prefix_caching,
        model_domain=f"{path} {dtype} {config.load_format} {config.seed}".encode(),
    )
    return Engine(scheduler, runner, overlap=config.overlap), info


def _make_mesh(tensor_parallel_size: int) -> Mesh:
    devices = jax.devices()
    if tensor_parallel_size > len(devices):
        raise ConfigError(f"tensor_parallel_size is {tensor_parallel_size}, but there are {len(devices)} devices")
    return jax.make_mesh((tensor_parallel_size,), ("tensor",), devices=devices[:tensor_parallel_size])


def _max_model_len(config: EngineConfig, model_config: Any) -> int:
    limit = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len is {config.max_model_len}, but the model was made for at most {limit} tokens")
    return config.max_model_len or limit


def _attention_implementation(config: EngineConfig, *, is_cpu: bool) -> Implementation:
    """Nothing falls back silently: on a GPU the XLA path is slow, and runs only for those who ask for it."""
    if config.attention == "auto" and not is_cpu:
        raise ConfigError("there is no attention kernel for this GPU yet: ask for the slow XLA path by --attention xla")
    return "xla"


def _eos_token_ids(hf_config: dict[str, Any]) -> tuple[int, ...]:
    eos = hf_config.get("eos_token_id")
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def _load(config: EngineConfig, path: str, specs: Params, *, dtype: np.dtype, mesh: Mesh, progress: bool) -> Params:
    weights = jax.tree.leaves(abstract_params(specs, dtype=dtype, mesh=mesh))
    needed = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in weights)
    available = _available_memory(mesh)
    if needed > available:
        raise OutOfMemory(
            f"{path} needs {needed / 2**30:.1f} GiB a device for its weights in {dtype}, "
            f"but {available / 2**30:.1f} GiB are free"
        )
    with _naming_out_of_memory("the weights"):
        if config.load_format == "dummy":
            return jax.block_until_ready(init_params(specs, dtype=dtype, mesh=mesh, seed=config.seed))
        return load_params(path, specs, dtype=dtype, mesh=mesh, progress=progress)


def _available_memory(mesh: Mesh) -> int:
    """Bytes that are free on the fullest device of the mesh."""
    if mesh.devices.flat[0].platform == "cpu":  # all "devices" share the host
        return _host_memory() // mesh.size
    stats = [device.memory_stats() for device in mesh.devices.flat]
    return min(stat["bytes_limit"] - stat["bytes_in_use"] for stat in stats)


def _host_memory() -> int:
    """Bytes that a process can still get, page cache included: the kernel gives it up. All there are, if not Linux."""
    if not MEMINFO.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
    return int(fields["MemAvailable"].removesuffix("kB")) * 1024


def _kv_cache_memory(config: EngineConfig, runner: Runner, mesh: Mesh) -> int:
    """What is left for the KV cache once the weights lie on the GPU and the largest step has its temporaries.

    Steps that are compiled later than the cache is made need room for XLA's trials too: two of the largest weight.
    """
    trials = 0 if config.warmup else 2 * max(leaf.nbytes for leaf in jax.tree.leaves(runner.params))
    free = _available_memory(mesh) - runner.measure_step_memory() - trials - GPU_MEMORY_RESERVE
    return max(free, 0) * mesh.shape.get("tensor", 1)


@contextlib.contextmanager
def _closing_on_error(runner: Runner) -> Iterator[None]:
    """Free the device when the start fails: a traceback that is kept, as notebooks do, would keep the weights on it."""
    try:
        yield
    except BaseException:
        runner.close()
        raise


@contextlib.contextmanager
def _naming_out_of_memory(what: str) -> Iterator[None]:
    """XLA's RESOURCE_EXHAUSTED as one line."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemory(f"{what} did not fit into the device's memory: {str(error).splitlines()[0]}") from error
