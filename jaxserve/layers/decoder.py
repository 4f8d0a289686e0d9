"""How blocks of attention and feed-forward stand around the residual stream, and the decoder of Llama's relatives.

Layers are unrolled: a Python list of weight trees, so that XLA never copies a layer out of a stack.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxserve.layers.attention import AttentionFn, self_attention
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.embedding import embedding_spec
from jaxserve.layers.norm import norm_spec, rms_norm
from jaxserve.layers.params import Params
from jaxserve.layers.rope import Rope, rotations

Attend = Callable[[Params, Array, Array, Array], tuple[Array, Array, Array]]
"""(weights, input, k_pages, v_pages) -> (output, k_pages, v_pages)"""
Mlp = Callable[[Params, Array], Array]
"""(weights, input) -> output"""
Norm = Callable[[Array, Any], Array]
"""(input, weights) -> output"""
Block = Callable[[Params, Array, Array, Array], tuple[Array, Array, Array]]
"""(weights of the layer, residual stream, k_pages, v_pages) -> (residual stream, k_pages, v_pages)"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """What a checkpoint calls the parts of a decoder; `attention` and `mlp` are parts of its numbered `layers`."""

    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    attention: str = "self_attn"
    mlp: str = "mlp"
    norm: str = "model.norm"
    lm_head: str = "lm_head"


LLAMA_NAMES = Names()
PRE_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""The norms of Llama's layer and their names in checkpoints."""

SANDWICH_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""The norms of a layer of Gemma 2 and 3."""


def decoder_specs(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    tie_word_embeddings: bool,
    attention: Callable[[str], Params],
    mlp: Callable[[str], Params],
    norm: Callable[[str, int], Any] = norm_spec,
    norms: Mapping[str, str] = PRE_NORMS,
    names: Names = LLAMA_NAMES,
) -> Params:
    """The whole tree; whatever is not said is as in Llama's checkpoints.

    `attention`, `mlp` and `norm` give the specs of one block from its name in the checkpoint (and a norm's size);
    `norms` are the norms of a layer, as `sequential_block` and `parallel_block` know them, with their names there.
    """

    def layer_specs(layer: str) -> Params:
        return {name: norm(f"{layer}.{source}", hidden_size) for name, source in norms.items()} | {
            "attention": attention(f"{layer}.{names.attention}"),
            "mlp": mlp(f"{layer}.{names.mlp}"),
        }

    specs: Params = {
        "embed": embedding_spec(names.embed, vocab_size=vocab_size, hidden_size=hidden_size),
        "layers": [layer_specs(f"{names.layers}.{index}") for index in range(num_layers)],
        "norm": norm(names.norm, hidden_size),
    }
    if not tie_word_embeddings:
        specs["lm_head"] = embedding_spec(names.lm_head, vocab_size=vocab_size, hidden_size=hidden_size)
    return specs


def decoder(
    params: Params,
    x: Float[Array, "T E"],
    batch: Batch,
    kv_cache: KVCache,
    *,
    attention: AttentionFn,
    mlp: Mlp,
    rope: Rope,
    norm_eps: float,
    sliding_windows: Sequence[int | None],
) -> tuple[Float[Array, "T E"], KVCache]:
    """Llama's: hidden states after the final norm, and the cache with this step's keys and values in it.

    `x` are the embedded tokens; `mlp` is applied to a layer's feed-forward weights and its normed input;
    `sliding_windows` has an entry a layer.
    """
    rotation = rotations(rope, batch.positions)
    norm = functools.partial(rms_norm, eps=norm_eps)

    def block(window: int | None) -> Block:
        attend = functools.partial(
            self_attention, batch=batch, attention=attention, rotation=rotation, norm=norm, sliding_window=window
        )
        return functools.partial(sequential_block, attend=attend, mlp=mlp, norm=norm)

    x, kv_cache = run_layers(params["layers"], x, kv_cache, [block(window) for window in sliding_windows])
    return norm(x, params["norm"]), kv_cache


def run_layers(
    layers: Sequence[Params], x: Float[Array, "T E"], kv_cache: KVCache, blocks: Sequence[Block]
) -> tuple[Float[Array, "T E"], KVCache]:
    """The residual stream after all layers, each through its block, and the cache with this step's keys and values."""
    k_pools, v_pools = [], []
    for index, (layer, block, k_pages, v_pages) in enumerate(zip(layers, blocks, kv_cache.k, kv_cache.v, strict=True)):
        with jax.named_scope(f"layer_{index}"):
            x, k_pages, v_pages = block(layer, x, k_pages, v_pages)
        k_pools.append(k_pages)
        v_pools.append(v_pages)
    return x, KVCache(k=tuple(k_pools), v=tuple(v_pools))


def sequential_block(
    layer: Params, x: Array, k_pages: Array, v_pages: Array, *, attend: Attend, mlp: Mlp, norm: Norm
) -> tuple[Array, Array, Array]:
    """Attention, then the feed-forward, each added to the residual stream x.

    Norms stand where the layer has weights for them: before ("attention_norm", "mlp_norm") as in Llama, after
    ("attention_post_norm", "mlp_post_norm") as in OLMo 2, or on both sides as in Gemma 2.
    """

    def normed(name: str, y: Array) -> Array:
        return norm(y, layer[name]) if name in layer else y

    update, k_pages, v_pages = attend(layer["attention"], normed("attention_norm", x), k_pages, v_pages)
    x = x + normed("attention_post_norm", update)
    update = mlp(layer["mlp"], normed("mlp_norm", x))
    return x + normed("mlp_post_norm", update), k_pages, v_pages


def parallel_block(
    layer: Params, x: Array, k_pages: Array, v_pages: Array, *, attend: Attend, mlp: Mlp, norm: Norm
) -> tuple[Array, Array, Array]:
    """Attention and the feed-forward side by side, both added to the residual stream x (Wang and Komatsuzaki 2021).

    Both read "attention_norm" of x, unless the layer has an "mlp_norm" too.
    """
    y = norm(x, layer["attention_norm"])
    update, k_pages, v_pages = attend(layer["attention"], y, k_pages, v_pages)
    if "mlp_norm" in layer:
        y = norm(x, layer["mlp_norm"])
    return x + update + mlp(layer["mlp"], y), k_pages, v_pages
