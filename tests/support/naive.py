"""The plainest way to run a model, which everything faster must agree with: a full forward pass a token, no cache."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.cache import SeveralSpecs, source_of
from jaxserve.layers.context import PLAIN
from jaxserve.layers.embedding import gathered
from jaxserve.layers.latent_attention import LatentSpec
from jaxserve.layers.states import StateSpec
from pallas_kernels.kv_write import norm_and_rotate
from pallas_kernels.paging import Scores
from pallas_kernels.recurrent_step import Mixed, one_token


class DenseKV(NamedTuple):
    """The cache of one sequence whose tokens are all in the batch, in order: what other layers of a step may read."""

    kept: Any = None

    def attend(self, qkv, batch, scores, *, rotation, head_norms, chunk_size, scales):
        options = {"rotation": rotation, "head_norms": head_norms}
        _, k = norm_and_rotate(qkv, **options)
        out = dense_attention(qkv, batch, scores, **options, chunk_size=chunk_size)
        return out, DenseKV(jnp.stack([k, qkv[:, :, -1]], axis=2))

    def read(self, q, batch, scores, *, num_kv_heads):
        q = q.reshape(len(q), num_kv_heads, -1, q.shape[-1])
        return dense_attention(jnp.concatenate([q, self.kept], axis=2), batch, scores)


class DenseLatent(NamedTuple):
    """`DenseKV` where all heads attend to one vector a token."""

    def attend(self, q, stored, batch, *, latent_size, scale, scales):
        qkv = jnp.concatenate([q, stored[:, None], stored[:, None]], axis=1)[:, None]
        return dense_attention(qkv, batch, Scores(scale=scale))[..., :latent_size], self


class DenseState(NamedTuple):
    """The state of layers that keep one, from the first token of one sequence; nothing is kept."""

    def advance(self, projected, weights, batch, block):
        del batch

        def convolved(x, weight, bias):
            width = weight.shape[-1]
            padded = jnp.pad(x.astype(jnp.float32), ((width - 1, 0), *[(0, 0)] * (x.ndim - 1)))
            lagged = jnp.stack([padded[lag : lag + len(x)] for lag in range(width)], axis=-1)
            y = (lagged * weight[None]).sum(-1)
            return y if bias is None else y + bias[None]

        biases = weights.biases or [None] * len(projected.mixed)
        mixed = tuple(map(convolved, projected.mixed, weights.convolutions, biases))
        if block is None:
            return mixed[0], self
        tokens = block.tokens(mixed, projected, weights)
        tokens = tokens.tokens() if isinstance(tokens, Mixed) else tokens

        def after(state, token):
            out, state = one_token(state, jax.tree.map(lambda x: x[None], token), corrects=block.corrects)
            return state, out[0]

        state = jnp.zeros((1, *tokens.beta.shape[1:], tokens.k.shape[-1], tokens.v.shape[-1]))
        out = weights.output(jax.lax.scan(after, state, tokens)[1], tokens)
        return out.reshape(*mixed[0].shape[:2], -1), self


def dense_attention(qkv, batch, scores, *, rotation=None, head_norms=None, chunk_size=None):
    """Causal attention among the tokens of a batch."""
    num_tokens, num_kv_heads, members, head_dim = qkv.shape
    q, k = norm_and_rotate(qkv, rotation=rotation, head_norms=head_norms)
    v = qkv[:, :, -1]
    grouped = q.reshape(num_tokens, num_kv_heads, members - 2, head_dim)
    precision = jax.lax.Precision.HIGHEST
    logits = jnp.einsum(
        "qkgd,skd->kgqs", grouped, k, precision=precision, preferred_element_type=jnp.float32
    ) * jnp.float32(scores.scale)
    if scores.soft_cap is not None:
        logits = scores.soft_cap * jnp.tanh(logits / scores.soft_cap)
    distance = batch.positions[:, None] - batch.positions[None, :]
    if scores.alibi_slopes is not None:
        slopes = scores.alibi_slopes.reshape(*logits.shape[:2], 1, 1)
        logits = logits - slopes * distance.astype(jnp.float32)[None, None]
    visible = distance >= 0
    if scores.sliding_window is not None:
        visible &= distance < scores.sliding_window
    if chunk_size is not None:
        visible &= batch.positions[:, None] // chunk_size == batch.positions[None] // chunk_size
    logits = jnp.where(visible[None, None], logits, -jnp.inf)
    if scores.sinks is not None:  # a key without a value
        sink = scores.sinks.astype(jnp.float32).reshape(*logits.shape[:2], 1, 1)
        logits = jnp.concatenate([logits, jnp.broadcast_to(sink, (*logits.shape[:3], 1))], axis=-1)
    weights = jax.nn.softmax(logits, axis=-1)[..., :num_tokens]
    out = jnp.einsum("kgqs,skd->qkgd", weights, v.astype(jnp.float32), precision=precision)
    return out.reshape(q.shape).astype(q.dtype)


DENSE = {StateSpec: DenseState, LatentSpec: DenseLatent}
"""The cache of one sequence for each kind of spec; `DenseKV` for others."""


def one_sequence(token_ids):
    """Return the Batch of a single sequence that starts at position 0; nothing is written to pages."""
    num_tokens = token_ids.shape[0]
    return Batch(
        token_ids=token_ids,
        positions=jnp.arange(num_tokens, dtype=jnp.int32),
        write_index=jnp.arange(num_tokens, dtype=jnp.int32),
        query_starts=jnp.array([0, num_tokens], jnp.int32),
        seq_lens=jnp.array([num_tokens], jnp.int32),
        block_tables=jnp.zeros((1, 1), jnp.int32),
        slots=jnp.zeros(1, jnp.int32),
        num_decode_rows=jnp.int32(0),
        num_rows=jnp.int32(1),
    )


# Compiling a test's function takes longer than running it.
QUICK_TO_COMPILE = {"xla_backend_optimization_level": 0}


@functools.partial(jax.jit, static_argnums=(1, 2), compiler_options=QUICK_TO_COMPILE)
def naive_logits(params, config, family, token_ids):
    """Logits [T, V] of every position of one sequence, float32."""
    return gathered(family.head(params, config, _forward(params, config, family, token_ids), PLAIN))


@functools.partial(jax.jit, static_argnums=(1, 2), compiler_options=QUICK_TO_COMPILE)
def naive_hidden(params, config, family, token_ids):
    """Hidden states [T, E] after the final norm of every position of one sequence."""
    return _forward(params, config, family, token_ids)


def _forward(params, config, family, token_ids):
    kv_specs = family.kv_specs(config)
    pools = tuple(map(dense_cache, kv_specs))
    cache = KVCache(pools, num_blocks=1, block_size=1, pool_of_layer=owners(kv_specs))
    hidden, _ = family.forward(params, config, one_sequence(token_ids), cache)
    return hidden


def dense_cache(spec):
    """Return the cache of one sequence for a spec."""
    if isinstance(spec, SeveralSpecs):
        return tuple(map(dense_cache, spec.parts))
    return DENSE.get(type(spec), DenseKV)()


def owners(kv_specs):
    """Return which layer keeps what each layer reads."""
    sources = map(source_of, kv_specs)
    return tuple(layer if source is None else source for layer, source in enumerate(sources))


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


def greedy_choices(params, config, family, prompt_ids, token_ids, *, padded_length):
    """The greedy token at the position of each of `token_ids`, which follow `prompt_ids`, from one forward pass.

    Where they equal `token_ids`, `naive_greedy` finds the same: its passes see the same tokens up to each position.
    """
    text = np.zeros(padded_length, np.int32)
    length = len(prompt_ids) + len(token_ids)
    text[:length] = [*prompt_ids, *token_ids]
    logits = naive_logits(params, config, family, jnp.asarray(text))
    return np.asarray(logits)[len(prompt_ids) - 1 : length - 1].argmax(axis=-1).tolist()
