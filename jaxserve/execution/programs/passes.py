"""The kinds of programs that run layers: decode steps, forward passes and the halves of one."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, override

import jax
import numpy as np

from jaxserve.execution import step
from jaxserve.execution.batch import pack_nothing
from jaxserve.execution.programs.kind import LEAF, ROWS, ROWS_WITH_DRAFTS, Kind, OfBucket, drawn, no_admissions
from jaxserve.execution.programs.model import State, StepModel
from jaxserve.execution.step import Begun, Drawn, Forwarded, Pass, Reading
from jaxserve.layers.batch import Launch
from jaxserve.layers.launch import spans_of_programs

CUBLAS_TOKENS = 128
"""Number of tokens from which on matrix products are left to cuBLAS with its own choice of algorithm. Otherwise XLA
also generates kernels and tries out all, which takes seconds, and with this many rows finds nothing better.
"""

NOWHERE = 2**30
"""Position behind the end of every pool, and of all slots: `engine.sizing` makes no pool larger."""


class _WithLayers(OfBucket, frozen=True):
    takes: ClassVar[tuple[State, ...]] = ("params", "kv_cache", "slots", "peers")
    gives: ClassVar[tuple[State, ...]] = ("kv_cache", "slots")

    @override
    def compiler_options(self, model: StepModel) -> dict[str, Any]:
        return super().compiler_options(model) if self.bucket.num_tokens >= CUBLAS_TOKENS else {}

    def reading(self, model: StepModel, *, is_decode_only: bool, launch: Launch = "at once") -> Reading:
        """Return how the program reads plans."""
        return Reading(self.bucket, model.layout.group_of_layer, model.kernels, is_decode_only, launch)

    def carries_admissions(self, model: StepModel) -> bool:  # noqa: ARG002
        """Return true if the program also admits requests, up to ADMISSIONROWS."""
        return False

    def given(self, model: StepModel) -> Any:
        """Return the shape of what the program is given of other stages; None: nothing."""
        return None if model.stage.is_first else model.hidden(self.bucket)

    @override
    def arguments(self, model: StepModel) -> tuple[Any, ...]:
        packed, given = model.packed(self.bucket), self.given(model)
        if not self.carries_admissions(model):
            return packed, given
        return packed, given, model.replicate(no_admissions(model))

    @override
    def nothing(self, model: StepModel) -> tuple[Any, ...]:
        packed = pack_nothing(self.bucket, **model.table_sizes)
        given = self.given(model)
        given = None if given is None else np.zeros(given.shape, given.dtype)
        return (packed, given, no_admissions(model)) if self.carries_admissions(model) else (packed, given)


class PlainDecode(_WithLayers, frozen=True, tag=True):
    """`step.step`: each row has one token, and drafts if the bucket has columns for them, and needs no more than draws
    from filtered distributions.
    """

    @property
    def is_decode_only(self) -> bool:
        """True if rows have no columns for drafts."""
        return not self.bucket.num_columns

    @override
    def function(self, model: StepModel) -> Callable[..., Any]:
        reading = self.reading(model, is_decode_only=self.is_decode_only)
        of = Pass(model.family, model.config, reading, model.span, model.drafting)
        return functools.partial(step.step, of=of, has_tokens_on_host=model.traits.leaves_tokens_on_host)

    @override
    def made(self, model: StepModel) -> Drawn:
        return drawn(has_logprobs=False)


class Forward(_WithLayers, frozen=True, tag=True):
    """`step.forward`, of rows that may need anything; `is_decode_only`: each has one token. If the bucket has columns,
    each has as many.
    """

    is_decode_only: bool

    @property
    @override
    def title(self) -> str:
        return "forward of decode rows" if self.is_decode_only else "forward"

    @override
    def carries_admissions(self, model: StepModel) -> bool:
        return model.traits.admits_in_forward and not self.is_decode_only and not self.bucket.num_columns

    @override
    def function(self, model: StepModel) -> Callable[..., Any]:
        # In parts, since others wait for it: steps of prompts, and those that draw by a program of their own.
        launch = "in parts" if model.has_kernels else "at once"
        reading = self.reading(model, is_decode_only=self.is_decode_only, launch=launch)
        return functools.partial(step.forward, of=Pass(model.family, model.config, reading, model.span, model.drafting))

    @override
    def made(self, model: StepModel) -> Forwarded:
        has_columns = self.bucket.num_columns > 0
        hidden = None if self.is_decode_only or has_columns else LEAF
        unsettled = jax.tree.map(lambda _: LEAF, model.unsettled(self.bucket))
        return Forwarded(LEAF, ROWS_WITH_DRAFTS if has_columns else ROWS, hidden, unsettled)


class RunStage(_WithLayers, frozen=True, tag=True):
    """`step.run_stage`: the layers of a stage before the last one, for rows as `Forward` or `PlainDecode` have them."""

    index: int
    is_decode_only: bool

    @property
    @override
    def stage(self) -> int:
        return self.index

    @override
    def carries_admissions(self, model: StepModel) -> bool:
        return model.traits.admits_in_forward and not self.is_decode_only

    @override
    def given(self, model: StepModel) -> Any:
        return model.slots.last_tokens if model.stage.is_first else super().given(model)

    @override
    def function(self, model: StepModel) -> Callable[..., Any]:
        reading = self.reading(model, is_decode_only=self.is_decode_only)
        return functools.partial(step.run_stage, of=Pass(model.family, model.config, reading, model.span))

    @override
    def made(self, model: StepModel) -> Any:
        return LEAF


class _SomeLayers(_WithLayers, frozen=True):
    """A program of some layers, which takes their weights and pools only."""

    @abc.abstractmethod
    def span(self, model: StepModel) -> range:
        """Return which layers."""

    @override
    def part(self, model: StepModel, name: State, whole: Any) -> Any:
        span = self.span(model)
        if name == "params":
            return whole | {"layers": _only(span, whole["layers"])}
        return dataclasses.replace(whole, pools=_only(span, whole.pools)) if name == "kv_cache" else whole

    @override
    def put(self, name: State, whole: Any, part: Any) -> Any:
        if name != "kv_cache":
            return part
        pools = zip(whole.pools, part.pools, strict=True)
        return dataclasses.replace(part, pools=tuple(old if new is None else new for old, new in pools))


class Begin(_SomeLayers, frozen=True, tag=True):
    """`step.begin`: the first of two programs of a forward pass in which rows may have several tokens."""

    @override
    def carries_admissions(self, model: StepModel) -> bool:
        return model.traits.admits_in_forward

    @override
    def span(self, model: StepModel) -> range:
        return spans_of_programs(model.config.num_layers)[0]

    @override
    def function(self, model: StepModel) -> Callable[..., Any]:
        reading = self.reading(model, is_decode_only=False, launch="in programs")
        return functools.partial(step.begin, of=Pass(model.family, model.config, reading, self.span(model)))

    @override
    def made(self, model: StepModel) -> Begun:
        return _begun(self, model)


class Finish(_SomeLayers, frozen=True, tag=True):
    """`step.finish`: the second of them, which takes what the first has made."""

    takes: ClassVar[tuple[State, ...]] = ("params", "kv_cache", "peers")
    gives: ClassVar[tuple[State, ...]] = ("kv_cache",)

    @override
    def span(self, model: StepModel) -> range:
        return spans_of_programs(model.config.num_layers)[1]

    @override
    def function(self, model: StepModel) -> Callable[..., Any]:
        return functools.partial(step.finish, family=model.family, config=model.config, span=self.span(model))

    @override
    def arguments(self, model: StepModel) -> tuple[Any, ...]:
        return (_begun(self, model),)

    @override
    def made(self, model: StepModel) -> Forwarded:
        return Forwarded(logits=LEAF, rows=ROWS, hidden=LEAF)

    @override
    def nothing(self, model: StepModel) -> tuple[Any, ...]:
        [begun] = Kind.nothing(self, model)
        nowhere = NOWHERE + np.arange(self.bucket.num_tokens, dtype=np.int32)
        slots = np.full(self.bucket.num_rows, NOWHERE, np.int32)
        return (dataclasses.replace(begun, batch=dataclasses.replace(begun.batch, write_index=nowhere, slots=slots)),)


def _begun(program: _WithLayers, model: StepModel) -> Begun:
    """Return the shapes of what the first program of a forward pass leaves for the second."""
    reading = program.reading(model, is_decode_only=False, launch="in programs")
    read = functools.partial(step.read_plan, reading=reading, block_size=model.block_size, num_blocks=1)
    _, batch, rows = jax.eval_shape(read, model.slots, model.packed(program.bucket))
    return Begun(model.hidden(program.bucket), *jax.tree.map(model.replicate, (batch, rows)))


def _only(span: range, of_layers: Sequence[Any]) -> tuple[Any, ...]:
    """Return an entry a layer, None for those that are not in the span."""
    return tuple(entry if index in span else None for index, entry in enumerate(of_layers))
