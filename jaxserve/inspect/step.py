"""What a step consists of: its programs with their kernels, collectives, memory and cost, and its roofline."""

import dataclasses
import functools
import itertools
import math
import statistics
import time
from typing import Any

import jax

from jaxserve.engine.client import EngineInfo
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.execution.programs.kinds import Program
from jaxserve.execution.programs.shapes import StepNeeds
from jaxserve.execution.runner import Runner
from jaxserve.inspect.collectives import Collective, find_collectives
from jaxserve.inspect.engine import engine_of, plans_passed_to, wait_until_warm
from jaxserve.inspect.picture import html_table, size
from jaxserve.inspect.roofline import Roofline, Speed
from jaxserve.layers.layouts import read_whole, shard_bytes
from jaxserve.layers.weight import Weight
from jaxserve.llm import LLM
from jaxserve.local_model import LocalModel
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.plan import StepPlan
from jaxserve.tables import aligned
from jaxserve.values import convert, rule

NUM_MEASURED = 24
"""Steps that a measurement takes the median of."""

_INTEGER = rule(int)
_SPEED = rule(Speed | None)
_PROGRAMS = ("program", "arguments", "of them updated in place", "temporary", "XLA counts", "reads and writes")
_COLLECTIVES = ("collective", "at", "count", "devices", "result", "sent by a device")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ProgramReport:
    """One compiled program of a step. Bytes are of a device.

    Attributes:
        name: its kind and its size in tokens or rows.
        compiled: jax's executable, for `as_text`, `cost_analysis` and `memory_analysis`.
        collectives: what devices send each other by XLA's collectives.
    """

    name: str
    compiled: jax.stages.Compiled
    collectives: tuple[Collective, ...]
    _builder: StepBuilder
    _program: Program
    _num_blocks: int

    @functools.cached_property
    def traced(self) -> jax.stages.Traced:
        """The program after tracing: `traced.jaxpr` is what jax saw of the Python code."""
        return self._builder.trace(self._program, self._num_blocks)

    @property
    def hlo(self) -> str:
        """The text of the compiled program."""
        return str(self.compiled.as_text())

    @property
    def flops(self) -> float:
        """Floating-point operations, as XLA counts them; those of our own kernels are not among them."""
        return float(self._cost.get("flops", 0.0))

    @property
    def bytes_accessed(self) -> float:
        """Bytes that its operations read and write, as XLA counts them: each operation for itself."""
        return float(self._cost.get("bytes accessed", 0.0))

    @property
    def argument_bytes(self) -> int:
        """Bytes of weights, KV cache, slots and the packed plan."""
        return self._memory.argument_size_in_bytes

    @property
    def donated_bytes(self) -> int:
        """Bytes of arguments that the program updates in place, such as the KV cache."""
        return self._memory.alias_size_in_bytes

    @property
    def temporary_bytes(self) -> int:
        """Bytes that the program needs while it runs."""
        return self._memory.temp_size_in_bytes

    @property
    def _cost(self) -> Any:
        return self.compiled.cost_analysis() or {}

    @property
    def _memory(self) -> Any:
        return self.compiled.memory_analysis()

    def __repr__(self) -> str:
        return aligned([_PROGRAMS, self.row()])

    def row(self) -> list[str]:
        """Return the cells of its row in a table."""
        sizes = map(size, (self.argument_bytes, self.donated_bytes, self.temporary_bytes))
        return [self.name, *sizes, f"{self.flops / 1e6:,.4g} MFLOP", size(self.bytes_accessed)]


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class StepReport:
    """A step of an engine.

    Attributes:
        title: what the step computes.
        programs: its compiled programs, in the order in which they run.
        paths: lines that say which kernels run in the engine's programs, and why no faster ones do.
        roofline: the least time of the step, and the measured one.
    """

    title: str
    programs: tuple[ProgramReport, ...]
    paths: tuple[str, ...]
    roofline: Roofline

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives of all programs."""
        return tuple(collective for program in self.programs for collective in program.collectives)

    @property
    def sent_bytes(self) -> float:
        """Bytes that a device sends to others by collectives in a step."""
        return sum(collective.count * collective.sent_bytes for collective in self.collectives)

    @property
    def hlo(self) -> str:
        """The text of the program with the layers."""
        return self.programs[0].hlo

    @property
    def jaxpr(self) -> Any:
        """The program with the layers as jax traced it."""
        return self.programs[0].traced.jaxpr

    def __repr__(self) -> str:
        parts = [self.title, aligned([_PROGRAMS, *(program.row() for program in self.programs)])]
        if self.collectives:
            parts.append(aligned([_COLLECTIVES, *self._collective_rows()]))
        return "\n\n".join([*parts, "\n".join(self.paths), repr(self.roofline)])

    def _repr_html_(self) -> str:
        collectives = html_table(_COLLECTIVES, self._collective_rows()) if self.collectives else "<p>no collectives</p>"
        paths = html_table(("kernels",), [[line] for line in self.paths])
        programs = html_table(_PROGRAMS, [program.row() for program in self.programs], title=self.title)
        return f"{programs}{collectives}{paths}{self.roofline._repr_html_()}"

    def _collective_rows(self) -> list[list[str]]:
        return [
            [each.kind, each.place, str(each.count), str(each.group_size), size(each.num_bytes), size(each.sent_bytes)]
            for each in self.collectives
        ]


def step(
    llm: LocalModel,
    *,
    rows: int = 1,
    tokens: int | None = None,
    context: int = 64,
    speed: Speed | None = None,
    measure: bool = False,
) -> StepReport:
    """Describe the step in which `rows` requests get their next token, each with `context` tokens before it.

    With `tokens` it is a step of so many tokens of prompts. `speed` is that of the device that the roofline is for, by
    default this one, which is measured. `measure` runs such requests, and takes the median time of a step: only for an
    LLM, and for steps of one token a row. What is compiled in the background is waited for, and a program that no
    request has needed yet is compiled.

    Raises InvalidRequest for numbers that the engine's steps do not have.
    """
    runner = engine_of(llm).runner
    if runner.num_stages > 1:
        raise ConfigError("pipeline_parallel_size: steps of one stage are described; bubble times stages")
    largest = runner.model.buckets[-1]
    speed = convert("speed", speed, _SPEED)
    num_tokens = rows if tokens is None else tokens
    limits = [("rows", rows, runner.model.max_num_seqs), ("tokens", num_tokens, largest.num_tokens)]
    if tokens is None:
        limits.append(("context", context, llm.info.max_model_len - (NUM_MEASURED if measure else 1)))
    elif measure:
        raise InvalidRequest("only steps of one token a row are measured, leave tokens out", param="measure")
    for name, value, limit in limits:
        if not 1 <= convert(name, value, _INTEGER) <= limit:
            raise InvalidRequest(f"{name} must be between 1 and {limit}, got {value}", param=name)
    wait_until_warm(llm)
    found = runner.builder.shapes.step_for(num_tokens, StepNeeds(is_decode_only=tokens is None))
    what = f"{rows} rows of {context} tokens before it" if tokens is None else f"{tokens} tokens of prompts"
    weight_bytes = _bytes_read(runner.model.params, llm.info, num_tokens)
    return StepReport(
        title=f"a step of {what} on {llm.info.device}",
        programs=tuple(_report(runner, program) for program in found.programs),
        paths=tuple(runner.builder.describe_paths()),
        roofline=Roofline(
            weight_bytes=weight_bytes,
            kv_bytes=0.0 if tokens is not None else rows * llm.info.kv_bytes_read(context) / runner.mesh.size,
            flops=2 * _products(runner.model.params, llm.info, num_tokens, rows) / runner.mesh.size,
            speed=speed or Speed.measure(runner.mesh.devices.flat[0], num_bytes=weight_bytes),
            measured=_measured(llm, rows=rows, context=context) if measure else None,
        ),
    )


def _report(runner: Runner, program: Program) -> ProgramReport:
    if program in runner.steps:
        compiled = runner.steps[program]
    else:
        options = program.compiler_options(runner.model)
        compiled = runner.builder.lower(program, runner.num_blocks).compile(options)
    return ProgramReport(
        name=f"{type(program).__name__} {program.size or ''}".rstrip(),
        compiled=compiled,
        collectives=tuple(find_collectives(str(compiled.as_text()))),
        _builder=runner.builder,
        _program=program,
        _num_blocks=runner.num_blocks,
    )


def _bytes_read(params: Any, info: EngineInfo, num_tokens: int) -> float:
    """Return the bytes of weights that a step reads on each device, if each token chooses its experts at random."""
    share_of_experts = 1 - (1 - info.expert_fraction) ** num_tokens
    leaves, _ = jax.tree.flatten_with_path(read_whole(params))
    return sum(shard_bytes(leaf) * (share_of_experts if _is_expert(path) else 1) for path, leaf in leaves)


def _products(params: Any, info: EngineInfo, num_tokens: int, num_logits: int) -> float:
    """Return how many products with weights a step computes, on all devices together."""
    head = params.get("lm_head", params["embed"])
    layers, _ = jax.tree.flatten_with_path(params["layers"], is_leaf=lambda leaf: isinstance(leaf, Weight))
    total = sum(
        math.prod(weight.shape) * (info.expert_fraction if _is_expert(path) else 1)
        for path, weight in layers
        if isinstance(weight, Weight)
    )
    return num_tokens * total + num_logits * math.prod(head.shape)


def _is_expert(path: Any) -> bool:
    return "['experts']" in jax.tree_util.keystr(path)


def _measured(llm: LocalModel, *, rows: int, context: int) -> float:
    """Return the median seconds of steps in which so many requests get a token each."""
    if not isinstance(llm, LLM):
        raise ConfigError("only steps of an LLM can be measured")
    prompts = [[2 + (row + position) % 97 for position in range(context)] for row in range(rows)]
    params = SamplingParams(temperature=0, max_tokens=NUM_MEASURED, ignore_eos=True)
    steps: list[tuple[float, bool]] = []

    def see(plan: StepPlan) -> None:
        steps.append((time.perf_counter(), len(plan.rows) == rows == plan.num_tokens))

    with plans_passed_to(see, engine_of(llm)):
        llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    times = [
        after - before for (before, is_first), (after, is_next) in itertools.pairwise(steps) if is_first and is_next
    ]
    if not times:
        raise InvalidRequest(f"the KV cache does not hold {rows} requests of {context} tokens at once", param="rows")
    return statistics.median(times)
