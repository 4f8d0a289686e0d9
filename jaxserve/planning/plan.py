"""`jaxserve plan`: what a model takes of GPUs that are not there, how fast it will be, how to split it over them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import jax
import msgspec

from jaxserve.config import EngineConfig
from jaxserve.engine.checkpoint import Checkpoint, read_checkpoint
from jaxserve.engine.client import EngineInfo
from jaxserve.engine.startup import check_kernels
from jaxserve.errors import CheckpointError, ConfigError, OutOfMemory
from jaxserve.execution.programs.kinds import Program
from jaxserve.gpus import Gpu
from jaxserve.layers.layouts import schemes_of
from jaxserve.layers.stages import Stage
from jaxserve.planning.absent import can_compile
from jaxserve.planning.measured import MEASURED, Batches
from jaxserve.planning.sizes import Absent, Sizes, declare, decode_program, sizes_of
from jaxserve.planning.times import UNLIKE_ANY, Estimate, Kind, estimate_prefill, estimate_step
from jaxserve.planning.work import HOP_LATENCY, decode_work, num_prefill_steps, prefill_work
from jaxserve.scheduling.block_needs import BlockNeeds

type Compiling = Literal["few", "splits", "all", "none"]

NUM_DEVICES = (1, 2, 4, 8)
"""Numbers of devices over which a model is tried to be split."""

INPUT_LEN, OUTPUT_LEN = 1024, 256
"""Tokens of prompts and of answers, unless they are given."""

BATCHES = (1, 4, 16, 64, 256)
"""Numbers of requests at once for which a plan has times, besides the number that it chooses."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be served: requests of equal length, all there at once. Lengths of None are those of many chats, or
    parts of the model's context if that is short.
    """

    input_len: int | None = None
    output_len: int | None = None
    target_tpot: float | None = None
    """Most milliseconds from token to token."""

    def within(self, max_model_len: int) -> "SizedLoad":
        """Return the load of a model with this context."""
        return SizedLoad(
            input_len=self.input_len or min(INPUT_LEN, max(1, max_model_len // 2)),
            output_len=self.output_len or min(OUTPUT_LEN, max(1, max_model_len // 4)),
            target_tpot=self.target_tpot,
        )


class SizedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """A load of known lengths."""

    input_len: int
    output_len: int
    target_tpot: float | None = None
    """Most milliseconds from token to token."""


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Predicted times of `num_requests` requests at once, in milliseconds. Errors are relative."""

    num_requests: int
    step_ms: float
    step_error: float
    work_ms: float
    """Time of the step's reading, products and sums, one after the other."""
    factor: float
    """The step's time, relative to that of its work."""
    source: str
    ttft_ms: float
    """Time to the first token, of one prompt alone."""
    prefill_tokens_per_second: float
    output_tokens_per_second: float
    """Rate of such batches one after the other, prompts included."""
    error: float
    """That of tokens a second."""
    stage_ms: tuple[float, ...] = ()
    """The times of several stages for their part of the requests."""
    bubble: float = 0.0
    """Fraction of the time that stages wait for each other."""


class Split(msgspec.Struct, frozen=True, kw_only=True):
    """One way to use several devices: replicas, each of `pipeline_parallel_size` stages over `tensor_parallel_size` of
    them.
    """

    tensor_parallel_size: int
    pipeline_parallel_size: int
    enable_expert_parallel: bool
    replicas: int
    fits: bool
    why_not: str | None = None
    num_requests: int = 0
    """At once, in all replicas."""
    speed: Speed | None = None
    """Speed of one replica."""
    output_tokens_per_second: float = 0.0
    """Rate of all replicas."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The answer. Bytes are per device."""

    model: str
    device: str
    num_devices: int
    dtype: str
    kernels: str
    load: Load | SizedLoad
    """What was asked for; of a model that does not fit, perhaps without lengths."""
    fits: bool
    why_not: str | None = None
    sizes: Sizes | None = None
    how_sized: str = ""
    """Origin of the memory of steps: compiled programs, or a computation."""
    paths: tuple[str, ...] = ()
    num_requests: int = 0
    """Requests of this load that the KV cache holds at once, at most `max_num_seqs`."""
    speeds: tuple[Speed, ...] = ()
    chosen: Speed | None = None
    """For as many requests as the target allows."""
    splits: tuple[Split, ...] = ()
    """Ways to use the devices that there are, the fastest first."""


def make_plan(
    config: EngineConfig,
    gpu: Gpu,
    load: Load,
    *,
    name: str,
    compiling: Compiling = "few",
    num_devices: int = 8,
    progress: Callable[[str], object] = str,
) -> Plan:
    """Plan an engine on GPUs that are not there. Raises StartupError for a model that cannot run on them at all, and
    ConfigError for options that the model does not allow; one that does not fit is a plan that says so.
    """
    own: _Sized | OutOfMemory
    try:
        own = _size(config, gpu, load, compiling=compiling, progress=progress)
    except OutOfMemory as error:
        own = error
    ways = _ways(config, gpu, load, own, name=name, num_devices=num_devices, compiling=compiling, progress=progress)
    common = {
        "model": name,
        "device": gpu.kind,
        "num_devices": config.tensor_parallel_size * config.pipeline_parallel_size,
        "splits": tuple(sorted(ways, key=lambda way: (not way.fits, -way.output_tokens_per_second))),
    }
    if isinstance(own, OutOfMemory):
        why_not = _named(str(own), config, name)
        return Plan(**common, load=load, dtype=config.dtype, kernels=config.kernels, fits=False, why_not=why_not)
    engine, sized, sizes, num_requests = own
    info = engine.info(sizes.num_blocks)
    counts = sorted({count for count in BATCHES if count < num_requests} | {num_requests} - {0})
    speeds = tuple(speed_of(engine, info, sized, num_requests=count) for count in counts)
    chosen = choose(engine, info, sized, num_requests=num_requests)
    why_not = None
    if not num_requests:
        total = sized.input_len + sized.output_len
        why_not = f"no request of {total:,} tokens: the context has {sizes.max_model_len:,}"
    elif chosen is None:
        why_not = f"one request alone takes {speeds[0].step_ms:.2f} ms a token, the target is {load.target_tpot:g} ms"
    return Plan(
        **common,
        load=sized,
        dtype=str(engine.plan.builder.model.dtype),
        kernels=engine.plan.builder.model.kernels,
        fits=why_not is None,
        why_not=why_not,
        sizes=sizes,
        how_sized=_how_sized(sizes, gpu, compiling),
        paths=tuple(engine.plan.builder.describe_paths()) if engine.plan.builder.model.has_kernels else (),
        num_requests=num_requests,
        speeds=speeds,
        chosen=chosen,
    )


class _Sized(NamedTuple):
    """An engine, the load in its context, what it takes, and how many requests of the load it holds at once."""

    engine: Absent
    load: SizedLoad
    sizes: Sizes
    num_requests: int


def _size(
    config: EngineConfig, gpu: Gpu, load: Load, *, compiling: Compiling, progress: Callable[[str], object]
) -> _Sized:
    """Size an engine. Raises StartupError, OutOfMemory if it does not fit among others."""
    to_compile = compiling != "none" and can_compile()
    engine = declare(config, gpu, to_compile=to_compile)
    check_kernels(engine.plan.builder)
    sized = load.within(engine.plan.checkpoint.max_model_len)
    programs: Sequence[Program] = ()
    if to_compile:
        rows = max(1, requests_at_once(engine, sized, engine.num_blocks))
        programs = engine.plan.builder.shapes.programs if compiling == "all" else [decode_program(engine, rows)]
    sizes = sizes_of(engine, compiled=programs, progress=progress)
    return _Sized(engine, sized, sizes, requests_at_once(engine, sized, sizes.num_blocks))


def requests_at_once(engine: Absent, load: SizedLoad, num_blocks: int) -> int:
    """Return how many requests of the load run at once in a KV cache of so many blocks."""
    total = load.input_len + load.output_len
    if total > engine.plan.checkpoint.max_model_len:
        return 0
    needs: BlockNeeds = engine.needs
    return min(needs.num_requests(num_blocks, num_tokens=total), engine.plan.builder.spec.max_num_seqs)


def choose(engine: Absent, info: EngineInfo, load: SizedLoad, *, num_requests: int) -> Speed | None:
    """Return the speed of the most requests, up to `num_requests`, whose steps take no longer than the target."""
    speeds: dict[int, Speed] = {}

    def meets(count: int) -> bool:
        speeds[count] = speed_of(engine, info, load, num_requests=count)
        return load.target_tpot is None or speeds[count].step_ms <= load.target_tpot

    least, most = 0, num_requests  # `least` meets the target
    while least < most:
        count = most if most == num_requests and most not in speeds else (least + most + 1) // 2
        least, most = (count, most) if meets(count) else (least, count - 1)
    return speeds.get(least)


def speed_of(
    engine: Absent,
    info: EngineInfo,
    load: SizedLoad,
    *,
    num_requests: int,
    measured: tuple[Batches, ...] = MEASURED,
) -> Speed:
    """Predict the times of so many requests at once from measured runs."""
    num_stages = engine.plan.builder.model.stage.count
    num_parts = min(num_stages, num_requests)
    rows = -(-num_requests // num_parts)
    steps = _stage_times(engine, info, load, num_rows=rows, measured=measured)
    hops = 0.0 if num_stages == 1 else num_stages * _hop_seconds(engine, rows)
    step, work = (
        max(sum(times) + hops, num_parts * max(times))
        for times in ([each.seconds for each in steps], [each.work for each in steps])
    )
    slowest = max(steps, key=lambda each: each.seconds)
    alone, together = (_prefill(engine, info, load, num_rows=count, measured=measured) for count in (1, num_requests))
    decoding = (load.output_len - 1) * step
    seconds = together.seconds + decoding
    error = (together.error * together.seconds + slowest.error * decoding) / seconds
    working = num_parts * sum(each.seconds for each in steps) / (num_stages * step)
    return Speed(
        num_requests=num_requests,
        step_ms=step * 1e3,
        step_error=slowest.error,
        work_ms=work * 1e3,
        factor=step / work,
        source=slowest.source,
        ttft_ms=alone.seconds * 1e3,
        prefill_tokens_per_second=num_requests * load.input_len / together.seconds,
        output_tokens_per_second=num_requests * load.output_len / seconds,
        error=error,
        stage_ms=tuple(each.seconds * 1e3 for each in steps) if num_stages > 1 else (),
        bubble=1 - working if num_stages > 1 else 0.0,
    )


def _stage_times(
    engine: Absent, info: EngineInfo, load: SizedLoad, *, num_rows: int, measured: tuple[Batches, ...]
) -> list[Estimate]:
    """Return the time of each stage for a decode step of so many rows."""
    context = load.input_len + load.output_len / 2
    found = []
    for kind, stage, num_devices in stages_of(engine):
        work = decode_work(engine.model, info, num_rows=num_rows, context=context, stage=stage)
        seconds = work.seconds(engine.gpu, num_devices=num_devices)
        found.append(estimate_step(kind, seconds, num_rows=num_rows, measured=measured))
    return found


def _prefill(
    engine: Absent, info: EngineInfo, load: SizedLoad, *, num_rows: int, measured: tuple[Batches, ...]
) -> Estimate:
    """Return the time of so many prompts, whose chunks follow each other through the stages."""
    num_tokens = num_rows * load.input_len
    found = []
    for kind, stage, num_devices in stages_of(engine):
        work = prefill_work(engine.model, info, num_rows=num_rows, length=load.input_len, stage=stage)
        seconds = work.seconds(engine.gpu, num_devices=num_devices)
        found.append(estimate_prefill(kind, seconds, num_tokens=num_tokens, measured=measured))
    slowest, num_steps = max(each.seconds for each in found), num_prefill_steps(info, num_tokens)
    seconds = (sum(each.seconds for each in found) + (num_steps - 1) * slowest) / num_steps
    error = found[-1].error if len(found) == 1 else max(found[-1].error, UNLIKE_ANY)
    return found[-1]._replace(seconds=seconds, error=error)


def _hop_seconds(engine: Absent, num_rows: int) -> float:
    """Return the time in which the residual stream of so many rows passes from stage to stage."""
    model = engine.model
    return HOP_LATENCY + num_rows * model.hidden_size * model.itemsize / engine.gpu.peer_bandwidth


def stages_of(engine: Absent) -> Iterator[tuple[Kind, Stage, int]]:
    """Yield the stages, the kind of steps that each of them has, and on how many devices."""
    codes = {scheme.codes for scheme in schemes_of(engine.plan.specs).values()}
    for model in engine.plan.builder.models:
        kind = Kind(
            model_type=engine.plan.checkpoint.fields["model_type"],
            weights=_weights(codes),
            num_devices=model.mesh.size,
            kernels=model.kernels,
            has_experts=_has_experts(engine.plan.checkpoint),
            num_layers=len(model.span),
            has_states=model.layout.num_states > 0,
            num_stages=model.stage.count,
            is_unlike_any="expert" in model.mesh.axis_names
            or model.kv_dtype != model.dtype
            or model.drafting is not None,
        )
        yield kind, model.stage, model.mesh.size


def _weights(codes: set[str]) -> str:
    """Return how measured runs name weights that are held as such codes."""
    if not codes:
        return "16 bits"
    return next(iter(codes)) if len(codes) == 1 else "+".join(sorted(codes))


def _ways(
    config: EngineConfig,
    gpu: Gpu,
    load: Load,
    own: _Sized | OutOfMemory,
    *,
    name: str,
    num_devices: int,
    compiling: Compiling,
    progress: Callable[[str], object],
) -> Iterator[Split]:
    """Yield the ways to use `num_devices` devices, of which `own` is the one that `config` says. Of others with stages
    or whole experts on each device there are those that fit.
    """
    _, checkpoint = read_checkpoint(dataclasses.replace(config, load_format="dummy"), progress=False)
    for stages, size in itertools.product(NUM_DEVICES, NUM_DEVICES):
        if stages * size > num_devices:
            continue
        is_own = (stages, size) == (config.pipeline_parallel_size, config.tensor_parallel_size)
        choices = {False, True} if size > 1 and _has_experts(checkpoint) else {is_own and config.enable_expert_parallel}
        for has_whole_experts in sorted(choices):
            way = dataclasses.replace(
                config,
                tensor_parallel_size=size,
                pipeline_parallel_size=stages,
                enable_expert_parallel=has_whole_experts,
            )
            found: _Sized | Exception = own
            if way != config:
                try:
                    programs: Compiling = "few" if compiling == "splits" else "none"
                    found = _size(way, gpu, load, compiling=programs, progress=progress)
                except (OutOfMemory, ConfigError, CheckpointError) as error:
                    found = error
            split = _split(way, found, name=name, replicas=num_devices // (stages * size))
            if split.fits or (stages == 1 and not has_whole_experts) or way == config:
                yield split


def _has_experts(checkpoint: Checkpoint) -> bool:
    return getattr(checkpoint.model_config, "routing", None) is not None


def _split(config: EngineConfig, found: _Sized | Exception, *, name: str, replicas: int) -> Split:
    """Return what replicas of an engine would do."""

    def split(*, fits: bool, why_not: str | None = None) -> Split:
        return Split(
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
            enable_expert_parallel=config.enable_expert_parallel,
            replicas=replicas,
            fits=fits,
            why_not=why_not,
        )

    if isinstance(found, Exception):
        return split(fits=False, why_not=_named(str(found), config, name))
    engine, load, sizes, num_requests = found
    speed = choose(engine, engine.info(sizes.num_blocks), load, num_requests=num_requests)
    if speed is None:
        return split(fits=False, why_not="the target is not met" if num_requests else "no request of this length fits")
    return msgspec.structs.replace(
        split(fits=True),
        num_requests=replicas * speed.num_requests,
        speed=speed,
        output_tokens_per_second=replicas * speed.output_tokens_per_second,
    )


def _named(message: str, config: EngineConfig, name: str) -> str:
    """Return what an error says, of a model by its name: that of a shape is in a folder of the moment."""
    return message.replace(config.model, name)


def _how_sized(sizes: Sizes, gpu: Gpu, compiling: Compiling) -> str:
    if sizes.is_compiled:
        return f"as {len(sizes.programs)} programs need it that were compiled for an absent {gpu.kind} by XLA"
    if compiling == "none":
        return "computed, as an engine expects it before it compiles"
    version = jax.__version__
    return (
        "computed, as an engine expects it before it compiles: jax's CUDA plugin, which compiles for absent GPUs, "
        f"is not installed (pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}; no GPU or "
        "driver is needed)"
    )
