"""Queries against the contexts of their rows in plain XLA: what both paged attentions run without kernels.

A loop over chunks of the context keeps a running softmax (Milakov and Gimelshein 2018, "Online normalizer calculation
for softmax"); its trip count depends on the data, so that the cost follows the contexts in use.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.paging.pages import Pages
from pallas_kernels.paging.scores import Scores

# Finite: a row whose chunk is masked as a whole gives exp(0), not exp(-inf + inf) = NaN. What such a chunk adds is
# finite, and exp(MASKED - maximum) = 0 takes it away again with the first chunk that has something to attend to.
MASKED = -1e30

SUMMED_ON_A_GPU = 1024
"""Most positions of a context that a GPU attends to at once. The host waits for the GPU before each turn of a loop that
has as many turns as the data says, which takes longer than the work of short turns.
"""

GATHERED_ON_A_GPU = 2**24
"""Most values of keys that a GPU gathers at once, 64 MiB in float32, as long as that is a chunk of a CPU's size."""

EXACT = lax.Precision.HIGHEST  # on a GPU the default would round float32 factors to 10 bits


def runs_on_a_gpu() -> bool:
    """Return true while a program is traced for a mesh of GPUs."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform == "gpu"


def chunk_on_a_gpu(pages: Pages, *, num_rows: int, chunk: int) -> int:
    """Return how many positions of `num_rows` contexts a GPU attends to at once, at least `chunk`."""
    per_position = num_rows * pages.k.shape[1] * pages.k.shape[3]
    return max(chunk, min(SUMMED_ON_A_GPU, GATHERED_ON_A_GPU // per_position // chunk * chunk))


def attend(
    q: Float[Array, "G Q H D"],
    positions: Int[Array, "G Q"],
    pages: Pages,
    *,
    block_tables: Int[Array, "G N"],
    lens: Int[Array, " G"],
    chunk: int,
    scores: Scores,
) -> tuple[Float[Array, "G Q H D"], Float[Array, "G Q H"]]:
    """Q queries of each of G rows against the first `lens` positions of their contexts, `chunk` positions at a time.

    In float32: the result, and the logarithm of the softmax's denominator. A query at position -1 attends to nothing
    and gets 0 and -inf.
    """
    num_kv_heads, block_size = pages.k.shape[1:3]
    group, num_queries, num_heads, head_dim = q.shape
    pages_per_chunk = max(1, chunk // block_size)
    chunk = pages_per_chunk * block_size
    # The queries with the same KV head become rows of one matrix product.
    q = q.astype(jnp.float32) * scores.scale
    q = q.reshape(group, num_queries, num_kv_heads, -1, head_dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(group, num_kv_heads, -1, head_dim)
    position = jnp.repeat(positions, num_heads // num_kv_heads, axis=1)[:, None, :, None]

    def by_query(of_heads: Float[Array, " H"]) -> Float[Array, "1 K M 1"]:
        """Return a per-head value for each row of the products."""
        of_heads = jnp.tile(of_heads.astype(jnp.float32).reshape(num_kv_heads, 1, -1), (1, num_queries, 1))
        return of_heads.reshape(1, num_kv_heads, -1, 1)

    oldest = jnp.zeros_like(lens)  # first position that a row's first query attends to
    if scores.sliding_window is not None:
        first_position = jnp.min(jnp.where(positions < 0, jnp.iinfo(jnp.int32).max, positions), axis=1)
        oldest = jnp.maximum(first_position - scores.sliding_window + 1, 0)

    def visit(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        maximum, total, acc = carry
        column = jnp.minimum(i * pages_per_chunk + jnp.arange(pages_per_chunk), block_tables.shape[1] - 1)
        index = jnp.take(block_tables, column, axis=1, mode="clip")
        key_position = i * chunk + jnp.arange(chunk)
        logits = jnp.einsum("gkqd,gkcd->gkqc", q, _gather(pages, 0, index), precision=EXACT)
        if scores.soft_cap is not None:
            logits = scores.soft_cap * jnp.tanh(logits / scores.soft_cap)
        if scores.alibi_slopes is not None:
            distance = (key_position[None, None, None] - position).astype(jnp.float32)
            logits = logits + by_query(scores.alibi_slopes) * distance
        logits = jnp.where(_may_attend(position, key_position, scores.sliding_window), logits, MASKED)
        new_maximum = jnp.maximum(maximum, jnp.max(logits, axis=-1, keepdims=True))
        weights = jnp.exp(logits - new_maximum)
        keep = jnp.exp(maximum - new_maximum)
        # Values outside the context may be NaN, which a weight of 0 would not remove.
        is_held = (key_position[None] < lens[:, None]) & (key_position[None] >= oldest[:, None])
        values = jnp.where(is_held[:, None, :, None], _gather(pages, 1, index), 0.0)
        acc = acc * keep + jnp.einsum("gkqc,gkcd->gkqd", weights, values, precision=EXACT)
        return new_maximum, total * keep + jnp.sum(weights, axis=-1, keepdims=True), acc

    # Made from q, so that inside shard_map they vary over the same mesh axes as the loop's results.
    zeros = jnp.zeros_like(q)
    first, last = jnp.min(oldest) // chunk, ceil_div(jnp.max(lens), chunk)
    maximum, total, acc = lax.fori_loop(first, last, visit, (zeros[..., :1] + MASKED, zeros[..., :1], zeros))
    if scores.sinks is not None:
        sink = by_query(scores.sinks)
        new_maximum = jnp.maximum(maximum, sink)
        keep = jnp.exp(maximum - new_maximum)
        maximum, total, acc = new_maximum, total * keep + jnp.exp(sink - new_maximum), acc * keep
    # A query at -1 has summed masked weights over values of other queries. Any other attends at least to itself, so its
    # total is not 0; a NaN in its context propagates to its result, for the engine to detect.
    acc = jnp.where(position >= 0, acc / total, 0.0)
    lse = jnp.where(position >= 0, maximum + jnp.log(total), -jnp.inf)

    def heads_last(x: Array) -> Array:
        x = x.reshape(group, num_kv_heads, num_queries, -1, x.shape[-1]).transpose(0, 2, 1, 3, 4)
        return x.reshape(group, num_queries, num_heads, -1)

    return heads_last(acc), heads_last(lse)[..., 0]


def _may_attend(
    position: Int[Array, "G 1 Q 1"], key_position: Int[Array, " C"], sliding_window: int | None
) -> Bool[Array, "G 1 Q C"]:
    key_position = key_position[None, None, None]
    allowed = key_position <= position
    if sliding_window is not None:
        allowed &= key_position > position - sliding_window
    return allowed


def _gather(pages: Pages, kind: int, index: Int[Array, "G M"]) -> Float[Array, "G K C D"]:
    """Keys (kind 0) or values (1) in pages of G rows, joined along their positions; one gather does the transposition
    to heads first too.
    """
    num_pages, num_kv_heads, _, head_dim = pages.k.shape
    index = index[:, None] * num_kv_heads + jnp.arange(num_kv_heads)[None, :, None]

    def joined(pool: Array) -> Array:
        tiles = pool.reshape(num_pages * num_kv_heads, *pool.shape[2:])
        return tiles.at[index].get(mode="promise_in_bounds")

    gathered = joined(pages.v if kind else pages.k)
    if pages.stored is not None:
        gathered = pages.stored.codes(gathered)
    gathered = gathered.astype(jnp.float32)
    if pages.scales is not None:
        gathered = gathered * joined(pages.scales)[:, :, :, -1 if kind else 0, :, None]
    return gathered.reshape(*index.shape[:2], -1, head_dim)


def ceil_div(a: Int[Array, ""], b: int) -> Int[Array, ""]:
    """Return a / b, rounded up."""
    return (a + b - 1) // b
