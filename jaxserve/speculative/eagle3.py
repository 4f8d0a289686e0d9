"""EAGLE-3 (Li et al. 2025, arXiv:2503.01840): one layer that reads, besides each token, what three of the target's
layers were given for the token before.

The residual streams before these layers are fused by one matrix to a feature. Behind the first draft the layer's own
output is the feature. Its vocabulary may be a part of the target's.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, override

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.errors import ConfigError
from jaxserve.layers.batch import Batch, KVCache, LayerStep
from jaxserve.layers.cache import CacheSpec
from jaxserve.layers.context import StepContext
from jaxserve.layers.embedding import embed, embedding_spec, gathered, unembed
from jaxserve.layers.layer import Layer
from jaxserve.layers.linear import linear
from jaxserve.layers.names import LLAMA_NAMES
from jaxserve.layers.params import Params, ParamSpec, matrix_spec
from jaxserve.layers.rope import rotations
from jaxserve.models import get_family, llama, with_context
from jaxserve.models.family import Family
from jaxserve.speculation import Speculation
from jaxserve.speculative.drafter import Drafter

NUM_TAPS = 3


@dataclasses.dataclass(frozen=True)
class Eagle3(Drafter):
    """A head for one model.

    Attributes:
        config: the sizes of its layer, which is Llama's.
        layers_read: the target's layers whose inputs it reads.
        sizes: the target's hidden size, the target's vocabulary, and its own.
        prefix: the name of its layer in the checkpoint.
        has_embedding: it has one of its own; otherwise it uses the target's.
        head_of: the target's family and config if it uses the target's LM head; None if it has one of its own.
        adds_normed: its layer's updates are added to the normalised feature.
    """

    num_drafts: int
    config: llama.Config
    context: int
    layers_read: tuple[int, ...]
    sizes: tuple[int, int, int]
    prefix: str
    has_embedding: bool
    head_of: tuple[Family, Any] | None
    adds_normed: bool

    @classmethod
    def of(
        cls, speculation: Speculation, target: dict[str, Any], fields: dict[str, Any] | None, context: int
    ) -> "Eagle3":
        """Make the head of these options, from the target's config.json and what `loading.eagle3` has read; it reads
        texts of up to `context` tokens. Raises ConfigError for a head of another model.
        """
        assert fields is not None
        family = get_family(target)
        of_target = family.config(target)
        config = llama.FAMILY.config(fields["layer"])
        num_layers, size = of_target.num_layers, of_target.hidden_size
        taps = tuple(sorted(fields["taps"] or (2, num_layers // 2, num_layers - 3)))
        if len(set(taps)) != NUM_TAPS or not 0 <= taps[0] <= taps[-1] < num_layers:
            raise ConfigError(
                f"speculative_config: model reads the inputs of the layers {list(taps)} "
                f"(eagle_aux_hidden_state_layer_ids), which must be three of the {num_layers} of the model that it "
                "drafts for"
            )
        if any(layer.stream_size != size for layer in family.layers(of_target)):
            raise ConfigError(
                "speculative_config: method eagle3 reads one residual stream, and the model's layers have several"
            )
        if config.vocab_size != of_target.vocab_size:
            raise ConfigError(
                f"speculative_config: model is for a vocabulary of {config.vocab_size} tokens, but the model that it "
                f"drafts for has {of_target.vocab_size}"
            )
        read = fields["target_hidden_size"] or config.hidden_size
        has_both = fields["has_embedding"] and fields["has_lm_head"]
        if read != size or (config.hidden_size != size and not has_both):
            raise ConfigError(
                f"speculative_config: model is for a hidden size of {read}, but the model that it drafts for has {size}"
            )
        return cls(
            num_drafts=speculation.num_drafts,
            config=config,
            context=context,
            layers_read=taps,
            sizes=(size, of_target.vocab_size, fields["draft_vocab_size"] or of_target.vocab_size),
            prefix=fields["prefix"],
            has_embedding=fields["has_embedding"],
            head_of=None if fields["has_lm_head"] else (family, of_target),
            adds_normed=fields["norm_before_residual"],
        )

    @property
    def _layer(self) -> Layer:
        return with_context(self.config, self.context).layer

    @property
    @override
    def layer_specs(self) -> tuple[CacheSpec, ...]:
        return (self._layer.mixer.cache_spec,)

    @property
    @override
    def feature_size(self) -> int:
        return self.config.hidden_size

    @property
    @override
    def taps(self) -> tuple[int, ...]:
        return self.layers_read

    @override
    def specs(self) -> Params:
        layer, size = self.config.layer, self.config.hidden_size
        assert layer.feed_forward is not None
        of_target, vocab_size, own_vocab_size = self.sizes
        attention = layer.mixer.specs(f"{self.prefix}.self_attn", size, LLAMA_NAMES)
        qkv = attention["qkv"]  # which reads the token and the feature
        attention["qkv"] = dataclasses.replace(
            qkv,
            shape=(*qkv.shape[:-1], 2 * size),
            source_shapes=tuple((rows, 2 * size) for rows, _ in qkv.source_shapes),
        )
        specs: Params = {
            "fc": matrix_spec("fc", (size, NUM_TAPS * of_target), (None, None), quantize=True),
            "token_norm": layer.norm.specs(f"{self.prefix}.input_layernorm", size),
            "feature_norm": layer.norm.specs(f"{self.prefix}.hidden_norm", size),
            "attention": attention,
            "mlp_norm": layer.norm.specs(f"{self.prefix}.post_attention_layernorm", size),
            "mlp": layer.feed_forward.specs(f"{self.prefix}.mlp", size),
            "norm": layer.norm.specs("norm", size),
        }
        if self.head_of is None:
            head = embedding_spec("lm_head", vocab_size=own_vocab_size, hidden_size=size)
            specs["lm_head"] = dataclasses.replace(head, quantize=True)  # it is read for each draft
        if self.has_embedding:
            specs["embed"] = embedding_spec("embed_tokens", vocab_size=vocab_size, hidden_size=size)
        if own_vocab_size != vocab_size:
            specs["d2t"] = ParamSpec(
                shape=(own_vocab_size,), axes=(None,), source=("d2t",), dtype=np.dtype(np.int32), init_scale=0.0
            )
        return specs

    @override
    def features(
        self,
        params: Params,
        tapped: Sequence[Float[Array, "T E"]],
        hidden: Float[Array, "T E"],
        context: StepContext,
    ) -> Float[Array, "T F"]:
        return linear(jnp.concatenate(tapped, axis=1), params["drafter"]["fc"], context=context)

    @override
    def run(
        self, params: Params, batch: Batch, features: Float[Array, "T F"] | None, cache: KVCache
    ) -> tuple[Float[Array, "T E"], KVCache]:
        assert features is not None
        own, layer = params["drafter"], self._layer
        assert layer.mixer.rope is not None
        assert layer.feed_forward is not None
        token = embed(own.get("embed", params["embed"]), batch)
        feature = layer.norm(features, own["feature_norm"])
        stream = feature if self.adds_normed else features
        x = jnp.concatenate([layer.norm(token, own["token_norm"]), feature], axis=1)
        step = LayerStep(batch, cache.of_layer(0), rotations(layer.mixer.rope, batch.positions))
        update, kept = layer.mixer.run(own["attention"], x, step, consumer="stream")
        stream = stream + update
        x = layer.norm(stream, own["mlp_norm"])
        return stream + layer.feed_forward.run(own["mlp"], x, batch, consumer="stream"), cache.with_layer(0, kept)

    @override
    def logits(self, params: Params, hidden: Float[Array, "N E"], context: StepContext) -> Float[Array, "N V"]:
        own = params["drafter"]
        hidden = self._layer.norm(hidden, own["norm"])
        if self.head_of is not None:
            family, config = self.head_of
            return family.head(params, config, hidden, context)
        logits = unembed(own["lm_head"], hidden, context=context)
        if "d2t" not in own:
            return logits
        token_ids = jnp.arange(len(own["d2t"]), dtype=jnp.int32) + own["d2t"]
        whole = jnp.full((len(hidden), self.sizes[1]), -jnp.inf, jnp.float32)
        return whole.at[:, token_ids].set(gathered(logits), mode="drop", unique_indices=True)
