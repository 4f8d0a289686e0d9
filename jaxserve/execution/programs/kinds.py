"""The kinds of programs, one class each: the function, its arguments and results, and arguments that change nothing.

An instance is plain data that identifies a program among those of one model: it is sent to the processes that lower
programs, and is part of the keys of what is kept on disk.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, override

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxserve.execution.batch import Bucket, pack_nothing
from jaxserve.execution.programs.model import State, StepModel
from jaxserve.execution.slots import Masks, Slots, admit, admit_extras, allow, pack_admissions, pack_masks
from jaxserve.execution.step import (
    Begun,
    DrawingRows,
    Drawn,
    Forwarded,
    begin,
    draw,
    embed,
    finish,
    forward,
    prompt_logprobs,
    read_plan,
    step,
)
from jaxserve.layers.batch import Launch
from jaxserve.layers.launch import spans_of_programs
from jaxserve.sampling.logprobs import Logprobs

CUBLAS_TOKENS = 128
"""Number of tokens from which on matrix products are left to cuBLAS with its own choice of algorithm. Otherwise XLA
also generates kernels and tries out all, which takes seconds, and with this many rows finds nothing better.
"""

NOWHERE = 2**30
"""Position behind the end of every pool, and of all slots: `engine.sizing` makes no pool larger."""

_LEAF: Any = 0
"""Takes the place of an array where only the structure of a tree matters."""

_ROWS = DrawingRows(slots=_LEAF, draws=_LEAF, num_output_tokens=_LEAF, features=_LEAF)
_LOGPROBS = Logprobs(*[_LEAF] * len(Logprobs._fields))


class Kind(msgspec.Struct, frozen=True, tag=True):
    """What every kind of program defines.

    Attributes:
        takes: the parts of the device's state that a program takes, in this order, before its own arguments.
        gives: the parts that the program replaces, and returns before its other results; they are donated to it.
    """

    takes: ClassVar[tuple[State, ...]]
    gives: ClassVar[tuple[State, ...]]

    def function(self, model: StepModel) -> Callable[..., Any]:
        """Return the function to trace: it maps the state and the program's own arguments to a tuple of state and
        results.
        """
        raise NotImplementedError

    def part(self, model: StepModel, name: State, whole: Any) -> Any:  # noqa: ARG002
        """Return the part of a state that the program takes."""
        return whole

    def put(self, name: State, whole: Any, part: Any) -> Any:  # noqa: ARG002
        """Return the state with what the program has made of its part."""
        return part

    def arguments(self, model: StepModel) -> tuple[Any, ...]:
        """Return the shapes of the program's own arguments."""
        raise NotImplementedError

    def made(self, model: StepModel) -> Any:
        """Return a tree with the structure of the results besides the state."""
        raise NotImplementedError

    def nothing(self, model: StepModel) -> tuple[Any, ...]:
        """Return values of the program's own arguments with which it changes nothing: no row samples or has any
        tokens.
        """
        return tuple(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), self.arguments(model)))

    def compiler_options(self, model: StepModel) -> dict[str, Any]:
        """Return XLA's options. Few steps run a program with a matrix product that has no layers."""
        return _LEFT_TO_CUBLAS if model.has_kernels else {}

    def is_tuned(self, model: StepModel) -> bool:
        """Return true if XLA tries out matrix products on the device while it compiles the program."""
        return model.traits.tries_out_matmuls and not self.compiler_options(model)

    @property
    def size(self) -> int:
        """Number of tokens or rows that the program is for."""
        return 0


_LEFT_TO_CUBLAS = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}


class _WithLayers(Kind, frozen=True):
    takes: ClassVar[tuple[State, ...]] = ("params", "kv_cache", "slots", "peers")
    gives: ClassVar[tuple[State, ...]] = ("kv_cache", "slots")

    bucket: Bucket

    @property
    @override
    def size(self) -> int:
        return self.bucket.num_tokens

    @override
    def compiler_options(self, model: StepModel) -> dict[str, Any]:
        return super().compiler_options(model) if self.bucket.num_tokens >= CUBLAS_TOKENS else {}

    def carries_admissions(self, model: StepModel) -> bool:  # noqa: ARG002
        """Return true if the program also admits requests, up to ADMISSION_ROWS."""
        return False

    @override
    def arguments(self, model: StepModel) -> tuple[Any, ...]:
        packed = model.packed(self.bucket)
        return (packed, model.replicate(_no_admissions(model))) if self.carries_admissions(model) else (packed,)

    @override
    def nothing(self, model: StepModel) -> tuple[Any, ...]:
        packed = pack_nothing(self.bucket, **model.table_sizes)
        return (packed, _no_admissions(model)) if self.carries_admissions(model) else (packed,)


class PlainDecode(_WithLayers, frozen=True, tag=True):
    """`step.step`: each row has one token, and needs no more than a draw from a filtered distribution."""

    @override
    def function(self, model: StepModel) -> Callable[..., Any]:
        return functools.partial(
            step,
            family=model.family,
            config=model.config,
            kernels=model.kernels,
            group_of_layer=model.layout.group_of_layer,
            bucket=self.bucket,
            has_tokens_on_host=model.traits.leaves_tokens_on_host,
        )

    @override
    def made(self, model: StepModel) -> Drawn:
        return _drawn(has_logprobs=False)


class Forward(_WithLayers, frozen=True, tag=True):
    """`step.forward`, of rows that may need anything; `is_decode_only`: each has one token."""

    is_decode_only: bool

    @override
    def carries_admissions(self, model: StepModel) -> bool:
        return model.traits.admits_in_forward and not self.is_decode_only

    @override
    def function(self, model: StepModel) -> Callable[..., Any]:
        # In parts, since others wait for it: steps of prompts, and those that draw by a program of their own.
        launch = "in parts" if model.has_kernels else "at once"
        return functools.partial(
            forward,
            family=model.family,
            config=model.config,
            **_of_plan(model, self.bucket, is_decode_only=self.is_decode_only, launch=launch),
        )

    @override
    def made(self, model: StepModel) -> Forwarded:
        return Forwarded(logits=_LEAF, rows=_ROWS, hidden=None if self.is_decode_only else _LEAF)


class _SomeLayers(_WithLayers, frozen=True):
    """A program of some layers, which takes their weights and pools only."""

    def span(self, model: StepModel) -> range:
        """Return which layers."""
        raise NotImplementedError

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
        return dataclasses.replace(whole, pools=tuple(old if new is None else new for old, new in pools))


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
        return functools.partial(
            begin,
            family=model.family,
            config=model.config,
            span=self.span(model),
            **_of_plan(model, self.bucket, is_decode_only=False, launch="in programs"),
        )

    @override
    def made(self, model: StepModel) -> Begun:
        return _begun(model, self.bucket)


class Finish(_SomeLayers, frozen=True, tag=True):
    """`step.finish`: the second of them, which takes what the first has made."""

    takes: ClassVar[tuple[State, ...]] = ("params", "kv_cache", "peers")
    gives: ClassVar[tuple[State, ...]] = ("kv_cache",)

    @override
    def span(self, model: StepModel) -> range:
        return spans_of_programs(model.config.num_layers)[1]

    @override
    def function(self, model: StepModel) -> Callable[..., Any]:
        return functools.partial(finish, family=model.family, config=model.config, span=self.span(model))

    @override
    def arguments(self, model: StepModel) -> tuple[Any, ...]:
        return (_begun(model, self.bucket),)

    @override
    def made(self, model: StepModel) -> Forwarded:
        return Forwarded(logits=_LEAF, rows=_ROWS, hidden=_LEAF)

    @override
    def nothing(self, model: StepModel) -> tuple[Any, ...]:
        [begun] = Kind.nothing(self, model)
        nowhere = NOWHERE + np.arange(self.bucket.num_tokens, dtype=np.int32)
        slots = np.full(self.bucket.num_rows, NOWHERE, np.int32)
        return (dataclasses.replace(begun, batch=dataclasses.replace(begun.batch, write_index=nowhere, slots=slots)),)


class Draw(Kind, frozen=True, tag=True):
    """`step.draw`, of rows that may need anything, or anything but log probabilities."""

    takes: ClassVar[tuple[State, ...]] = ("slots",)
    gives: ClassVar[tuple[State, ...]] = ("slots",)

    num_rows: int
    has_logprobs: bool

    @property
    @override
    def size(self) -> int:
        return self.num_rows

    @override
    def function(self, model: StepModel) -> Callable[..., Any]:
        return functools.partial(
            draw,
            kernels=model.kernels,
            is_plain=False,
            num_top_logprobs=model.num_top_logprobs if self.has_logprobs else None,
            has_tokens_on_host=model.traits.leaves_tokens_on_host,
        )

    @override
    def arguments(self, model: StepModel) -> tuple[Any, ...]:
        each = functools.partial(model.array, (self.num_rows,))
        rows = DrawingRows(
            slots=each(jnp.int32),
            draws=each(jnp.bool),
            num_output_tokens=each(jnp.int32),
            features=model.array((), jnp.int32),
        )
        return model.array((self.num_rows, model.vocab_size), jnp.float32), rows

    @override
    def made(self, model: StepModel) -> Drawn:
        return _drawn(has_logprobs=self.has_logprobs)


class _OfHidden(Kind, frozen=True):
    bucket: Bucket

    @property
    @override
    def size(self) -> int:
        return self.bucket.num_tokens

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
        return _LOGPROBS


class Embed(_OfHidden, frozen=True, tag=True):
    """Runs `step.embed`."""

    takes: ClassVar[tuple[State, ...]] = ("slots",)
    gives: ClassVar[tuple[State, ...]] = ("slots",)

    @override
    def function(self, model: StepModel) -> Callable[..., Any]:
        return functools.partial(embed, bucket=self.bucket)

    @override
    def made(self, model: StepModel) -> Any:
        return _LEAF


class _WritesSlots(Kind, frozen=True):
    takes: ClassVar[tuple[State, ...]] = ("slots",)
    gives: ClassVar[tuple[State, ...]] = ("slots",)
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

    @override
    def made(self, model: StepModel) -> None:
        return None


class Admit(_WritesSlots, frozen=True, tag=True):
    """Runs `slots.admit`: block tables and sampling parameters of new requests."""

    write: ClassVar[Callable[..., Slots]] = staticmethod(admit)

    @override
    def nothing(self, model: StepModel) -> tuple[Any, ...]:
        return (_no_admissions(model),)


class AdmitExtras(_WritesSlots, frozen=True, tag=True):
    """`slots.admit_extras`: what only processors need of one new request."""

    write: ClassVar[Callable[..., Slots]] = staticmethod(admit_extras)

    @override
    def nothing(self, model: StepModel) -> tuple[Any, ...]:
        held = model.slots.sampling.extras
        return np.int32(model.max_num_seqs), jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), held)


class Allow(_WritesSlots, frozen=True, tag=True):
    """Runs `slots.allow`: masks of the tokens that `num_rows` rows may sample."""

    write: ClassVar[Callable[..., Slots]] = staticmethod(allow)

    num_rows: int

    @property
    @override
    def size(self) -> int:
        return self.num_rows

    @override
    def nothing(self, model: StepModel) -> tuple[Any, ...]:
        masks = Masks(np.zeros(0, np.int32), np.zeros((0, math.ceil(model.vocab_size / 32)), np.uint32))
        return (pack_masks(masks, num_rows=self.num_rows, num_slots=model.max_num_seqs),)


Program = PlainDecode | Forward | Begin | Finish | Draw | PromptLogprobs | Embed | Admit | AdmitExtras | Allow
"""One compiled program: a function, its shapes and its static arguments."""


def _of_plan(model: StepModel, bucket: Bucket, *, is_decode_only: bool, launch: Launch) -> dict[str, Any]:
    """Return what tells a program how to read a plan."""
    return {
        "kernels": model.kernels,
        "group_of_layer": model.layout.group_of_layer,
        "bucket": bucket,
        "is_decode_only": is_decode_only,
        "launch": launch,
    }


def _begun(model: StepModel, bucket: Bucket) -> Begun:
    """Return the shapes of what the first program of a forward pass leaves for the second."""
    read = functools.partial(
        read_plan,
        **_of_plan(model, bucket, is_decode_only=False, launch="in programs"),
        block_size=model.block_size,
        num_blocks=1,
    )
    _, batch, rows = jax.eval_shape(read, model.slots, model.packed(bucket))
    return Begun(model.hidden(bucket), *jax.tree.map(model.replicate, (batch, rows)))


def _only(span: range, of_layers: Sequence[Any]) -> tuple[Any, ...]:
    """Return an entry a layer, None for those that are not in the span."""
    return tuple(entry if index in span else None for index, entry in enumerate(of_layers))


def _drawn(*, has_logprobs: bool) -> Drawn:
    return Drawn(token_ids=_LEAF, logprobs=_LOGPROBS if has_logprobs else None)


def _no_admissions(model: StepModel) -> np.ndarray:
    return pack_admissions([], **model.table_sizes)
