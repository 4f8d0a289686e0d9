"""`recurrent_chunks` in plain XLA and float32, for some chunks at once."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.recurrent_chunks.decays import decayed
from pallas_kernels.recurrent_chunks.outputs import no_outputs
from pallas_kernels.recurrent_step import Tokens

CHUNK_SIZE = 64
"""Number of tokens in a chunk. Work within a chunk grows with it, the number of turns of the loop falls."""
CHUNK_SIZE_BY_CHANNEL = 32
"""Fewer, where each channel of keys decays in its own way: pairs of tokens have a decay for each."""
MAX_CHUNKS_AT_ONCE = 32
"""Number of chunks that are in memory at once, whatever the number of a step's tokens."""


def recurrent_chunks_xla(
    tokens: Tokens,
    states: Float[Array, "S H G K V"],
    slots: Int[Array, " B"],
    query_starts: Int[Array, " B+1"],
    begins: Bool[Array, " B"],
    first_row: Int[Array, ""],
    num_rows: Int[Array, ""],
    *,
    corrects: bool,
) -> tuple[Float[Array, "T H G V"], Float[Array, "S H G K V"]]:
    """See `recurrent_chunks`."""
    T = len(tokens.q)
    C = min(CHUNK_SIZE_BY_CHANNEL if tokens.decays_by_channel else CHUNK_SIZE, T)
    N = min(MAX_CHUNKS_AT_ONCE, -(-T // C))
    starts, ends = query_starts[:-1], query_starts[1:]
    index = jnp.arange(len(slots), dtype=jnp.int32)
    is_long = (index >= first_row) & (index < num_rows)
    counts = jnp.where(is_long, (ends - starts + C - 1) // C, 0)
    counted = jnp.cumsum(counts)
    is_causal = jnp.tril(jnp.ones((C, C), bool))[None, None, None]

    def turn(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        out, states, state = carry
        number = index * N + jnp.arange(N, dtype=jnp.int32)
        is_there = number < counted[-1]
        row = jnp.searchsorted(counted, number, side="right", method="compare_all")
        row = jnp.minimum(row, len(counts) - 1)
        within = number - (counted[row] - counts[row])
        token = (starts[row] + within * C)[:, None] + jnp.arange(C, dtype=jnp.int32)[None]
        token = jnp.where(is_there[:, None] & (token < ends[row][:, None]), token, T)

        def chunked(x: Array) -> Array:
            """Return [T, H, ...] as [N, H, C, ...], with zeros behind the end of a row, which change no state."""
            return jnp.moveaxis(x.at[token].get(mode="fill", fill_value=0), 1, 2)

        q, k = chunked(tokens.q), chunked(tokens.k)
        v, log_decay, beta = (jnp.moveaxis(chunked(x), 3, 2) for x in tokens[2:])  # [N, H, G, C, ...]
        if not tokens.decays_by_channel:
            log_decay = log_decay[..., None]
        logarithms = decayed(log_decay, axis=3)  # [N, H, G, C, K or 1]
        # Where the later token comes first, the difference may be large and positive.
        between = sum(each[..., :, None, :] - each[..., None, :, :] for each in logarithms)
        between = jnp.exp(jnp.where(is_causal[..., None], between, -jnp.inf))
        since = jnp.exp(sum(logarithms))
        total = jnp.swapaxes(since[..., -1:, :], -1, -2)
        until = jnp.exp(sum(each[..., -1:, :] - each for each in logarithms))

        def decayed_products(x: Array) -> Array:
            """Return the products of each token's `x` with the keys up to it, which have decayed: [N, H, G, C, C]."""
            if not tokens.decays_by_channel:
                return _einsum("nhik,nhjk->nhij", x, k)[:, :, None] * between[..., 0]
            return jnp.sum(x[:, :, None, :, None] * k[:, :, None, None] * between, axis=-1)

        values, writing = beta[..., None] * v, until * k[:, :, None]
        corrections = None
        if corrects:
            system = jnp.where(jnp.eye(C, dtype=bool)[None, None, None], 0, beta[..., None] * decayed_products(k))
            known = jnp.concatenate([values, beta[..., None] * since * k[:, :, None]], axis=-1)
            solved = _einsum("nhgij,nhgjv->nhgiv", _inverse(system), known)
            values, corrections = jnp.split(solved, [v.shape[-1]], axis=-1)
        written = _einsum("nhgck,nhgcv->nhgkv", writing, values)

        def chunk(carry: tuple[Array, Array], of_chunk: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
            state, states = carry
            total, slot, begins, continues, written, *correcting = of_chunk
            held = jnp.where(begins, 0, states[jnp.minimum(slot, len(states) - 1)])
            before = jnp.where(continues, state, held)
            state = total * before + written
            if correcting:
                writing, corrections = correcting
                known = _einsum("hgck,hgkv->hgcv", corrections, before)
                state = state - _einsum("hgck,hgcv->hgkv", writing, known)
            return (state, states.at[slot].set(state, mode="drop")), before

        slot = jnp.where(is_there, slots[row], len(states))
        correcting = () if corrections is None else (writing, corrections)
        of_chunks = total, slot, begins[row], (within > 0) | ~is_there, written, *correcting
        (state, states), before = jax.lax.scan(chunk, (state, states), of_chunks)
        if corrections is not None:
            values = values - _einsum("nhgck,nhgkv->nhgcv", corrections, before)
        scores = decayed_products(q)
        read = _einsum("nhgck,nhgkv->nhgcv", since * q[:, :, None], before)
        read = read + _einsum("nhgij,nhgjv->nhgiv", scores, values)
        return out.at[token].set(jnp.moveaxis(read, 3, 1), mode="drop"), states, state

    first = no_outputs(tokens.v, counted[-1]), states, jnp.zeros_like(states[0])
    out, states, _ = jax.lax.fori_loop(0, (counted[-1] + N - 1) // N, turn, first)
    return out, states


def _inverse(system: Float[Array, "N H G C C"]) -> Float[Array, "N H G C C"]:
    """Return the inverse of the identity plus a matrix that has zeros on and above its diagonal.

    Blocks along the diagonal are inverted, each from those of half its size: powers of the matrix are as large as
    binomial coefficients where keys are alike.
    """
    index = jnp.arange(system.shape[-1], dtype=jnp.int32)
    inverse = jnp.broadcast_to(jnp.eye(len(index), dtype=system.dtype)[None, None, None], system.shape)
    size = 1
    while size < len(index):
        block = index // size
        is_below = (block[:, None] == block[None] + 1) & (block[:, None] % 2 == 1)
        below = jnp.where(is_below[None, None, None], system, 0)
        if size > 1:
            below = _einsum("nhgij,nhgjk->nhgik", _einsum("nhgij,nhgjk->nhgik", inverse, below), inverse)
        inverse, size = inverse - below, 2 * size
    return inverse


def _einsum(formula: str, *operands: Array) -> Array:
    return jnp.einsum(formula, *operands, precision=jax.lax.Precision.HIGHEST)
