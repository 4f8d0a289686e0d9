"""How much of a GPU that is not there an engine would take: the start of an engine up to its KV cache, with devices
that programs are compiled for, or at least traced.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import msgspec

from jaxserve.config import EngineConfig
from jaxserve.engine.checkpoint import read_checkpoint
from jaxserve.engine.client import EngineInfo
from jaxserve.engine.report import make_info
from jaxserve.engine.serving_plan import ServingPlan
from jaxserve.engine.sizing import GPU_MEMORY_RESERVE, Sizing
from jaxserve.engine.startup import count_blocks, fit_context, make_plan, size
from jaxserve.execution.programs.kinds import Program
from jaxserve.execution.programs.memory import memory_of, memory_of_step
from jaxserve.execution.programs.shapes import PLAIN_DECODE
from jaxserve.gpus import Gpu
from jaxserve.layers.layouts import shard_bytes
from jaxserve.planning.absent import absent_devices, usable_memory
from jaxserve.planning.work import Model
from jaxserve.scheduling.block_needs import BlockNeeds
from pallas_kernels.deviceless import DevicelessExecutable, compile_lowered
from pallas_kernels.jax_internals import ask_ptxas_once, name_kernels_by_content
from pallas_kernels.layout_inference import infer_layouts_faster


class Kernel(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel of our own in a program, as ptxas reports it."""

    name: str
    num_registers: int
    spill_bytes: int


class CompiledProgram(msgspec.Struct, frozen=True, kw_only=True):
    """What the compilers say of a program. Bytes are per device."""

    name: str
    temporary_bytes: int
    made_bytes: int
    """Results that take the place of no argument."""
    num_launches: int
    """Kernels, library calls and copies of a run."""
    kernels: tuple[Kernel, ...]
    """Those that no program before it has."""


class StageSizes(msgspec.Struct, frozen=True, kw_only=True):
    """What one of several stages holds. Bytes are per device."""

    first_layer: int
    num_layers: int
    weight_bytes: int
    kv_bytes: int


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of an engine. Bytes are per device, unless they say otherwise; of several stages, those with most."""

    memory_bytes: int
    """What the GPU has."""
    usable_bytes: int
    """The part of it that the engine may use."""
    weight_bytes: int
    step_bytes: int
    """What steps need besides weights and KV: slots, peers' rows, temporaries."""
    slot_bytes: int
    """Those of them for slots."""
    state_bytes: int
    """Those for the states that layers keep of requests, of all slots, and for cached ones."""
    peer_bytes: int
    """Those that other devices write into."""
    expected_step_bytes: int
    """`step_bytes` as the engine expects them before any program is compiled."""
    is_compiled: bool
    """True if `step_bytes` is what compiled programs need; otherwise it is what the engine expects."""
    reserve_bytes: int
    kv_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_bytes_per_token: int
    """In all layers, of a token that is in every window."""
    num_full_requests: int
    """Requests of `max_model_len` tokens that the KV cache holds at once."""
    programs: tuple[CompiledProgram, ...] = ()
    stages: tuple[StageSizes, ...] = ()
    """Each of several stages."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Absent:
    """An engine for GPUs that are not there, as far as it can be started.

    Attributes:
        free: bytes of each device that the engine may use.
    """

    plan: ServingPlan
    gpu: Gpu
    free: int

    @functools.cached_property
    def sizings(self) -> list[Sizing]:
        """What decides how many KV blocks there are, of each stage."""
        return size(self.plan)

    @property
    def sizing(self) -> Sizing:
        """That of the stage with the largest weights."""
        return max(self.sizings, key=lambda sizing: sizing.weight_bytes)

    @functools.cached_property
    def num_blocks(self) -> int:
        """KV blocks, as the engine counts them before it compiles. Raises OutOfMemory."""
        return count_blocks(self.plan, self.sizings, free=self.free)

    @functools.cached_property
    def model(self) -> Model:
        """The sizes of the model."""
        return Model.read(self.plan.checkpoint, self.plan.builder.model, self.plan.specs)

    @property
    def needs(self) -> BlockNeeds:
        """The blocks that requests need."""
        return self.sizing.needs

    def info(self, num_blocks: int) -> EngineInfo:
        """Return the sizes that an engine of so many blocks has."""
        return make_info(self.plan, num_blocks=num_blocks, needs=self.needs)


def declare(config: EngineConfig, gpu: Gpu, *, to_compile: bool) -> Absent:
    """Start an engine up to where it would load weights, of which none need be there. Raises StartupError."""
    options: dict[str, Any] = {"load_format": "dummy"}
    if config.kernels == "auto" and not gpu.has_kernels:
        options["kernels"] = "xla"  # what an engine chooses too, with a warning
    config = dataclasses.replace(config, **options)
    config, checkpoint = read_checkpoint(config, progress=False)
    plan = make_plan(config, checkpoint, absent_devices(config, gpu, to_compile=to_compile))
    free = usable_memory(config, gpu)
    if config.max_model_len == "auto":
        plan = fit_context(plan, free=free)
    return Absent(plan=plan, gpu=gpu, free=free)


def sizes_of(engine: Absent, *, compiled: Sequence[Program] = (), progress: Callable[[str], object] = str) -> Sizes:
    """Return what an engine takes. With `compiled` programs, those that decide about memory and the largest decode
    program are compiled too, and say how much steps need. Raises OutOfMemory if they do not fit.
    """
    builder, model = engine.plan.builder, engine.plan.builder.model
    sizing = engine.sizing
    found: dict[Program, DevicelessExecutable] = {}
    num_blocks, needed = engine.num_blocks, builder.expected_step_memory
    if compiled:
        prepare_compilers()
        step = builder.shapes.largest_step
        for program in dict.fromkeys([*step.programs, *compiled]):
            progress(name_of(program))
            found[program] = compile_program(engine, program)
        needed = max(
            memory_of_step({program: found[program].compiled for program in programs}, state_bytes=each.state_bytes)
            for each, programs in zip(
                builder.models, [*([program] for program in step.stages), step.of_last_stage], strict=True
            )
        )
        if sizing.is_measured:
            blocks = (each.num_blocks(engine.free - each.weight_bytes, needed) for each in engine.sizings)
            num_blocks = min(num_blocks, *blocks)
    info = engine.info(num_blocks)
    stages = tuple(
        StageSizes(
            first_layer=each.span.start,
            num_layers=len(each.span),
            weight_bytes=part.weight_bytes,
            kv_bytes=num_blocks * part.bytes_per_block // part.num_shards,
        )
        for each, part in zip(builder.models, engine.sizings, strict=True)
    )
    slots, peers = (sum(map(shard_bytes, jax.tree.leaves(part))) for part in (model.slots, model.peers))
    return Sizes(
        memory_bytes=engine.gpu.memory,
        usable_bytes=engine.free,
        weight_bytes=sizing.weight_bytes,
        step_bytes=needed,
        slot_bytes=slots,
        state_bytes=model.state_bytes - slots - peers,
        peer_bytes=peers,
        expected_step_bytes=builder.expected_step_memory,
        is_compiled=bool(compiled),
        reserve_bytes=GPU_MEMORY_RESERVE,
        kv_bytes=max(stage.kv_bytes for stage in stages),
        num_blocks=num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        kv_bytes_per_token=int(info.kv_bytes(1)),
        num_full_requests=info.num_full_requests,
        programs=tuple(_described(program, executable) for program, executable in found.items()),
        stages=stages if len(stages) > 1 else (),
    )


def decode_program(engine: Absent, num_rows: int) -> Program:
    """Return the program that runs a decode step of so many rows that need nothing special."""
    return engine.plan.builder.shapes.step_for(num_rows, PLAIN_DECODE).forward


def compile_program(engine: Absent, program: Program) -> DevicelessExecutable:
    """Compile one program as the engine would."""
    builder = engine.plan.builder
    return compile_lowered(
        lambda: builder.lower(program, engine.num_blocks), compiler_options=program.compiler_options(builder.model)
    )


def prepare_compilers() -> None:
    """Do what the processes do that lower an engine's steps."""
    name_kernels_by_content()
    ask_ptxas_once()
    infer_layouts_faster()


def name_of(program: Program) -> str:
    """Return how a program is named to people."""
    return f"{type(program).__name__} {program.size or ''}".rstrip()


def _described(program: Program, executable: DevicelessExecutable) -> CompiledProgram:
    memory = memory_of(executable.compiled)
    return CompiledProgram(
        name=name_of(program),
        temporary_bytes=memory.temporary,
        made_bytes=memory.made,
        num_launches=executable.num_launches,
        kernels=tuple(
            Kernel(name=kernel.name, num_registers=kernel.num_registers, spill_bytes=kernel.spill_bytes)
            for kernel in executable.kernels
        ),
    )
