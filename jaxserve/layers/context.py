"""StepContext: what every part of a step is given besides its weights and its rows, and the record of what it took.

A part, such as a matrix product or a norm, chooses a kernel while a program is traced, and tells its context. The table
of paths is the record of such choices.
"""

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax

from jaxserve.layers.token_shards import TokenShards
from pallas_kernels.peers import PeerBuffers

Kernels = Literal["xla", "sm90"]
"""Implementations of the operations in `pallas_kernels`: plain XLA, and kernels for Hopper GPUs."""


class Kernel(enum.StrEnum):
    """What computes a part: an operation of `pallas_kernels`, or XLA."""

    SMALL_MATMUL = "small_matmul"
    QUANTIZED_MATMUL = "quantized_matmuls"
    SCALED_MATMUL = "scaled_matmul"
    GATED_LINEAR_UNIT = "gated_linear_unit"
    GROUPED_MATMUL = "grouped_matmul"
    GROUPED_CODES = "grouped_codes"
    EXPERT_ROUTING = "expert_routing"
    ADD_RMS_NORM = "add_rms_norm"
    ROW_QUANTIZATION = "row_quantization"
    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    PAGED_ATTENTION = "paged_attention"
    RAGGED_ATTENTION = "paged_attention and ragged_prefill_attention"
    PAGED_ATTENTION_AND_XLA = "paged_attention and XLA"
    LATENT_ATTENTION = "latent_attention"
    RECURRENT_STEP = "recurrent_step"
    RECURRENCE = "recurrent_step and XLA"
    RECURRENT_CHUNKS = "recurrent_step and recurrent_chunks"
    NONE = "no kernel"
    XLA = "XLA"


NO_KERNELS = "running on plain XLA"


class Part(NamedTuple):
    """What computes a part, and why nothing faster does, if there is something faster for other models or steps."""

    kernel: Kernel
    reason: str | None = None


class ExpertLoads:
    """The numbers of tokens of each expert, of layers that are traced with it.

    Attributes:
        counts: an array [X] for each block of experts.
    """

    def __init__(self) -> None:
        """Begin with no layers."""
        self.counts: list[jax.Array] = []


class Record:
    """What computes the parts of a step that is traced with it: for each part, by name, the kernels that some layer
    takes.

    Attributes:
        products: matrix products and attention.
        others: norms, and what devices send each other.
    """

    def __init__(self) -> None:
        """Begin with no parts."""
        self.products: dict[str, list[Part]] = {}
        self.others: dict[str, list[Part]] = {}


@dataclasses.dataclass(frozen=True)
class StepContext:
    """What parts of a step have in common.

    Attributes:
        kernels: what parts run where they have a choice.
        peers: the buffers through which kernels add up the devices' partial sums; None if there are none, or if XLA
            adds them up.
        is_decode_only: no row has more than one token.
        record: where choices are written, None outside a trace for that. Such a trace enters no kernel.
        prefix: stands before the names of products in the record.
        loads: where experts leave how many tokens each had; None: nowhere.
        tokens: how the step's tokens are split over the mesh axis "data"; None if every device has all of them.
    """

    kernels: Kernels = "xla"
    peers: PeerBuffers | None = None
    is_decode_only: bool = False
    record: Record | None = None
    prefix: str = ""
    loads: ExpertLoads | None = None
    tokens: TokenShards | None = None

    def within(self, prefix: str) -> "StepContext":
        """Return the context of a block in a block, whose products have this prefix."""
        return dataclasses.replace(self, prefix=f"{self.prefix}{prefix} ")

    def choose(self, name: str | None, part: Part, *, is_product: bool = True) -> Kernel:
        """Return the kernel of a part, and record it under its name; None is not recorded."""
        if self.record is not None and name is not None:
            record, name = (self.record.products, self.prefix + name) if is_product else (self.record.others, name)
            seen = record.setdefault(name, [])
            if part.kernel not in [other.kernel for other in seen]:
                seen.append(part)
        return part.kernel

    def call[**P](self, run: Callable[P, Any], makes: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Return the results of `run`; while choices are recorded, arrays of the same types and shardings instead,
        which are told by `makes`: arrays or their shapes.

        Tracing a kernel takes longer than everything around it.
        """
        if self.record is None:
            return run(*args, **kwargs)
        return jax.tree.map(_empty, makes)


PLAIN = StepContext()
"""One device, and XLA's kernels."""


def result(shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.NamedSharding | None = None) -> Any:
    """Return the type of an array that `StepContext.call` makes."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _empty(array: Any) -> jax.Array:
    sharding = array.sharding if isinstance(array, jax.ShapeDtypeStruct) else jax.typeof(array).sharding
    has_mesh = sharding is not None and not sharding.mesh.empty
    return jax.lax.empty(array.shape, array.dtype, out_sharding=sharding if has_mesh else None)
