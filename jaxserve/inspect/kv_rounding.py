"""How far keys and values in 8 bits move a model's log probabilities, keys and values each apart.

What a cache in 8 bits holds is a function of the vectors that are written to it. So a forward pass over a cache of
floats, whose vectors are rounded and converted back before they are written, attends to what one in 8 bits holds, and
keys, values or both can be rounded.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, no_type_check

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.execution.kv_cache import abstract_kv_cache, zeros
from jaxserve.execution.runner import Runner
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.cache import KV_DTYPES, source_of
from jaxserve.layers.context import PLAIN
from jaxserve.layers.embedding import gathered
from jaxserve.layers.latent_attention import LatentSpec, PagedLatent
from jaxserve.layers.paged_kv import PagedKV
from pallas_kernels.kv_write import norm_and_rotate
from pallas_kernels.paging import round_vectors


class Rounding(NamedTuple):
    """Which vectors are rounded, and how. These are arguments of one program for all roundings to a dtype."""

    keys: bool = False
    values: bool = False
    is_static: bool = False
    """True for one scale for the keys of a layer and one for its values, which their largest magnitudes in the text
    decide; false for a scale for each token and head.
    """
    outlier: float = 1.0
    """Factor of the last channel of each key. Queries have it divided by the same factor, so that scores are equal to
    those without a factor, and bit-equal with a power of two.
    """


@no_type_check  # jax rebuilds a pytree with leaves of other kinds too
@flax.struct.dataclass
class _Rounder:
    rounding: Rounding
    dtype: Any = flax.struct.field(pytree_node=False)

    def outliers(self, x: Float[Array, "... D"], channel: int = -1) -> Float[Array, "... D"]:
        """Return the factors of keys that have as many axes and channels as x."""
        factors = jnp.ones(x.shape[-1]).at[channel].set(self.rounding.outlier)
        return jnp.expand_dims(factors, range(x.ndim - 1))

    def held(
        self, keys: Float[Array, "... D"], values: Float[Array, "... D"]
    ) -> tuple[Float[Array, "... D"], Float[Array, "... D"]]:
        """Return keys and values as a cache holds them."""

        def one(x: Any, is_rounded: Any) -> Any:
            _, scales = round_vectors(x, self.dtype)
            scales = jnp.where(self.rounding.is_static, jnp.broadcast_to(jnp.max(scales), scales.shape), scales)
            codes, _ = round_vectors(x, self.dtype, scales)
            return jnp.where(is_rounded, codes.astype(x.dtype) * scales[..., None], x)

        return one(keys, self.rounding.keys), one(values, self.rounding.values)


@no_type_check
@flax.struct.dataclass
class _RoundedKV:
    """`PagedKV` of floats whose keys and values are rounded before they are written."""

    pages: PagedKV
    rounder: _Rounder

    def attend(
        self,
        qkv: Float[Array, "T K members D"],
        batch: Batch,
        scores: Any,
        *,
        rotation: Any,
        head_norms: Any,
        chunk_size: int | None = None,
        scales: Any = None,  # noqa: ARG002 - the checkpoint's own would hide what is measured
    ) -> tuple[Array, "_RoundedKV"]:
        """Attend as `PagedKV.attend` does."""
        q, k = norm_and_rotate(qkv, rotation=rotation, head_norms=head_norms)
        k, v = self.rounder.held(k * self.rounder.outliers(k), qkv[:, :, -1])
        q = q.reshape(qkv[:, :, :-2].shape)
        q = q / self.rounder.outliers(q)
        qkv = jnp.concatenate([q, k[:, :, None], v[:, :, None]], axis=2)
        out, pages = self.pages.attend(qkv, batch, scores, rotation=None, head_norms=None, chunk_size=chunk_size)
        return out, dataclasses.replace(self, pages=pages)

    def read(self, q: Float[Array, "T H D"], batch: Batch, scores: Any, *, num_kv_heads: int) -> Array:
        """Attend as `PagedKV.read` does."""
        return self.pages.read(q / self.rounder.outliers(q), batch, scores, num_kv_heads=num_kv_heads)


@no_type_check
@flax.struct.dataclass
class _RoundedLatent:
    """`PagedLatent` of floats with a vector for the values of a token before that of its keys. The pool has twice the
    size of latents.
    """

    latents: PagedLatent
    rounder: _Rounder

    def attend(
        self,
        q: Float[Array, "T H D"],
        stored: Float[Array, "T D"],
        batch: Batch,
        *,
        latent_size: int,
        scale: float,
        scales: Any = None,  # noqa: ARG002
    ) -> tuple[Array, "_RoundedLatent"]:
        """Attend as `PagedLatent.attend` does. The outlier is in the last channel of the latent."""
        rest = stored.shape[1] - latent_size
        factors = self.rounder.outliers(stored, latent_size - 1)
        keys, values = self.rounder.held(stored * factors, stored * factors)
        values = (values / factors)[:, :latent_size]
        both = jnp.pad(jnp.concatenate([values, keys], axis=1), ((0, 0), (0, rest)))
        q = jnp.pad(q / factors[None], ((0, 0), (0, 0), (latent_size, rest)))
        out, latents = self.latents.attend(q, both, batch, latent_size=latent_size, scale=scale)
        return out, dataclasses.replace(self, latents=latents)


def moved_logprobs(
    runner: Runner, runs: Sequence[Sequence[int]], roundings: Sequence[Rounding], *, dtype: str
) -> list[Float[np.ndarray, " tokens"]]:
    """Return by how much each rounding to a dtype moves the log probability of each token of some texts, which are
    equally long, but of their first ones.

    `dtype` is a name of `kv_cache_dtype`; weights and activations of the model should be float32. Log probabilities are
    those of one forward pass a text in plain XLA, as it is where nothing is rounded.
    """
    with runner.model.on_mesh():
        of_texts = []
        for run in runs:
            tokens = jnp.asarray(run, jnp.int32)
            plain, *rounded = (_logprobs(runner, tokens, each, dtype=dtype) for each in (Rounding(), *roundings))
            of_texts.append([each - plain for each in rounded])
        return [np.concatenate(each) for each in zip(*of_texts, strict=True)]


def _logprobs(runner: Runner, tokens: Int[Array, " T"], rounding: Rounding, *, dtype: str) -> Float[np.ndarray, " T-1"]:
    model = runner.model
    static = model.family, model.config, model.mesh, runner.block_size, KV_DTYPES[dtype]
    return np.asarray(_forward(runner.state["params"], tokens, Rounding(*map(jnp.float32, rounding)), *static))


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6, 7))
def _forward(
    params: Any,
    tokens: Int[Array, " T"],
    rounding: Rounding,
    family: Any,
    config: Any,
    mesh: Any,
    block_size: int,
    dtype: Any,
) -> Float[Array, " T-1"]:
    """Return the log probabilities of the tokens of one text, without that of the first one."""
    num_tokens = len(tokens)
    num_blocks = -(-num_tokens // block_size)
    cache = _rounded(_empty_cache(family.kv_specs(config), num_blocks, block_size, mesh), _Rounder(rounding, dtype))
    batch = Batch(
        token_ids=tokens,
        positions=jnp.arange(num_tokens, dtype=jnp.int32),
        write_index=jnp.arange(num_tokens, dtype=jnp.int32),
        query_starts=jnp.array([0, num_tokens], jnp.int32),
        seq_lens=jnp.array([num_tokens], jnp.int32),
        block_tables=jnp.arange(num_blocks, dtype=jnp.int32)[None],
        slots=jnp.zeros(1, jnp.int32),
        num_decode_rows=jnp.int32(0),
        num_rows=jnp.int32(1),
    )
    hidden, _ = family.forward(params, config, batch, cache)
    logprobs = jax.nn.log_softmax(gathered(family.head(params, config, hidden[:-1], PLAIN)), axis=-1)
    return jnp.take_along_axis(logprobs, tokens[1:, None], axis=1)[:, 0]


def _empty_cache(specs: Any, num_blocks: int, block_size: int, mesh: Any) -> KVCache:
    sources = map(source_of, specs)
    return zeros(
        abstract_kv_cache(
            [LatentSpec(2 * spec.size) if isinstance(spec, LatentSpec) else spec for spec in specs],
            pool_of_layer=tuple(layer if source is None else source for layer, source in enumerate(sources)),
            num_blocks=num_blocks,
            block_size=block_size,
            num_slots=1,
            dtype=jnp.dtype(jnp.float32),
            mesh=mesh,
        )
    )


def _rounded(cache: KVCache, rounder: _Rounder) -> KVCache:
    def one(pool: Any) -> Any:
        if isinstance(pool, PagedKV):
            return _RoundedKV(pool, rounder)
        if isinstance(pool, PagedLatent):
            return _RoundedLatent(pool, rounder)
        return tuple(map(one, pool)) if type(pool) is tuple else pool

    return dataclasses.replace(cache, pools=tuple(map(one, cache.pools)))
