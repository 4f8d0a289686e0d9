"""The plainest way to run a model, which everything faster must agree with: a full forward pass a token, no cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.embedding import gathered
from pallas_kernels.kv_write import norm_and_rotate


def dense_attention(
    qkv,
    k_pages,
    v_pages,
    batch,
    *,
    rotation,
    head_norms=None,
    scale,
    sliding_window=None,
    soft_cap=None,
    sinks=None,
    alibi_slopes=None,
):
    """An AttentionFn for one sequence whose tokens are all in the batch, in order; the pages pass through untouched."""
    num_tokens, num_kv_heads, members, head_dim = qkv.shape
    q, k = norm_and_rotate(qkv, rotation=rotation, head_norms=head_norms)
    v = qkv[:, :, -1]
    grouped = q.reshape(num_tokens, num_kv_heads, members - 2, head_dim)
    precision = jax.lax.Precision.HIGHEST
    scores = jnp.einsum(
        "qkgd,skd->kgqs", grouped, k, precision=precision, preferred_element_type=jnp.float32
    ) * jnp.float32(scale)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    distance = batch.positions[:, None] - batch.positions[None, :]
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.reshape(*scores.shape[:2], 1, 1) * distance.astype(jnp.float32)[None, None]
    visible = distance >= 0
    if sliding_window is not None:
        visible &= distance < sliding_window
    scores = jnp.where(visible[None, None], scores, -jnp.inf)
    if sinks is not None:  # a key without a value
        sink = sinks.astype(jnp.float32).reshape(*scores.shape[:2], 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sink, (*scores.shape[:3], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., :num_tokens]
    out = jnp.einsum("kgqs,skd->qkgd", weights, v.astype(jnp.float32), precision=precision)
    return out.reshape(q.shape).astype(q.dtype), k_pages, v_pages


def dense_latent_attention(q, stored, pages, batch, *, latent_size, scale):
    """`dense_attention` as a LatentAttentionFn."""
    qkv = jnp.concatenate([q, stored[:, None], stored[:, None]], axis=1)[:, None]
    out, pages, _ = dense_attention(qkv, pages, pages, batch, rotation=None, scale=scale)
    return out[..., :latent_size], pages


def one_sequence(token_ids):
    """The Batch of a single sequence that starts at position 0; nothing is written to pages."""
    num_tokens = token_ids.shape[0]
    return Batch(
        token_ids=token_ids,
        positions=jnp.arange(num_tokens, dtype=jnp.int32),
        write_index=jnp.arange(num_tokens, dtype=jnp.int32),
        query_starts=jnp.array([0, num_tokens], jnp.int32),
        seq_lens=jnp.array([num_tokens], jnp.int32),
        block_tables=jnp.zeros((1, 1), jnp.int32),
        num_decode_rows=jnp.int32(0),
        num_rows=jnp.int32(1),
    )


# Of a test's function, compiling takes longer than running.
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, static_argnums=(1, 2), compiler_options=QUICK_TO_COMPILE)
def naive_logits(params, config, family, token_ids):
    """Logits [T, V] of every position of one sequence, float32."""
    return gathered(family.logits(params, config, _forward(params, config, family, token_ids), "xla"))


@functools.partial(jax.jit, static_argnums=(1, 2), compiler_options=QUICK_TO_COMPILE)
def naive_hidden(params, config, family, token_ids):
    """Hidden states [T, E] after the final norm of every position of one sequence."""
    return _forward(params, config, family, token_ids)


def _forward(params, config, family, token_ids):
    specs = family.kv_specs(config)

    def no_pages(sizes):
        shapes = [(1, spec.num_kv_heads, 1, size) for spec, size in zip(specs, sizes, strict=True)]
        return tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)

    cache = KVCache(k=no_pages(spec.head_dim for spec in specs), v=no_pages(spec.value_dim for spec in specs))
    attention = dense_latent_attention if specs[0].is_latent else dense_attention
    hidden, _ = family.forward(params, config, one_sequence(token_ids), cache, attention)
    return hidden


def naive_greedy(params, config, family, prompt_ids, num_tokens, *, padded_length=None):
    """`num_tokens` greedy tokens after `prompt_ids`, each from a full forward pass over all before it.

    Sequences are padded at the end to `padded_length` (which causal attention does not see), so that one compiled
    function serves all prompts of a test.
    """
    length = len(prompt_ids) + num_tokens
    padded_length = padded_length or -(-length // 64) * 64
    assert length <= padded_length
    token_ids = np.zeros(padded_length, np.int32)
    token_ids[: len(prompt_ids)] = prompt_ids
    for position in range(len(prompt_ids), length):
        logits = naive_logits(params, config, family, jnp.asarray(token_ids))
        token_ids[position] = np.asarray(logits[position - 1]).argmax()
    return token_ids[len(prompt_ids) : length].tolist()
