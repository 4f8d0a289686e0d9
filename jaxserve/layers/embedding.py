"""Token ids to vectors at the bottom of a model, vectors to logits at its top; one table may serve both."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.layers.batch import Batch
from jaxserve.layers.context import PLAIN, Kernel, Kernels, StepContext, result
from jaxserve.layers.linear import linear
from jaxserve.layers.params import ParamSpec, matrix_spec
from jaxserve.layers.parts import gather_part, sum_part
from jaxserve.layers.sharding import partition_specs, shard_map
from jaxserve.layers.weight import Weight
from pallas_kernels import all_gather, all_reduce
from pallas_kernels.peers import PeerBuffers, peer_buffers_spec


def embedding_spec(source: str, *, vocab_size: int, hidden_size: int) -> ParamSpec:
    """Declare a table [V, E], input embedding or LM head; `source` is its module's name in the checkpoint."""
    return matrix_spec(source, (vocab_size, hidden_size), ("vocab", "embed"))


def position_spec(source: str, *, num_positions: int, hidden_size: int) -> ParamSpec:
    """Declare a table [P, E] of learned positions, whole on every device."""
    return ParamSpec(shape=(num_positions, hidden_size), axes=(None, "embed"), source=(f"{source}.weight",))


def embed(table: Weight, batch: Batch) -> Float[Array, "T E"]:
    """Return the table's rows for the tokens of a step, replicated."""
    with jax.named_scope("embed"):
        context, mesh = batch.context, table.mesh
        axis = None if mesh.empty else table.spec[0]
        makes = result((len(batch.token_ids), table.shape[1]), table.dtype, NamedSharding(mesh, PartitionSpec()))
        if axis is None:
            return context.call(table.take, makes, batch.token_ids)
        kernel = context.choose("embedding", sum_part(makes, batch.peers), is_product=False)
        peers = batch.peers if kernel == Kernel.ALL_REDUCE else None
        run = functools.partial(_embed_shard, axis=axis, kernels=batch.kernels)
        in_specs = partition_specs(table), PartitionSpec(None), peer_buffers_spec(mesh)
        return context.call(shard_map(run, in_specs, PartitionSpec(None, None)), makes, table, batch.token_ids, peers)


def _embed_shard(
    rows: Weight,
    token_ids: Int[Array, " T"],
    peers: PeerBuffers | None,
    *,
    axis: str | tuple[str, ...],
    kernels: Kernels,
) -> Float[Array, "T E"]:
    """Each device looks up the tokens it owns; the sum over devices has exactly one term that is not zero."""
    rank = jax.lax.axis_index(axis) if peers is None else peers.ranks[0]
    local = token_ids - rank * rows.shape[0]
    is_mine = (local >= 0) & (local < rows.shape[0])
    found = jnp.where(is_mine[:, None], rows.take(jnp.where(is_mine, local, 0)), 0)
    if peers is None:
        return jax.lax.psum(found, axis)
    assert isinstance(axis, str)
    return all_reduce.all_reduce(found, peers, axis_name=axis, implementation=kernels)


def embed_positions(table: Float[Array, "P E"], positions: Int[Array, " T"]) -> Float[Array, "T E"]:
    """Return the rows of a table of learned positions."""
    with jax.named_scope("embed"):
        return table[positions]


def lm_head_bias_spec(vocab_size: int) -> ParamSpec:
    """Declare a bias [V] of the logits."""
    return ParamSpec(shape=(vocab_size,), axes=("vocab",), source=("lm_head.bias",), init_scale=0.0)


def unembed(
    table: Weight, hidden: Float[Array, "N E"], bias: Float[Array, " V"] | None = None, context: StepContext = PLAIN
) -> Float[Array, "N V"]:
    """Logits in float32, split as the table is: see `gathered`."""
    with jax.named_scope("lm_head"):
        float32 = jnp.dtype(jnp.float32)
        bias = None if bias is None else bias.astype(float32)
        return linear(hidden, table, bias, context=context, name="LM head", output_dtype=float32, of_few_rows=True)


def gathered(
    logits: Float[Array, "N V"], peers: PeerBuffers | None = None, context: StepContext = PLAIN
) -> Float[Array, "N V"]:
    """Return the logits of the whole vocabulary on each device, through the peers' memory if they fit: `peers` are
    those for logits.
    """
    sharding = jax.typeof(logits).sharding
    if sharding.mesh.empty or sharding.spec[1] is None:
        return logits
    axis = sharding.spec[1]
    shard = jax.ShapeDtypeStruct(sharding.shard_shape(logits.shape), logits.dtype)
    kernel = context.choose("gather of logits", gather_part(shard, peers), is_product=False)
    whole = NamedSharding(sharding.mesh, PartitionSpec(None, None))
    if kernel == Kernel.XLA:
        return jax.sharding.reshard(logits, whole)
    run = functools.partial(all_gather.all_gather, axis_name=axis, implementation=context.kernels)
    in_specs = PartitionSpec(None, axis), peer_buffers_spec(sharding.mesh)
    return context.call(
        shard_map(run, in_specs, PartitionSpec(None, None)), result(logits.shape, logits.dtype, whole), logits, peers
    )


def soft_cap(logits: Float[Array, "N V"], cap: float | None) -> Float[Array, "N V"]:
    """Logits bent to stay within the cap: cap * tanh(logits / cap). None leaves them as they are."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)
