"""The kinds of programs, one class each: the function, its arguments and results, and arguments that change nothing.

Those that run layers are in `passes`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, override

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxserve.execution.batch import pack_nothing
from jaxserve.execution.kv_cache import copy_states
from jaxserve.execution.programs.kind import LEAF, LOGPROBS, Kind, OfBucket, drawn, no_admissions, no_results
from jaxserve.execution.programs.model import State, StepModel
from jaxserve.execution.programs.passes import Begin, Finish, Forward, PlainDecode, RunStage
from jaxserve.execution.slots import (
    ADMISSION_ROWS,
    NUM_KNOWN_TOKENS,
    Masks,
    Slots,
    admit,
    admit_extras,
    admit_tokens,
    allow,
    pack_masks,
)
from jaxserve.execution.step import DrawingRows, Drawn, draw, embed, prompt_logprobs, settle_states
from jaxserve.layers.batch import KVCache
from jaxserve.sampling.logprobs import Logprobs
from jaxserve.sampling.state import empty_extras


class Draw(Kind, frozen=True, tag=True):
    """`step.draw`, of rows that may need anything, or anything but log probabilities; of rows with `num_columns`, if
    that is not 0. `is_plain`: of rows that need no more than draws from filtered distributions.
    """

    takes: ClassVar[tuple[State, ...]] = ("slots",)
    gives: ClassVar[tuple[State, ...]] = ("slots",)

    num_rows: int
    has_logprobs: bool
    num_columns: int = 0
    is_plain: bool = False

    @property
    @override
    def title(self) -> str:
        return "draw with log probabilities" if self.has_logprobs else "draw"

    @property
    @override
    def size(self) -> int:
        return self.num_rows

    @override
    def function(self, model: StepModel) -> Callable[..., Any]:
        return functools.partial(
            draw,
            kernels=model.kernels,
            is_plain=self.is_plain,
            num_top_logprobs=model.num_top_logprobs if self.has_logprobs else None,
            has_tokens_on_host=model.traits.leaves_tokens_on_host,
            drafting=model.drafting,
        )

    @override
    def arguments(self, model: StepModel) -> tuple[Any, ...]:
        num_logits = self.num_rows * (self.num_columns or 1)
        logits = model.array((num_logits, model.vocab_size), jnp.float32)
        return logits, _drawing_rows(model, self.num_rows, self.num_columns)

    @override
    def made(self, model: StepModel) -> Drawn:
        return drawn(has_logprobs=self.has_logprobs)


class Settle(OfBucket, frozen=True, tag=True):
    """`step.settle_states`, behind a draw of rows that verify drafts."""

    takes: ClassVar[tuple[State, ...]] = ("kv_cache", "slots")
    gives: ClassVar[tuple[State, ...]] = ("kv_cache",)
    made = no_results

    @override
    def function(self, model: StepModel) -> Callable[..., Any]:
        def run(*arguments: Any) -> tuple[KVCache, None]:
            return settle_states(*arguments, kernels=model.kernels), None

        return run

    @override
    def arguments(self, model: StepModel) -> tuple[Any, ...]:
        rows = _drawing_rows(model, self.bucket.num_rows, self.bucket.num_columns)
        return rows, model.unsettled(self.bucket)

    @override
    def nothing(self, model: StepModel) -> tuple[Any, ...]:
        rows, unsettled = Kind.nothing(self, model)
        return dataclasses.replace(rows, slots=np.full_like(rows.slots, model.max_num_seqs)), unsettled


def _drawing_rows(model: StepModel, num_rows: int, num_columns: int) -> DrawingRows:
    """Return the shapes of what a forward pass says of its rows."""
    each = functools.partial(model.array, (num_rows,))
    rows = DrawingRows(
        slots=each(jnp.int32),
        draws=each(jnp.bool),
        num_output_tokens=each(jnp.int32),
        features=model.array((), jnp.int32),
    )
    if not num_columns:
        return rows
    drafts = model.array((num_rows, num_columns - 1), jnp.int32)
    return dataclasses.replace(rows, num_valid=each(jnp.int32), drafts=drafts)


class _OfHidden(OfBucket, frozen=True):
    @override
    def arguments(self, model: StepModel) -> tuple[Any, ...]:
        return model.hidden(self.bucket), model.packed(self.bucket)

    @override
    def nothing(self, model: StepModel) -> tuple[Any, ...]:
        hidden = model.hidden(self.bucket)
        return np.zeros(hidden.shape, hidden.dtype), pack_nothing(self.bucket, **model.table_sizes)


class PromptLogprobs(_OfHidden, frozen=True, tag=True):
    """Runs `step.prompt_logprobs`."""

    takes: ClassVar[tuple[State, ...]] = ("params",)
    gives: ClassVar[tuple[State, ...]] = ()

    @override
    def function(self, model: StepModel) -> Callable[..., Any]:
        static = {
            "family": model.family,
            "config": model.config,
            "bucket": self.bucket,
            "num_top": model.num_top_logprobs,
        }

        def of_prompts(*arguments: Any) -> tuple[Logprobs]:
            return (prompt_logprobs(*arguments, **static),)

        return of_prompts

    @override
    def made(self, model: StepModel) -> Logprobs:
        return LOGPROBS


class Embed(_OfHidden, frozen=True, tag=True):
    """Runs `step.embed`."""

    takes: ClassVar[tuple[State, ...]] = ("slots",)
    gives: ClassVar[tuple[State, ...]] = ("slots",)

    @override
    def function(self, model: StepModel) -> Callable[..., Any]:
        return functools.partial(embed, bucket=self.bucket)

    @override
    def made(self, model: StepModel) -> Any:
        return LEAF


class _CopiesState(Kind, frozen=True):
    made = no_results
    index: int = -1

    @property
    @override
    def stage(self) -> int:
        return self.index

    @override
    def arguments(self, model: StepModel) -> tuple[Any, ...]:
        return (model.array((2,), jnp.int32),)

    @override
    def nothing(self, model: StepModel) -> tuple[Any, ...]:
        return (np.full(2, -1, np.int32),)


class KeepState(_CopiesState, frozen=True, tag=True):
    """Copies what layers keep of a slot to a state of the prefix cache; takes both numbers, in this order."""

    takes: ClassVar[tuple[State, ...]] = ("kv_cache", "kept_states")
    gives: ClassVar[tuple[State, ...]] = ("kept_states",)

    @override
    def function(self, model: StepModel) -> Callable[..., Any]:
        def keep(kv_cache: KVCache, kept: Any, numbers: Int[Array, "2"]) -> tuple[Any, None]:
            slot, index = numbers
            return copy_states(kept, tuple(kv_cache.pools[i] for i in model.layout.pools_of_states), index, slot), None

        return keep


class ResumeState(_CopiesState, frozen=True, tag=True):
    """Copies a state of the prefix cache to a slot; takes the numbers of the slot and of the state."""

    takes: ClassVar[tuple[State, ...]] = ("kv_cache", "kept_states")
    gives: ClassVar[tuple[State, ...]] = ("kv_cache",)

    @override
    def function(self, model: StepModel) -> Callable[..., Any]:
        def resume(kv_cache: KVCache, kept: Any, numbers: Int[Array, "2"]) -> tuple[KVCache, None]:
            slot, index = numbers
            which = model.layout.pools_of_states
            copied = copy_states(tuple(kv_cache.pools[i] for i in which), kept, slot, index)
            pools = list(kv_cache.pools)
            for i, pool in zip(which, copied, strict=True):
                pools[i] = pool
            return dataclasses.replace(kv_cache, pools=tuple(pools)), None

        return resume


class _WritesSlots(Kind, frozen=True):
    takes: ClassVar[tuple[State, ...]] = ("slots",)
    gives: ClassVar[tuple[State, ...]] = ("slots",)
    made = no_results
    write: ClassVar[Callable[..., Slots]]
    """From slots and its own arguments to new slots."""

    @override
    def function(self, model: StepModel) -> Callable[..., Any]:
        def write_slots(slots: Slots, *arguments: Any) -> tuple[Slots, None]:
            return self.write(slots, *arguments), None

        return write_slots

    @override
    def arguments(self, model: StepModel) -> tuple[Any, ...]:
        return tuple(jax.tree.map(model.replicate, self.nothing(model)))


class Admit(_WritesSlots, frozen=True, tag=True):
    """Runs `slots.admit`: block tables and sampling parameters of new requests, in the slots of one stage."""

    write: ClassVar[Callable[..., Slots]] = staticmethod(admit)

    index: int = -1

    @property
    @override
    def stage(self) -> int:
        return self.index

    @override
    def nothing(self, model: StepModel) -> tuple[Any, ...]:
        return (no_admissions(model),)


class AdmitExtras(_WritesSlots, frozen=True, tag=True):
    """`slots.admit_extras`: what only processors need of one new request."""

    write: ClassVar[Callable[..., Slots]] = staticmethod(admit_extras)

    @override
    def nothing(self, model: StepModel) -> tuple[Any, ...]:
        return np.int32(model.max_num_seqs), jax.tree.map(np.zeros_like, empty_extras(model.vocab_size))


class AdmitTokens(_WritesSlots, frozen=True, tag=True):
    """Runs `slots.admit_tokens`: what a proposer must know of new requests."""

    @override
    def function(self, model: StepModel) -> Callable[..., Any]:
        assert model.drafting is not None
        admit = functools.partial(admit_tokens, proposer=model.drafting.proposer)

        def write_slots(slots: Slots, *arguments: Any) -> tuple[Slots, None]:
            return admit(slots, *arguments), None

        return write_slots

    @override
    def nothing(self, model: StepModel) -> tuple[Any, ...]:
        packed = np.zeros((ADMISSION_ROWS, 2 + NUM_KNOWN_TOKENS), np.int32)
        packed[:, 0] = model.max_num_seqs
        return (packed,)


class Allow(_WritesSlots, frozen=True, tag=True):
    """Runs `slots.allow`: masks of the tokens that `num_rows` rows may sample, in `num_columns`."""

    write: ClassVar[Callable[..., Slots]] = staticmethod(allow)

    num_rows: int
    num_columns: int = 1

    @property
    @override
    def size(self) -> int:
        return self.num_rows

    @override
    def nothing(self, model: StepModel) -> tuple[Any, ...]:
        words = np.zeros((0, self.num_columns, math.ceil(model.vocab_size / 32)), np.uint32)
        masks = Masks(np.zeros(0, np.int32), words, model.no_drafts(0))
        return (pack_masks(masks, num_rows=self.num_rows, num_slots=model.max_num_seqs),)


Program = (
    PlainDecode
    | Forward
    | RunStage
    | Begin
    | Finish
    | Draw
    | Settle
    | PromptLogprobs
    | Embed
    | KeepState
    | ResumeState
    | Admit
    | AdmitExtras
    | AdmitTokens
    | Allow
)
"""One compiled program: a function, its shapes and its static arguments."""
