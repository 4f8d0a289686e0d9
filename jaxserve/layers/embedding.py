"""Token ids to vectors at the bottom of a model, vectors to logits at its top; one table may serve both."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.layers.batch import Kernels
from jaxserve.layers.linear import linear, linear_of_few_rows
from jaxserve.layers.params import ParamSpec


def embedding_spec(source: str, *, vocab_size: int, hidden_size: int) -> ParamSpec:
    """A table [V, E], input embedding or LM head; `source` is its module's name in the checkpoint."""
    return ParamSpec(shape=(vocab_size, hidden_size), axes=("vocab", "embed"), source=(f"{source}.weight",))


def position_spec(source: str, *, num_positions: int, hidden_size: int) -> ParamSpec:
    """A table [P, E] of learned positions, whole on every device; `embed` looks positions up in it."""
    return ParamSpec(shape=(num_positions, hidden_size), axes=(None, "embed"), source=(f"{source}.weight",))


def embed(table: Float[Array, "V E"], token_ids: Int[Array, " T"]) -> Float[Array, "T E"]:
    """The table's rows for these tokens, replicated."""
    with jax.named_scope("embed"):
        sharding = jax.typeof(table).sharding
        axis = None if sharding.mesh.empty else sharding.spec[0]
        if axis is None:
            return table[token_ids]
        return jax.shard_map(
            lambda rows, ids: _embed_shard(rows, ids, axis),
            in_specs=(PartitionSpec(axis, None), PartitionSpec(None)),
            out_specs=PartitionSpec(None, None),
        )(table, token_ids)


def _embed_shard(rows: Float[Array, "v E"], token_ids: Int[Array, " T"], axis: str) -> Float[Array, "T E"]:
    """Each device looks up the tokens it owns; the sum over devices has exactly one term that is not zero."""
    local = token_ids - jax.lax.axis_index(axis) * rows.shape[0]
    is_mine = (local >= 0) & (local < rows.shape[0])
    found = jnp.where(is_mine[:, None], rows[jnp.where(is_mine, local, 0)], 0)
    return jax.lax.psum(found, axis)


def lm_head_bias_spec(source: str, vocab_size: int) -> ParamSpec:
    """A bias [V] of the logits; `source` is the LM head's name in the checkpoint."""
    return ParamSpec(shape=(vocab_size,), axes=("vocab",), source=(f"{source}.bias",), init_scale=0.0)


def unembed(
    table: Float[Array, "V E"],
    hidden: Float[Array, "N E"],
    bias: Float[Array, " V"] | None = None,
    *,
    kernels: Kernels,
) -> Float[Array, "N V"]:
    """Logits, float32 and replicated."""
    with jax.named_scope("lm_head"):
        float32 = jnp.dtype(jnp.float32)
        if bias is None:
            logits = linear_of_few_rows(hidden, table, kernels=kernels, output_dtype=float32)
        else:
            logits = linear(hidden, table, bias.astype(jnp.float32), output_dtype=float32)
        mesh = jax.typeof(logits).sharding.mesh
        if mesh.empty:
            return logits
        return jax.sharding.reshard(logits, NamedSharding(mesh, PartitionSpec(None, None)))


def soft_cap(logits: Float[Array, "N V"], cap: float | None) -> Float[Array, "N V"]:
    """Logits bent to stay within the cap: cap * tanh(logits / cap). None leaves them as they are."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)
