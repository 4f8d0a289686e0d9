"""States of requests, whatever the length of their text: what layers with a short convolution keep, or with a linear
recurrence of the heads' matrices, too.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, no_type_check, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.cache import CacheSizes
from jaxserve.layers.context import Kernel, Kernels, Part, result
from jaxserve.layers.delta_rule import (
    Rows,
    behind_windows,
    causal_convolution,
    convolution,
    last_inputs,
    recurrence,
)
from jaxserve.layers.params import ParamSpec, matrix_spec
from jaxserve.layers.parts import recurrence_part
from jaxserve.layers.sharding import partition_spec, partition_specs, shard_map
from pallas_kernels.recurrent_step import Mixed, Tokens, recurrent_step


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
        corrects, decays_by_channel: see `Recurrent`.
    """

    sliding_window = None
    keeps_state = True

    width: int
    channels: tuple[tuple[Dim, ...], ...]
    matrix: tuple[Dim, ...] | None = None
    corrects: bool = False
    decays_by_channel: bool = False

    def abstract(self, sizes: CacheSizes, *, dtype: jnp.dtype, mesh: Mesh | AbstractMesh) -> "States":  # noqa: ARG002
        """Return the shapes of the states of all slots, whatever the dtype of activations."""
        slots = Dim(sizes.num_slots)
        return States(
            windows=tuple(_array(mesh, slots, Dim(self.width - 1), *dims) for dims in self.channels),
            matrix=None if self.matrix is None else _array(mesh, slots, *self.matrix),
        )

    def unsettled(self, num_rows: int, num_columns: int, *, mesh: Mesh | AbstractMesh) -> "Unsettled":
        """Return the shapes of what a step that verifies drafts leaves for `settled`."""
        rows, tokens = Dim(num_rows), None
        if self.matrix is not None:
            H, G, K, V = self.matrix
            flat = Dim(num_rows * num_columns)
            decays = (H, G, K) if self.decays_by_channel else (H, G)
            key, value, decay, beta = (_array(mesh, flat, *dims) for dims in ((H, K), (H, G, V), decays, (H, G)))
            tokens = Tokens(q=key, k=key, v=value, log_decay=decay, beta=beta)
        inputs = tuple(_array(mesh, rows, Dim(self.width - 1 + num_columns), *dims) for dims in self.channels)
        return Unsettled(inputs, tokens, self.corrects)

    def describe(self) -> str:
        """Return the sizes of the matrices, or of the convolution if there are none."""
        if self.matrix is None:
            return f"a state of {self.width - 1} inputs of a convolution in float32"
        H, G, K, V = (dim.size for dim in self.matrix)
        return f"a state of {H * G} matrices {K} x {V} in float32"


def _array(mesh: Mesh | AbstractMesh, *dims: Dim) -> Any:
    shape, axes = zip(*dims, strict=True)
    sharding = NamedSharding(mesh, partition_spec(axes, shape, mesh, name="states"))
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def convolution_spec(
    modules: str | Sequence[str],
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    num_channels: Sequence[int] | None = None,
    rows: np.ndarray | None = None,
) -> ParamSpec:
    """Declare the weights of a convolution over the last tokens of each channel, which modules of a checkpoint have as
    [channels, 1, tokens]; in float32. `num_channels` and `rows` are as for `matrix_spec` and in a ParamSpec.
    """
    own = {"dtype": np.float32, "is_absorbed": True, "init_scale": 0.5}
    spec = matrix_spec(modules, shape, axes, num_outputs=num_channels, rows=rows, **own)
    return dataclasses.replace(spec, source_shapes=tuple((size, 1, width) for size, width in spec.source_shapes))


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
    dt_bias: Float[Array, "H G *K"] | None = None
    skip: Float[Array, "H G"] | None = None
    """A factor of each value that is added to its head's output."""

    def output(self, out: Float[Array, "T H G V"], tokens: Tokens | Mixed) -> Float[Array, "T H G V"]:
        """Return the heads' output, given that of the recurrence."""
        if self.skip is None:
            return out
        assert isinstance(tokens, Tokens)
        return out + self.skip[None, :, :, None] * tokens.v


@runtime_checkable
class Recurrent(Protocol):
    """A block whose layer keeps a state."""

    @property
    def corrects(self) -> bool:
        """True for the delta rule, false if values are added to the matrices as they are."""
        ...

    @property
    def decays_by_channel(self) -> bool:
        """True if the channels of keys decay each in its own way."""
        ...

    def tokens(self, mixed: tuple[Array, ...], projected: Projected, weights: StateWeights) -> Tokens | Mixed:
        """Return what the recurrence reads, of the outputs of the convolutions; heads are those of a device."""
        ...


@no_type_check
@flax.struct.dataclass
class Unsettled:
    """The tokens of B rows of which it is not known yet how many count: the last one of each sequence, and drafts."""

    inputs: tuple[Float[Array, " B M N *channels"], ...]
    """The inputs of each convolution: of the tokens before, and of the row's own."""
    tokens: Tokens | None
    """What the recurrence reads, of T = B * Q tokens."""
    corrects: bool = flax.struct.field(pytree_node=False, default=False)
    """Static: see `Recurrent`."""


class States(NamedTuple):
    """The states of all slots, donated."""

    windows: tuple[Float[Array, " S W-1 N *channels"], ...]
    """The last inputs of the convolutions."""
    matrix: Float[Array, "S H G K V"] | None
    unsettled: Unsettled | None = None
    """Only within a step that verifies drafts, whose states are those before it until `settled`."""

    def advance(
        self, projected: Projected, weights: StateWeights, batch: Batch, block: Recurrent | None
    ) -> tuple[Float[Array, " T N *values"], "States"]:
        """Advance the states of the step's rows by their tokens; return the output of the recurrence, or of the
        convolution if there is no `block`, in float32, and the states after the step. A device does so for its own
        heads or channels; the values of heads are with the first axis of the first convolution's channels.

        The states of rows that verify drafts do not change, but have their tokens in `unsettled`.
        """
        rows = Rows(batch.slots, batch.query_starts, batch.seq_lens, batch.num_decode_rows, batch.num_rows)
        context, is_decode_only, verifies = batch.context, batch.is_decode_only, batch.num_columns > 0
        part = Part(Kernel.XLA)
        if self.matrix is not None:
            K, V = self.matrix.shape[3:]
            assert block is not None
            kind: dict[str, Any] = {"decays_by_channel": block.decays_by_channel, "kernels": context.kernels}
            part = recurrence_part(K, V, **kind, is_decode_only=is_decode_only or verifies)
        corrects = block is not None and block.corrects
        static: dict[str, Any] = {
            "corrects": corrects,
            "implementation": "xla" if part.kernel == Kernel.XLA else "sm90",
        }

        def convolved(x: Array, weight: Array, window: Array, rows: Rows) -> tuple[Array, Array]:
            x = x.astype(jnp.float32)
            if verifies:
                inputs = behind_windows(x, window, rows)
                return convolution(inputs, weight), inputs
            return causal_convolution(x, weight, window, rows, is_decode_only=is_decode_only)

        def on_local_heads(
            projected: Projected, weights: StateWeights, state: States, rows: Rows
        ) -> tuple[Array, States]:
            mixed, windows = projected.mixed, state.windows
            # Without barriers XLA reads the windows of all layers before the first, and updates them after the last:
            # until then it holds the inputs of all.
            if not is_decode_only:
                mixed, windows = jax.lax.optimization_barrier((mixed, windows))
            by_convolution = zip(mixed, weights.convolutions, windows, strict=True)
            mixed, windows = zip(*(convolved(*each, rows) for each in by_convolution), strict=True)
            if weights.biases is not None:
                mixed = tuple(y + bias[None] for y, bias in zip(mixed, weights.biases, strict=True))
            out, matrix, tokens = mixed[0], state.matrix, None
            if block is not None:
                assert matrix is not None
                tokens = block.tokens(mixed, projected, weights)
                if isinstance(tokens, Mixed) and not is_decode_only:  # verification keeps them, chunks read them twice
                    tokens = tokens.tokens()
                if verifies:
                    out, _ = recurrent_step(tokens, matrix, rows.slots, rows.begins, **static, changes=False)
                else:
                    static["chunks"] = "sm90" if part.kernel == Kernel.RECURRENT_CHUNKS else "xla"
                    out, matrix = recurrence(tokens, matrix, rows, **static, is_decode_only=is_decode_only)
                out = weights.output(out, tokens)
                out = out.reshape(*mixed[0].shape[:2], -1)
            if verifies:
                assert not isinstance(tokens, Mixed)
                return out, state._replace(unsettled=Unsettled(windows, tokens, corrects))
            if not is_decode_only:
                out, windows = jax.lax.optimization_barrier((out, windows))
            return out, States(windows, matrix)

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
        in_specs = (*map(partition_specs, arguments[:3]), PartitionSpec())
        out_specs = (of_output, self._specs(corrects) if verifies else partition_specs(self))
        makes = result(shape, jnp.float32, NamedSharding(sharding.mesh, of_output)), self
        return context.call(shard_map(on_local_heads, in_specs, out_specs), makes, *arguments)

    def _specs(self, corrects: bool) -> "States":
        """Return the PartitionSpecs of the states in a step that verifies drafts."""
        specs: Any = partition_specs(self)
        tokens: Any = None
        if self.matrix is not None:
            h, g = specs.matrix[1:3]
            on: list[Any] = [PartitionSpec(None, h), PartitionSpec(None, h, g)]
            tokens = Tokens(*(on[0], on[0], on[1], on[1], on[1]))
        return specs._replace(unsettled=Unsettled(specs.windows, tokens, corrects))

    def settled(
        self,
        unsettled: Unsettled,
        slots: Int[Array, " B"],
        counts: Int[Array, " B"],
        begins: Bool[Array, " B"],
        *,
        kernels: Kernels,
    ) -> "States":
        """Return the states advanced by the first `counts` tokens of each row of a step that has verified drafts. Rows
        that `begins` names began a sequence with it.
        """
        implementation = "xla"
        if self.matrix is not None:
            assert unsettled.tokens is not None
            kind: dict[str, Any] = {"decays_by_channel": unsettled.tokens.decays_by_channel, "kernels": kernels}
            part = recurrence_part(*self.matrix.shape[3:], **kind, is_decode_only=True)
            implementation = "xla" if part.kernel == Kernel.XLA else "sm90"

        def on_local_heads(state: States, unsettled: Unsettled, slots: Array, counts: Array, begins: Array) -> States:
            windows = tuple(
                last_inputs(inputs, window, slots, counts)
                for inputs, window in zip(unsettled.inputs, state.windows, strict=True)
            )
            matrix = state.matrix
            if unsettled.tokens is not None:
                assert matrix is not None
                static: Any = {"corrects": unsettled.corrects, "implementation": implementation}
                _, matrix = recurrent_step(unsettled.tokens, matrix, slots, begins, counts, **static)
            return States(windows, matrix)

        arguments = self, unsettled, slots, counts, begins
        if jax.typeof(self.windows[0]).sharding.mesh.empty:
            return on_local_heads(*arguments)
        whole = (PartitionSpec(),) * 3
        specs = partition_specs(self)
        return shard_map(on_local_heads, (specs, partition_specs(unsettled), *whole), specs)(*arguments)


def take_unsettled(kv_cache: KVCache) -> tuple[KVCache, tuple[Unsettled, ...]]:
    """Return a cache without what a step that verifies drafts has left for `settle`, and that, layer by layer."""
    found: list[Unsettled] = []

    def without(part: Any) -> Any:
        if not isinstance(part, States) or part.unsettled is None:
            return part
        found.append(part.unsettled)
        return part._replace(unsettled=None)

    pools = jax.tree.map(without, kv_cache.pools, is_leaf=lambda part: isinstance(part, States))
    return dataclasses.replace(kv_cache, pools=pools), tuple(found)


def settle(
    kv_cache: KVCache,
    unsettled: tuple[Unsettled, ...],
    slots: Int[Array, " B"],
    counts: Int[Array, " B"],
    begins: Bool[Array, " B"],
    *,
    kernels: Kernels,
) -> KVCache:
    """Return the cache with all states advanced by what `take_unsettled` has returned, see `States.settled`."""
    left = iter(unsettled)

    def advanced(part: Any) -> Any:
        return part.settled(next(left), slots, counts, begins, kernels=kernels) if isinstance(part, States) else part

    pools = jax.tree.map(advanced, kv_cache.pools, is_leaf=lambda part: isinstance(part, States))
    return dataclasses.replace(kv_cache, pools=pools)
