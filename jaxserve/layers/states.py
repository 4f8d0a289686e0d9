"""States of requests, whatever the length of their text: what layers with a short convolution keep, or with a linear
recurrence of the heads' matrices, too.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxserve.layers.batch import Batch
from jaxserve.layers.cache import CacheSizes
from jaxserve.layers.context import Kernel, Part, result
from jaxserve.layers.delta_rule import Rows, causal_convolution, recurrence
from jaxserve.layers.parts import recurrence_part
from jaxserve.layers.sharding import partition_spec, partition_specs
from pallas_kernels.recurrent_step import Tokens


class Dim(NamedTuple):
    """A dimension of a state: its size, and its logical axis."""

    size: int
    axis: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateSpec:
    """Declare one state for each request, in float32.

    Attributes:
        width: number of tokens of the convolutions.
        channels: the channels of each convolution.
        matrix: the heads' matrices, as [H, G, K, V]; None if there are none.
    """

    sliding_window = None
    keeps_state = True

    width: int
    channels: tuple[tuple[Dim, ...], ...]
    matrix: tuple[Dim, ...] | None = None

    def abstract(self, sizes: CacheSizes, *, dtype: jnp.dtype, mesh: Mesh | AbstractMesh) -> "States":  # noqa: ARG002
        """Return the shapes of the states of all slots, whatever the dtype of activations."""

        def array(*dims: Dim) -> Any:
            shape, axes = zip(*dims, strict=True)
            sharding = NamedSharding(mesh, partition_spec(axes, shape, mesh, name="states"))
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

        slots = Dim(sizes.num_slots)
        return States(
            windows=tuple(array(slots, Dim(self.width - 1), *dims) for dims in self.channels),
            matrix=None if self.matrix is None else array(slots, *self.matrix),
        )

    def describe(self) -> str:
        """Return the sizes of the matrices, or of the convolution if there are none."""
        if self.matrix is None:
            return f"a state of {self.width - 1} inputs of a convolution in float32"
        H, G, K, V = (dim.size for dim in self.matrix)
        return f"a state of {H * G} matrices {K} x {V} in float32"


class Projected(NamedTuple):
    """What the projections make of a step's tokens, before the convolutions."""

    mixed: tuple[Float[Array, " T N *channels"], ...]
    """The inputs of each convolution."""
    rates: Float[Array, "T H rates"] | None = None
    """What decays and strengths of updates are computed from."""


class StateWeights(NamedTuple):
    """The block's weights besides its projections, in float32; None for those that it does not have."""

    convolutions: tuple[Float[Array, " N *channels W"], ...]
    biases: tuple[Float[Array, " N *channels"], ...] | None = None
    a_log: Float[Array, "H G"] | None = None
    dt_bias: Float[Array, "H G"] | None = None
    skip: Float[Array, "H G"] | None = None
    """A factor of each value that is added to its head's output."""

    def output(self, out: Float[Array, "T H G V"], tokens: Tokens) -> Float[Array, "T H G V"]:
        """Return the heads' output, given that of the recurrence."""
        return out if self.skip is None else out + self.skip[None, :, :, None] * tokens.v


@runtime_checkable
class Recurrent(Protocol):
    """A block whose layer keeps a state."""

    @property
    def corrects(self) -> bool:
        """True for the delta rule, false if values are added to the matrices as they are."""
        ...

    def tokens(self, mixed: tuple[Array, ...], projected: Projected, weights: StateWeights) -> Tokens:
        """Return what the recurrence reads, of the outputs of the convolutions; heads are those of a device."""
        ...


class States(NamedTuple):
    """The states of all slots, donated."""

    windows: tuple[Float[Array, " S W-1 N *channels"], ...]
    """The last inputs of the convolutions."""
    matrix: Float[Array, "S H G K V"] | None

    def advance(
        self, projected: Projected, weights: StateWeights, batch: Batch, block: Recurrent | None
    ) -> tuple[Float[Array, " T N *values"], "States"]:
        """Advance the states of the step's rows by their tokens; return the output of the recurrence, or of the
        convolution if there is no `block`, in float32, and the states after the step. A device does so for its own
        heads or channels; the values of heads are with the first axis of the first convolution's channels.

        Raises NotImplementedError for rows of drafts, which would have to be taken back.
        """
        if batch.num_columns:
            raise NotImplementedError("states cannot be taken back behind rejected drafts")
        rows = Rows(batch.slots, batch.query_starts, batch.seq_lens, batch.num_decode_rows, batch.num_rows)
        context, is_decode_only = batch.context, batch.is_decode_only
        part = Part(Kernel.XLA)
        if self.matrix is not None:
            K, V = self.matrix.shape[3:]
            part = recurrence_part(K, V, kernels=context.kernels, is_decode_only=is_decode_only)

        def on_local_heads(
            projected: Projected, weights: StateWeights, state: States, rows: Rows
        ) -> tuple[Array, States]:
            mixed, windows = zip(
                *(
                    causal_convolution(x.astype(jnp.float32), weight, window, rows, is_decode_only=is_decode_only)
                    for x, weight, window in zip(projected.mixed, weights.convolutions, state.windows, strict=True)
                ),
                strict=True,
            )
            if weights.biases is not None:
                mixed = tuple(y + bias[None] for y, bias in zip(mixed, weights.biases, strict=True))
            if block is None:
                return mixed[0], States(windows, None)
            assert state.matrix is not None
            tokens = block.tokens(mixed, projected, weights)
            out, matrix = recurrence(
                *(tokens, state.matrix, rows),
                corrects=block.corrects,
                is_decode_only=is_decode_only,
                implementation="xla" if part.kernel == Kernel.XLA else "sm90",
                chunks="sm90" if part.kernel == Kernel.RECURRENT_CHUNKS else "xla",
            )
            out = weights.output(out, tokens)
            return out.reshape(*mixed[0].shape[:2], -1), States(windows, matrix)

        context.choose("convolution" if block is None else "recurrence", part)
        first = projected.mixed[0]
        shape = first.shape
        if self.matrix is not None:
            _, H, G, _, V = self.matrix.shape
            shape = *first.shape[:2], H * G * V // first.shape[1]
        sharding = jax.typeof(first).sharding
        arguments = projected, weights, self, rows
        if sharding.mesh.empty:
            return context.call(on_local_heads, (result(shape, jnp.float32), self), *arguments)
        of_output = PartitionSpec(*sharding.spec[:2], *[None] * (len(shape) - 2))
        island = jax.shard_map(
            on_local_heads,
            in_specs=(*map(partition_specs, arguments[:3]), PartitionSpec()),
            out_specs=(of_output, partition_specs(self)),
            check_vma=False,
        )
        makes = result(shape, jnp.float32, NamedSharding(sharding.mesh, of_output)), self
        return context.call(island, makes, *arguments)
