"""Family: a model in stages. Unless a family's module overrides it, each stage is as in most decoders."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float

from jaxserve.layers.attention import num_kv_heads_of
from jaxserve.layers.batch import Batch, Kernels, KVCache
from jaxserve.layers.cache import CacheSpec
from jaxserve.layers.decoder import Layers, windows_of
from jaxserve.layers.embedding import embed, unembed
from jaxserve.layers.paged_kv import KVSpec
from jaxserve.layers.params import Params


def kv_specs(config: Any) -> tuple[CacheSpec, ...]:
    """Return what each layer keeps: K and V of its KV heads, by default as many as query heads, within its window."""
    return tuple(KVSpec(num_kv_heads_of(config), config.head_dim, window) for window in windows_of(config))


def embed_tokens(params: Params, config: Any, batch: Batch) -> Float[Array, "T E"]:  # noqa: ARG001
    """Return the residual stream before the first layer: the rows of the embedding."""
    return embed(params["embed"], batch)


def logits(params: Params, config: Any, hidden: Float[Array, "N E"], kernels: Kernels) -> Float[Array, "N V"]:
    """Return logits in float32, by the embedding or a matrix of their own, with a bias where there is one."""
    table = params["embed" if config.tie_word_embeddings else "lm_head"]
    return unembed(table, hidden, params.get("lm_head_bias"), kernels=kernels)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models. All functions are pure; a config is hashable, and the first argument except for the weights.

    Attributes:
        Config: frozen, with `from_hf`, `vocab_size`, `hidden_size`, `num_layers` and `max_position_embeddings`, and the
            fields that the defaults below read. With grouped, rotated heads it extends `DecoderConfig`.
        param_specs: declares every weight; "layers" is a list.
        kv_specs: declares what each layer keeps from step to step.
        embed: the first stage, from tokens to the residual stream.
        layers: the stages in between, any range of layers: returns the residual stream after it or, after the last
            layer and the final norm, the hidden states. A layer reads `batch.of_layer(index)`.
        head: the last stage, from hidden states to logits.
        doc: the module's docstring, which begins with the checkpoints that are supported.
        features: features of all checkpoints that no field of the config mentions.
        own_layers: what layers have in addition to those of `layers.decoder.decoder`, for which there are fused
            kernels; None if nothing.
        adds_in_norms: such layers add updates by `norm.add_rms_norm`, as those of `decoder` do.
    """

    Config: type[Any]
    param_specs: Callable[[Any], Params]
    kv_specs: Callable[[Any], tuple[CacheSpec, ...]] = kv_specs
    embed: Callable[[Params, Any, Batch], Array] = embed_tokens
    layers: Layers
    head: Callable[[Params, Any, Array, Kernels], Array] = logits
    doc: str | None
    features: tuple[str, ...] = ()
    own_layers: str | None = None
    adds_in_norms: bool = False

    def forward(
        self, params: Params, config: Any, batch: Batch, kv_cache: KVCache
    ) -> tuple[Float[Array, "T E"], KVCache]:
        """Run all stages but the head: hidden states after the final norm, and the cache after this step."""
        x = self.embed(params, config, batch)
        return self.layers(params, config, x, batch, kv_cache, range(config.num_layers))
