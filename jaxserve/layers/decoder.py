"""The decoder that Llama and its relatives share: pre-norm blocks of attention and a feed-forward, one residual stream.

Layers are unrolled: a Python list of weight trees, so that XLA never copies a layer out of a stack.
"""

from collections.abc import Callable, Sequence

import jax
from jaxtyping import Array, Float

from jaxserve.layers.attention import AttentionFn, self_attention
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.embedding import embed, embedding_spec
from jaxserve.layers.norm import norm_spec, rms_norm
from jaxserve.layers.params import Params
from jaxserve.layers.rope import Rope, rotations


def decoder_specs(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    tie_word_embeddings: bool,
    attention: Callable[[str], Params],
    mlp: Callable[[str], Params],
) -> Params:
    """The whole tree; `attention` and `mlp` give the specs of one block from its name in the checkpoint."""
    specs: Params = {
        "embed": embedding_spec("model.embed_tokens", vocab_size=vocab_size, hidden_size=hidden_size),
        "layers": [
            {
                "attention_norm": norm_spec(f"{layer}.input_layernorm", hidden_size),
                "attention": attention(f"{layer}.self_attn"),
                "mlp_norm": norm_spec(f"{layer}.post_attention_layernorm", hidden_size),
                "mlp": mlp(f"{layer}.mlp"),
            }
            for layer in (f"model.layers.{index}" for index in range(num_layers))
        ],
        "norm": norm_spec("model.norm", hidden_size),
    }
    if not tie_word_embeddings:
        specs["lm_head"] = embedding_spec("lm_head", vocab_size=vocab_size, hidden_size=hidden_size)
    return specs


def decoder(
    params: Params,
    batch: Batch,
    kv_cache: KVCache,
    *,
    attention: AttentionFn,
    mlp: Callable[[Params, Array], Array],
    rope: Rope,
    norm_eps: float,
    sliding_windows: Sequence[int | None],
) -> tuple[Float[Array, "T E"], KVCache]:
    """Hidden states after the final norm, and the cache with this step's keys and values in it.

    `mlp` is applied to a layer's feed-forward weights and its normed input; `sliding_windows` has an entry a layer.
    """
    x = embed(params["embed"], batch.token_ids)
    rotation = rotations(rope, batch.positions)
    k_pools, v_pools = [], []
    for index, (layer, k_pages, v_pages, window) in enumerate(
        zip(params["layers"], kv_cache.k, kv_cache.v, sliding_windows, strict=True)
    ):
        with jax.named_scope(f"layer_{index}"):
            update, k_pages, v_pages = self_attention(
                layer["attention"],
                rms_norm(x, layer["attention_norm"], norm_eps),
                rotation,
                k_pages,
                v_pages,
                batch,
                attention=attention,
                norm_eps=norm_eps,
                sliding_window=window,
            )
            x = x + update
            x = x + mlp(layer["mlp"], rms_norm(x, layer["mlp_norm"], norm_eps))
        k_pools.append(k_pages)
        v_pools.append(v_pages)
    return rms_norm(x, params["norm"], norm_eps), KVCache(k=tuple(k_pools), v=tuple(v_pools))
