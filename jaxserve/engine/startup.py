"""From an EngineConfig to a running Engine: choose devices and sizes, load the weights, compile the steps."""

import contextlib
import functools
import logging
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.engine.bandwidth import PEAK_BYTES_PER_SECOND, BandwidthMeter
from jaxserve.engine.client import EngineInfo, KVKind
from jaxserve.engine.embedding import matryoshka_dimensions
from jaxserve.engine.engine import Engine
from jaxserve.errors import ConfigError, OutOfMemory
from jaxserve.execution.kv_cache import CPU_KV_CACHE_MEMORY, choose_num_blocks
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.execution.programs.compile import enable_persistent_cache
from jaxserve.execution.programs.lowering import Lowering
from jaxserve.execution.programs.spec import ON_CPU, ON_GPU, StepSpec
from jaxserve.execution.runner import Runner
from jaxserve.layers.batch import Kernels
from jaxserve.layers.held import why_not_held
from jaxserve.layers.params import Params, abstract_params, init_params, num_bytes, schemes_of, shard_bytes
from jaxserve.layers.sharding import check_mesh, mesh_axis, with_explicit_axes
from jaxserve.loading.builtin import resolve_names
from jaxserve.loading.huggingface import resolve_dtype
from jaxserve.loading.json_files import eos_token_ids
from jaxserve.loading.weights import load_config, load_weights, naming_config, stored_specs
from jaxserve.models import get_family, max_context, with_context
from jaxserve.scheduling.block_needs import BlockNeeds
from jaxserve.scheduling.scheduler import SchedulerLimits, make_scheduler
from jaxserve.structured.matchers import Matchers
from jaxserve.tokenizer import Tokenizer
from pallas_kernels.peers import can_reach_each_other

logger = logging.getLogger(__name__)

GPU_MEMORY_RESERVE = 512 * 2**20
"""Bytes left to what XLA's plan does not show: library workspaces, fragmentation."""

KV_CACHE_UNIT = 2**26
"""The size of the KV cache is a multiple of this many bytes: steps are compiled for a number of blocks, and are found
on disk again only if the next start arrives at the same number.
"""

MEMINFO = pathlib.Path("/proc/meminfo")


class _Laps:
    """Seconds of each phase of the start, for people."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self._phases: list[str] = []

    def lap(self, phase: str) -> None:
        """End a phase."""
        last, self._last = self._last, time.perf_counter()
        self._phases.append(f"{phase} {self._last - last:.1f} s")

    @property
    def total(self) -> float:
        """Seconds until now."""
        return time.perf_counter() - self._began

    def __str__(self) -> str:
        return ", ".join(self._phases)


def start_engine(config: EngineConfig, *, mesh: Mesh | None, progress: bool) -> tuple[Engine, EngineInfo]:
    """Everything between a model's name and the first step. Raises StartupError.

    Every axis of `mesh` must split the model, as `layers.sharding` names them: "tensor", or "expert" where there are
    experts. None: `config.tensor_parallel_size` devices along one axis, "tensor".
    """
    laps = _Laps()
    config = resolve_names(config, progress=progress)
    path = config.model
    hf_config = load_config(path)
    with naming_config(path):
        family = get_family(hf_config)
        model_config = family.Config.from_hf(hf_config)
    eos = eos_token_ids(hf_config, pathlib.Path(path, "config.json"))
    max_model_len = _max_model_len(config, model_config)

    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ:  # read when the backend starts, if it has not yet
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(config.gpu_memory_utilization)
    cache = enable_persistent_cache(config.compilation_cache_dir)
    mesh = with_explicit_axes(mesh or _make_mesh(config.tensor_parallel_size))
    platform = mesh.devices.flat[0].platform
    is_cpu = platform == "cpu"
    with naming_config(path):
        dtype = resolve_dtype(config.dtype, hf_config, is_cpu=is_cpu)
    kernels = _kernels(config, mesh, dtype)
    max_num_seqs = config.max_num_seqs or (64 if is_cpu else 256)
    max_num_batched_tokens = config.max_num_batched_tokens or (512 if is_cpu else 8192)

    by_default = functools.partial(why_not_held, dtype=dtype, kernels=kernels, is_cpu=is_cpu, num_devices=mesh.size)
    specs = stored_specs(
        path,
        family.param_specs(model_config),
        dtype=dtype,
        quantization=config.quantization,
        dequantizes=config.dequantize is True,
        why_not_held=by_default if config.dequantize is None else None,
    )
    axes = {axis for spec in jax.tree.leaves(specs) for axis in spec.axes}
    check_mesh(mesh, axes, tensor_parallel_size=config.tensor_parallel_size)
    model_config = with_context(model_config, max_model_len)
    spec = StepSpec(
        model=hf_config,
        dtype=str(dtype),
        kernels=kernels,
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        traits=ON_CPU if is_cpu else ON_GPU,
        has_peers=kernels != "xla" and _reaches_peers(mesh),
        schemes=schemes_of(specs),
    )
    builder = StepBuilder(spec, mesh)
    if kernels != "xla":
        logger.info("layers: " + "; ".join(builder.describe_paths()))
    weights = jax.tree.leaves(abstract_params(specs, dtype=dtype, mesh=mesh))
    _check_room_for(weights, path, dtype=dtype, mesh=mesh)
    free = _available_memory(mesh) - _bytes_a_device(weights)
    _check_room_for_steps(builder, spec, free=free)
    windows, bytes_per_block = builder.model.layout.windows, builder.model.bytes_per_block
    needs = BlockNeeds(windows=windows, block_size=config.block_size, max_chunk=max_num_batched_tokens)
    memory = config.kv_cache_memory or (CPU_KV_CACHE_MEMORY if is_cpu else None)
    is_measured = memory is None
    if memory is None:
        free -= KV_CACHE_UNIT  # allocations are rounded up
        memory = _kv_cache_memory(free, builder.expected_step_memory, weights=weights, config=config, mesh=mesh)
    num_blocks = choose_num_blocks(memory, bytes_per_block, max_model_len=max_model_len, needs=needs)
    lowering = None
    with contextlib.ExitStack() as on_error:
        if kernels != "xla" and config.warmup:
            lowering = Lowering(builder, folder=cache and cache / "steps")
            on_error.callback(lowering.close)
            for program in builder.shapes.programs:  # meanwhile, in other processes
                lowering.prepare(program, num_blocks)
        laps.lap("preparing")
        params = _load(config, path, specs, dtype=dtype, mesh=mesh, progress=progress)
        matchers = Matchers(
            functools.partial(Tokenizer.load, config.tokenizer or path),
            vocab_size=model_config.vocab_size,
            eos_token_ids=eos,
        )
        on_error.pop_all()
    runner = Runner(builder, params, lowering=lowering)
    laps.lap("weights")
    if config.warmup:
        matchers.warm_up()  # meanwhile, in a thread
    warm_up = None
    with _closing_on_error(runner), _naming_unsupported():
        runner.set_num_blocks(num_blocks)
        with _naming_out_of_memory("compiling the steps"):
            warm_up = runner.warm_up(progress=progress) if config.warmup else None
            if is_measured:
                free, needed = _available_memory(mesh), runner.step_memory()
                memory = _kv_cache_memory(free, needed, weights=weights, config=config, mesh=mesh)
                if memory < num_blocks * bytes_per_block:
                    logger.warning("steps take %.2f GiB, more than expected: compiling again", needed / 2**30)
                    num_blocks = choose_num_blocks(memory, bytes_per_block, max_model_len=max_model_len, needs=needs)
                    runner.set_num_blocks(num_blocks)
                    warm_up = runner.warm_up(progress=progress) if config.warmup else None
        if kernels != "xla" and not config.warmup:  # which would find it too
            runner.check_kernels()
        laps.lap("steps")
        with _naming_out_of_memory(f"the KV cache of {num_blocks} blocks"):
            runner.allocate()
            if not is_cpu and config.warmup:
                runner.run_empty_steps()
        laps.lap("first runs")

    kinds = _kv_kinds(runner)
    logger.info(
        f"{path}: {num_bytes(specs, dtype=dtype) / 2**30:.2f} GiB of weights ({dtype}), {runner.num_compiles} programs "
        f"compiled, kernels: {kernels} on {platform}; ready after {laps.total:.1f} s: {laps}"
    )
    if warm_up is not None:
        logger.info(
            f"steps: lowered after {warm_up.lowered_after:.1f} s"
            + ("" if lowering is None else f" ({lowering.num_found} of them were on disk)")
            + f", kernels compiled after {warm_up.kernels_after:.1f} s, all after {warm_up.compiled_after:.1f} s"
        )
    logger.info(
        f"KV cache: {num_blocks * bytes_per_block / 2**30:.2f} GiB in {num_blocks} blocks of {config.block_size}, room "
        f"for {needs.num_requests(num_blocks, num_tokens=max_model_len)} requests of {max_model_len} tokens; "
        + ", ".join(f"{kind.num_layers} layers ({kind.name}): {kind.bytes_per_token} bytes a token" for kind in kinds)
    )
    weight_bytes, expert_bytes = _weight_bytes(specs, dtype=dtype)
    routing = model_config.routing if expert_bytes else None
    info = EngineInfo(
        model=path,
        vocab_size=model_config.vocab_size,
        hidden_size=model_config.hidden_size,
        embedding_dimensions=matryoshka_dimensions(hf_config),
        max_model_len=max_model_len,
        block_size=config.block_size,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        eos_token_ids=eos,
        weight_bytes=weight_bytes,
        expert_bytes=expert_bytes,
        expert_share=0.0 if routing is None else routing.num_experts_per_token / routing.num_experts,
        kv_kinds=kinds,
        kv_dtype=str(dtype),
        enable_prefix_caching=config.enable_prefix_caching,
    )
    limits = SchedulerLimits(
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        policy=config.scheduling_policy,
        windows=windows,
    )
    scheduler = make_scheduler(
        config.scheduler,
        limits,
        enable_prefix_caching=config.enable_prefix_caching,
        model_domain=f"{path} {dtype} {config.load_format} {config.seed}".encode(),
    )
    peak = PEAK_BYTES_PER_SECOND.get(mesh.devices.flat[0].device_kind)
    bandwidth = BandwidthMeter(
        weight_bytes=round(info.expected_weight_bytes(1)),
        bytes_per_position=bytes_per_block // config.block_size,
        peak=None if peak is None else peak * mesh.size,
    )
    return Engine(scheduler, runner, overlap=config.overlap, matchers=matchers, bandwidth=bandwidth), info


def _kv_kinds(runner: Runner) -> tuple[KVKind, ...]:
    """Return what a token takes in the blocks of each kind of layer, including the unused pools of a partly filled KV
    group.
    """
    windows, per_group = runner.layout.windows, runner.bytes_per_block // runner.block_size
    return tuple(
        KVKind(window=window, num_layers=num_layers, bytes_per_token=windows.count(window) * per_group)
        for window, num_layers in runner.layout.layers_by_window.items()
    )


def _weight_bytes(specs: Params, *, dtype: np.dtype) -> tuple[int, int]:
    """Bytes of weights that every step reads, and of experts, of which it reads those that the router chooses. An
    embedding that is not the LM head too is read by the row.
    """
    used = {name: spec for name, spec in specs.items() if name != "embed" or "lm_head" not in specs}
    experts: Params = {str(i): spec for i, spec in enumerate(jax.tree.leaves(used)) if "experts" in spec.axes}
    expert_bytes = num_bytes(experts, dtype=dtype)
    return num_bytes(used, dtype=dtype) - expert_bytes, expert_bytes


def _make_mesh(tensor_parallel_size: int) -> Mesh:
    devices = jax.devices()
    if tensor_parallel_size > len(devices):
        there_are = "there is 1 device" if len(devices) == 1 else f"there are {len(devices)} devices"
        more = f": for so many on a CPU, set JAX_NUM_CPU_DEVICES={tensor_parallel_size} in the environment"
        raise ConfigError(
            f"tensor_parallel_size is {tensor_parallel_size}, but {there_are}"
            + (more if devices[0].platform == "cpu" else "")
        )
    return jax.make_mesh((tensor_parallel_size,), ("tensor",), devices=devices[:tensor_parallel_size])


def _reaches_peers(mesh: Mesh) -> bool:
    """Return true if the devices of a mesh reach each other's memory, or do not add up partial sums. Warns if they
    cannot.
    """
    if mesh_axis("ffn", mesh) is None or can_reach_each_other(list(mesh.devices.flat)):
        return True
    logger.warning("these devices do not reach each other's memory: XLA adds up partial sums, which takes longer")
    return False


def _max_model_len(config: EngineConfig, model_config: Any) -> int:
    limit = max_context(model_config)
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len is {config.max_model_len}, but the model was made for at most {limit} tokens")
    return config.max_model_len or model_config.max_position_embeddings


def _kernels(config: EngineConfig, mesh: Mesh, dtype: np.dtype) -> Kernels:
    """Choose the kernels. Nothing falls back silently: on a GPU plain XLA is slow, and is used only on request."""
    if config.kernels == "xla":
        return "xla"
    device = mesh.devices.flat[0]
    if device.platform == "cpu":
        if config.kernels == "auto":
            return "xla"
        raise ConfigError(f"kernels is {config.kernels}, but the model runs on a CPU: leave it out, or --kernels xla")
    if device.compute_capability != "9.0":
        raise ConfigError(f"there are no kernels for {device.device_kind}: ask for slow, plain XLA by --kernels xla")
    if dtype.itemsize != 2:
        raise ConfigError(
            f"dtype is {dtype}, but there are kernels for bfloat16 and float16 only: choose one of these by --dtype, "
            "or slow, plain XLA by --kernels xla"
        )
    return "sm90"


@contextlib.contextmanager
def _naming_unsupported() -> Iterator[None]:
    """Report in one line what a kernel does not support."""
    try:
        yield
    except NotImplementedError as error:
        raise ConfigError(f"no kernel for this model: {error}; ask for slow, plain XLA by --kernels xla") from error


def _load(config: EngineConfig, path: str, specs: Params, *, dtype: np.dtype, mesh: Mesh, progress: bool) -> Params:
    with _naming_out_of_memory("the weights"):
        if config.load_format == "dummy":
            return jax.block_until_ready(init_params(specs, dtype=dtype, mesh=mesh, seed=config.seed))
        return load_weights(path, specs, dtype=dtype, mesh=mesh, progress=progress)


def _check_room_for(weights: list[jax.ShapeDtypeStruct], path: str, *, dtype: np.dtype, mesh: Mesh) -> None:
    needed, available = _bytes_a_device(weights), _available_memory(mesh)
    if needed > available:
        raise OutOfMemory(
            f"{path} needs {needed / 2**30:.1f} GiB a device for its weights in {dtype}, "
            f"but {available / 2**30:.1f} GiB are free"
        )


def _check_room_for_steps(builder: StepBuilder, spec: StepSpec, *, free: int) -> None:
    """Raises OutOfMemory where slots and steps need more than the bytes that are `free` on a device."""
    needed = builder.expected_step_memory
    if needed > free:
        raise OutOfMemory(
            f"max_num_seqs={spec.max_num_seqs} and max_num_batched_tokens={spec.max_num_batched_tokens} need "
            f"{needed / 2**30:.1f} GiB a device for the state of so many requests and their steps, but "
            f"{max(free, 0) / 2**30:.1f} GiB are free beside the weights"
        )


def _bytes_a_device(weights: list[jax.ShapeDtypeStruct]) -> int:
    return sum(shard_bytes(weight) for weight in weights)


def _available_memory(mesh: Mesh) -> int:
    """Bytes that are free on the fullest device of the mesh."""
    if mesh.devices.flat[0].platform == "cpu":  # all "devices" are the host
        return _host_memory() // mesh.size
    stats = [device.memory_stats() for device in mesh.devices.flat]
    return min(stat["bytes_limit"] - stat["bytes_in_use"] for stat in stats)


def _host_memory() -> int:
    """Bytes that a process can still get, page cache included: the kernel gives it up. All there are, if not Linux."""
    if not MEMINFO.exists():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    fields = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
    return int(fields["MemAvailable"].removesuffix("kB")) * 1024


def _kv_cache_memory(
    free: int, step_memory: int, *, weights: list[jax.ShapeDtypeStruct], config: EngineConfig, mesh: Mesh
) -> int:
    """Return how many bytes remain for the KV cache on all devices, given `free` bytes per device besides the weights.

    If steps are compiled after the cache is allocated, XLA's trials need memory too: two copies of the largest weight.
    """
    trials = 0 if config.warmup else 2 * max(map(shard_bytes, weights))
    left = free - step_memory - trials - GPU_MEMORY_RESERVE
    return max(left, 0) // KV_CACHE_UNIT * KV_CACHE_UNIT * mesh.shape.get("tensor", 1)


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
