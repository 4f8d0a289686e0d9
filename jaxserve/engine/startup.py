"""From an EngineConfig to a running Engine: choose devices and sizes, load the weights, compile the steps."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import msgspec
from jax.sharding import Mesh

from jaxserve.config import EngineConfig, WarmUp
from jaxserve.engine.bandwidth import BandwidthMeter
from jaxserve.engine.checkpoint import Checkpoint, choose_dtype, choose_weights, read_checkpoint, specs_with_scales
from jaxserve.engine.client import EngineInfo
from jaxserve.engine.device import Devices, choose_devices, choose_kernels, free_memory, has_bfloat16
from jaxserve.engine.engine import Engine
from jaxserve.engine.memory import give_memory_back
from jaxserve.engine.report import Laps, log_start, log_warm_up, make_info
from jaxserve.engine.serving_plan import ServingPlan
from jaxserve.engine.sizing import CPU_KV_CACHE_MEMORY, Sizing
from jaxserve.errors import ConfigError, OutOfMemory
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.execution.programs.compile import enable_persistent_cache
from jaxserve.execution.programs.kinds import Program
from jaxserve.execution.programs.lowering import Lowering
from jaxserve.execution.programs.model import StepModel
from jaxserve.execution.programs.shipped import Shipped, open_shipped
from jaxserve.execution.programs.spec import StepSpec
from jaxserve.execution.programs.workers import Worker
from jaxserve.execution.runner import Runner
from jaxserve.layers.cache import KV_DTYPES
from jaxserve.layers.kv_scales import kv_scales_of
from jaxserve.layers.layouts import schemes_of, shard_bytes
from jaxserve.layers.params import Params
from jaxserve.layers.random_params import init_params
from jaxserve.layers.sharding import DATA, check_mesh
from jaxserve.layers.stages import stage_meshes
from jaxserve.loading.builtin import naming
from jaxserve.loading.weights import load_weights
from jaxserve.scheduling.block_needs import BlockNeeds
from jaxserve.scheduling.drafting import NO_DRAFTS, DraftPolicy
from jaxserve.scheduling.scheduler import Scheduler, SchedulerLimits, make_scheduler
from jaxserve.speculative import make_drafter
from jaxserve.structured.matchers import Matchers
from jaxserve.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def start_engine(
    config: EngineConfig, *, mesh: Mesh | None, progress: bool, workers: Sequence[Worker] = ()
) -> tuple[Engine, EngineInfo]:
    """Do everything between a model's name and the first step. Raises StartupError.

    `workers` are processes that wait to lower steps.

    Every axis of `mesh` must split the model, as `layers.sharding` names them: "tensor", or "expert" where there are
    experts, or "pipe", along which its stages are. None: the mesh that `config` says.
    """
    laps = Laps()
    config, checkpoint = read_checkpoint(config, progress=progress)
    plan = make_plan(config, checkpoint, choose_devices(config, mesh))
    if config.max_model_len == "auto":
        plan = fit_context(plan, free=free_memory(plan.devices.mesh))
    builder, warmup, sizings = plan.builder, plan.warmup, size(plan)
    num_blocks = count_blocks(plan, sizings, free=free_memory(plan.devices.mesh))
    shipped = None if config.programs is None else open_shipped(config.programs, builder)
    if shipped is not None:
        num_blocks = blocks_of_programs(shipped, num_blocks)
    folder = enable_persistent_cache(config.compilation_cache_dir)
    with contextlib.ExitStack() as on_error:
        lowering = begin_to_lower(builder, num_blocks, warmup, folder=folder, workers=workers, shipped=shipped)
        on_error.callback(lowering.close)
        laps.lap("preparing")
        runner = Runner(builder, lowering=lowering)
        on_error.callback(runner.close)  # a traceback that is kept, as notebooks do, would keep the weights
        if shipped is not None:
            load_programs(runner, shipped)
            laps.lap("programs")
        with compiling_meanwhile(runner, lowering, num_blocks, warmup):
            runner.set_params(load(plan, progress=progress))
            matchers = make_matchers(plan)
            on_error.callback(matchers.close)
            laps.lap("weights")
        compile_steps(runner, lowering, sizings, num_blocks, warmup, progress=progress)
        laps.lap("steps")
        allocate(runner, plan.devices, warmup)
        laps.lap("first runs")
        log_start(runner, platform=plan.devices.platform, laps=laps)
        info = make_info(plan, num_blocks=runner.num_blocks, needs=sizings[0].needs)
        engine = Engine(
            make_scheduler_for(plan, info),
            runner,
            overlap=config.overlap,
            matchers=matchers,
            bandwidth=meter(plan, info),
        )
        if warmup == "background":
            compile_rest(runner, folder=folder, shipped=shipped)
        on_error.pop_all()
    return engine, info


def make_plan(config: EngineConfig, checkpoint: Checkpoint, devices: Devices) -> ServingPlan:
    """Choose dtype, kernels and the form of the weights, and declare the steps of that."""
    mesh = devices.mesh
    dtype = choose_dtype(config, checkpoint, is_cpu=devices.is_cpu, has_bfloat16=has_bfloat16(devices.first))
    kernels = choose_kernels(config.kernels, devices.first, dtype)
    specs = specs_with_scales(config, checkpoint)
    of_device: dict[str, Any] = {"dtype": dtype, "kernels": kernels, "mesh": mesh, "is_cpu": devices.is_cpu}
    meshes: list[Any] = stage_meshes(mesh)
    speculation, path, fields = checkpoint.drafter
    drafter = make_drafter(speculation, checkpoint.fields, fields, context=checkpoint.max_model_len)
    if drafter is not None and mesh.shape.get(DATA, 1) > 1:
        raise ConfigError(
            f"speculative_config: drafters with weights split no tokens, but mesh has an axis {DATA!r} of "
            f"{mesh.shape[DATA]}: make it an axis 'tensor', or take the method ngram"
        )
    if drafter is not None and path is None:
        specs["drafter"] = drafter.specs()
    specs = choose_weights(config, checkpoint.path, checkpoint.fields, specs, **of_device)
    of_drafter = None if speculation is None else speculation.quantization
    if drafter is not None and (path is not None or of_drafter is not None):
        source = path or checkpoint.path, fields or checkpoint.fields
        own = dataclasses.replace(config, quantization=of_drafter)
        with naming("speculative_config"):
            specs["drafter"] = choose_weights(own, *source, drafter.specs(), **of_device)
    check_mesh(
        mesh,
        {axis for spec in jax.tree.leaves(specs) for axis in spec.axes},
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
    )
    spec = StepSpec(
        model=checkpoint.fields,
        dtype=str(dtype),
        kernels=kernels,
        block_size=config.block_size,
        max_model_len=checkpoint.max_model_len,
        max_num_seqs=devices.max_num_seqs,
        max_num_batched_tokens=devices.max_num_batched_tokens,
        traits=devices.traits,
        has_peers=kernels != "xla" and all(map(devices.reach_peers, meshes)),
        max_logprobs=config.max_logprobs,
        schemes=schemes_of(specs),
        kv_cache_dtype=config.kv_cache_dtype if config.kv_cache_dtype in KV_DTYPES else "auto",
        speculation=speculation
        and speculation.up_to(devices.max_drafting_tokens, step_tokens=devices.max_num_batched_tokens),
        drafter=fields,
        kv_scales=kv_scales_of(specs),
        num_kept_states=config.num_kept_states,
    )
    builder = StepBuilder(spec, mesh)
    if builder.model.has_kernels and logger.isEnabledFor(logging.INFO):  # it traces every size of a step
        for line in builder.describe_paths():
            logger.info("kernels of %s", line)
    warmup = config.warmup
    if config.scheduler == "static" and warmup == "background":
        warmup = "full"  # its batches are as large as the engine allows, from the first one on
    return ServingPlan(
        checkpoint=checkpoint,
        devices=devices,
        builder=builder,
        specs=specs,
        weights_seed=config.seed if config.load_format == "dummy" else None,
        tokenizer=config.tokenizer or checkpoint.path,
        kv_cache_memory=config.kv_cache_memory,
        gpu_memory_utilization=config.gpu_memory_utilization,
        warmup=warmup,
        scheduler=config.scheduler,
        scheduling_policy=config.scheduling_policy,
        enable_prefix_caching=config.enable_prefix_caching,
    )


def size(plan: ServingPlan) -> list[Sizing]:
    """Return what decides how many blocks the KV cache has: for each stage, of which the one with the least room
    decides.
    """
    return [_size(plan, model) for model in plan.builder.models]


def _size(plan: ServingPlan, model: StepModel) -> Sizing:
    devices = plan.devices
    weights = [shard_bytes(leaf) for leaf in jax.tree.leaves(model.params)]
    memory = plan.kv_cache_memory or (CPU_KV_CACHE_MEMORY if devices.is_cpu else None)
    if memory is not None and model.stage.count > 1:
        memory = memory * model.bytes_per_block // max(1, plan.builder.bytes_per_block)
    return Sizing(
        kv_cache_memory=memory,
        weight_bytes=sum(weights),
        trial_bytes=2 * max(weights) if plan.warmup == "none" else 0,
        num_shards=model.mesh.size,
        bytes_per_block=model.bytes_per_block,
        max_num_seqs=devices.max_num_seqs,
        max_model_len=plan.builder.spec.max_model_len,
        needs=BlockNeeds(
            windows=model.layout.windows, block_size=model.block_size, max_chunk=devices.max_num_batched_tokens
        ),
    )


def check_kernels(builder: StepBuilder) -> None:
    """Raise ConfigError if the model has a part without a kernel on devices with kernels."""
    with naming_unsupported():
        builder.check_kernels()


def fit_context(plan: ServingPlan, *, free: int) -> ServingPlan:
    """Return the plan with the longest context that `free` bytes of each device hold, at most the model's own."""
    checkpoint, builder = plan.checkpoint, plan.builder
    longest = min(sizing.longest_context(free, builder.expected_step_memory) for sizing in size(plan))
    if not 0 < longest < checkpoint.max_model_len:
        return plan
    logger.info("max_model_len is %d: memory does not hold the model's %d", longest, checkpoint.max_model_len)
    spec = msgspec.structs.replace(builder.spec, max_model_len=longest)
    return dataclasses.replace(
        plan,
        checkpoint=checkpoint._replace(max_model_len=longest),
        builder=StepBuilder(spec, plan.devices.mesh),
    )


def count_blocks(plan: ServingPlan, sizings: Sequence[Sizing], *, free: int) -> int:
    """Return the number of blocks, before anything is loaded. Raises OutOfMemory."""
    spec, step_memory = plan.builder.spec, plan.builder.expected_step_memory
    for sizing in sizings:
        sizing.check_weights(free, what=plan.checkpoint.path)
        sizing.check_steps(
            free, step_memory, max_num_seqs=spec.max_num_seqs, max_num_batched_tokens=spec.max_num_batched_tokens
        )
    return min(sizing.expected_blocks(free, step_memory) for sizing in sizings)


def begin_to_lower(
    builder: StepBuilder,
    num_blocks: int,
    warmup: WarmUp,
    *,
    folder: pathlib.Path | None,
    workers: Sequence[Worker],
    shipped: Shipped | None = None,
) -> Lowering:
    """Return what lowers steps. Where there are kernels, other processes begin with it while the weights load: it takes
    seconds a program. Without kernels they would take longer to start than this process to lower the first programs.
    Those of `shipped` are found there.
    """
    found = None if shipped is None else shipped.lowered
    if warmup == "none":
        return Lowering(builder, folder=None, num_workers=0, early=workers, shipped=found)
    folder = folder and folder / "steps"
    if not builder.model.has_kernels:
        return Lowering(builder, folder=folder, num_workers=0, early=workers, shipped=found)
    loaded = set() if shipped is None else shipped.executables
    programs = [program for program in programs_of(builder, warmup) if program not in loaded]
    lowering = Lowering(builder, folder=folder, max_workers=len(programs), early=workers, shipped=found)
    for program in programs:
        lowering.prepare(program, num_blocks)
    return lowering


def blocks_of_programs(shipped: Shipped, num_blocks: int) -> int:
    """Return the number of blocks that shipped programs are for. Raises ConfigError if memory holds `num_blocks` only,
    which are fewer.
    """
    if shipped.num_blocks > num_blocks:
        raise ConfigError(
            f"programs: they are for a KV cache of {shipped.num_blocks} blocks, but the device's memory holds "
            f"{num_blocks}: compile them with a lower --gpu-memory-utilization, or with --kv-cache-memory"
        )
    if shipped.num_blocks < num_blocks:
        logger.info("the KV cache has %d blocks, as the programs have, of %d", shipped.num_blocks, num_blocks)
    return shipped.num_blocks


def load_programs(runner: Runner, shipped: Shipped) -> None:
    """Load what was compiled ahead of time."""
    runner.set_num_blocks(shipped.num_blocks)
    logger.info("%d programs were loaded, not compiled", shipped.load_into(runner.steps))


def programs_of(builder: StepBuilder, warmup: WarmUp) -> list[Program]:
    """Return the programs that a warm-up waits for, those that take longest first."""
    return builder.first_programs() if warmup == "background" else builder.shapes.programs


@contextlib.contextmanager
def compiling_meanwhile(runner: Runner, lowering: Lowering, num_blocks: int, warmup: WarmUp) -> Iterator[None]:
    """Compile steps in a thread, to whose end it waits, where that takes none of the device's time and memory."""
    builder = runner.builder
    if warmup == "none" or not runner.model.has_kernels or any(map(builder.is_tuned, programs_of(builder, warmup))):
        yield
        return
    with concurrent.futures.ThreadPoolExecutor(1, "jaxserve-compiling") as pool:
        compiled = pool.submit(warm_up, runner, lowering, num_blocks, warmup, progress=False)
        try:
            yield
        except BaseException:
            runner.steps.stop()
            raise
        with naming_unsupported(), naming_out_of_memory("compiling the steps"):
            compiled.result()


def load(plan: ServingPlan, *, progress: bool) -> Params:
    """Load the weights, or make random ones."""
    dtype, mesh = plan.builder.model.dtype, plan.builder.mesh
    assert isinstance(mesh, Mesh)
    with naming_out_of_memory("the weights"):
        if plan.weights_seed is not None:
            return jax.block_until_ready(init_params(plan.specs, dtype=dtype, mesh=mesh, seed=plan.weights_seed))
        reading: dict[str, Any] = {"dtype": dtype, "mesh": mesh, "progress": progress}
        checkpoint = plan.checkpoint
        if checkpoint.drafter.path is None:
            return load_weights(checkpoint.path, plan.specs, **reading)
        own = {name: spec for name, spec in plan.specs.items() if name != "drafter"}
        return load_weights(checkpoint.path, own, **reading) | {
            "drafter": load_weights(checkpoint.drafter.path, plan.specs["drafter"], **reading)
        }


def make_matchers(plan: ServingPlan) -> Matchers:
    """Make the Matchers, which prepare themselves in a thread meanwhile."""
    matchers = Matchers(
        functools.partial(Tokenizer.load, plan.tokenizer),
        vocab_size=plan.checkpoint.model_config.vocab_size,
        eos_token_ids=plan.checkpoint.eos,
    )
    if plan.warmup != "none":
        matchers.warm_up()
    return matchers


def compile_steps(
    runner: Runner,
    lowering: Lowering,
    sizings: Sequence[Sizing],
    num_blocks: int,
    warmup: WarmUp,
    *,
    progress: bool,
) -> None:
    """Compile what the first requests need, unless that is done, for `num_blocks` blocks or, if steps need more memory
    than was expected, for fewer.
    """
    with naming_unsupported(), naming_out_of_memory("compiling the steps"):
        if not runner.steps.is_warm:  # else they were compiled meanwhile
            warm_up(runner, lowering, num_blocks, warmup, progress=progress)
        if sizings[0].is_measured:
            needed, free = runner.step_memory(), free_memory(runner.mesh)
            left = min(sizing.num_blocks(free, needed) for sizing in sizings)
            if left < num_blocks:
                logger.warning("steps take %.2f GiB, more than expected: compiling again", needed / 2**30)
                warm_up(runner, lowering, left, warmup, progress=progress)
        if warmup == "none" and runner.model.has_kernels:  # a warm-up finds it too
            runner.check_kernels()


def warm_up(runner: Runner, lowering: Lowering, num_blocks: int, warmup: WarmUp, *, progress: bool) -> None:
    """Compile steps for `num_blocks` blocks."""
    runner.set_num_blocks(num_blocks)
    if warmup != "none":
        done = runner.warm_up(only_first=warmup == "background", progress=progress)
        log_warm_up(done, lowering, has_kernels=runner.model.has_kernels)


def allocate(runner: Runner, devices: Devices, warmup: WarmUp) -> None:
    """Allocate the KV cache, and run the compiled programs if their first runs take longer."""
    flags = "--kv-cache-memory" if devices.is_cpu else "--kv-cache-memory or --gpu-memory-utilization"
    with naming_out_of_memory(f"the KV cache of {runner.num_blocks:,} blocks (lower {flags} for fewer)"):
        runner.allocate()
        if devices.traits.records_first_runs and warmup != "none":
            runner.run_empty_steps()


def compile_rest(runner: Runner, *, folder: pathlib.Path | None, shipped: Shipped | None = None) -> None:
    """Compile all other programs while the engine serves, lowered by processes of their own: lowering holds the GIL."""
    num_workers = None if runner.model.has_kernels else 1
    folder = folder and folder / "steps"
    found = None if shipped is None else shipped.lowered
    lowering = Lowering(runner.builder, folder=folder, num_workers=num_workers, is_background=True, shipped=found)
    here = Lowering(runner.builder, folder=folder, num_workers=0, is_background=True, shipped=found)
    runner.warm_up_rest(lowering, here, on_end=give_memory_back)


def make_scheduler_for(plan: ServingPlan, info: EngineInfo) -> Scheduler:
    """Make the scheduler for an engine of these sizes."""
    builder = plan.builder
    speculation = builder.spec.speculation
    drafts = NO_DRAFTS
    if speculation is not None:
        drafting = builder.model.drafting
        # What is accepted by chance has nothing to do with what is proposed.
        is_late = drafting is not None and (drafting.drafter is not None or bool(speculation.acceptance_rates))
        drafts = DraftPolicy(speculation.drafts_by_rows, plan.devices.token_cost, is_late=is_late)
    limits = SchedulerLimits(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_model_len=info.max_model_len,
        policy=plan.scheduling_policy,
        windows=builder.model.layout.windows,
        drafts=drafts,
        has_states=builder.model.layout.num_states > 0,
        num_stages=len(builder.models),
        num_kept_states=builder.model.num_kept_states,
    )
    return make_scheduler(
        plan.scheduler,
        limits,
        enable_prefix_caching=plan.enable_prefix_caching,
        model_domain=f"{info.model} {info.kv_dtype} {plan.weights_seed}".encode(),
    )


def meter(plan: ServingPlan, info: EngineInfo) -> BandwidthMeter:
    """Make what estimates how much of the memory's bandwidth steps use."""
    model = plan.builder.model
    return BandwidthMeter(
        weight_bytes=round(info.expected_weight_bytes(1)),
        bytes_per_position=plan.builder.bytes_per_block // model.block_size,
        peak=plan.devices.peak_bandwidth,
    )


@contextlib.contextmanager
def naming_unsupported() -> Iterator[None]:
    """Raise what a kernel cannot do as one line."""
    try:
        yield
    except NotImplementedError as error:
        raise ConfigError(f"no kernel for this model: {error}; ask for slow, plain XLA by --kernels xla") from error


@contextlib.contextmanager
def naming_out_of_memory(what: str) -> Iterator[None]:
    """Raise XLA's RESOURCE_EXHAUSTED as one line."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise OutOfMemory(f"{what} did not fit into the device's memory: {str(error).splitlines()[0]}") from error
