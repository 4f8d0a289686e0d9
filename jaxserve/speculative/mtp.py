"""Multi-token prediction (Liu et al. 2024, arXiv:2412.19437, section 2.2): DeepSeek V3's further layer, also that of
GLM 4.5, reads each token together with the hidden state of the one before.

The layer stands in the model's own checkpoint, behind the last one. Its embedding is the model's.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, override

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.errors import ConfigError
from jaxserve.layers.batch import Batch, KVCache, LayerStep
from jaxserve.layers.cache import CacheSpec
from jaxserve.layers.context import StepContext
from jaxserve.layers.embedding import embedding_spec, unembed
from jaxserve.layers.layer import Layer
from jaxserve.layers.linear import linear
from jaxserve.layers.names import Names
from jaxserve.layers.norm import add_update
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.layers.rope import rotations
from jaxserve.models import get_family, with_context
from jaxserve.models.family import Family
from jaxserve.speculation import Speculation
from jaxserve.speculative.drafter import Drafter

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""Model types whose further layers are like this."""


@dataclasses.dataclass(frozen=True)
class MTP(Drafter):
    """The further layer of a model of `family`, whose own config is `config`."""

    k: int
    family: Family
    config: Any
    context: int

    @classmethod
    def of(cls, speculation: Speculation, target: dict[str, Any], _: dict[str, Any] | None, context: int) -> "MTP":
        """Make the drafter of these options for a model of this config.json, which reads texts of up to `context`
        tokens. Raises ConfigError if the model has no such layer.
        """
        kind, count = target.get("model_type"), target.get("num_nextn_predict_layers") or 0
        if kind not in FAMILIES:
            raise ConfigError(
                f"speculative_config: method mtp is not supported for a {kind} model, only for {', '.join(FAMILIES)}"
            )
        if count != 1:
            raise ConfigError(
                f"speculative_config: method mtp needs a model with one layer that predicts further tokens, but "
                f"num_nextn_predict_layers is {count}"
            )
        family = get_family(target)
        return cls(speculation.num_drafts, family, family.config(target), context)

    @property
    @override
    def num_drafts(self) -> int:
        return self.k

    def _layer_of(self, config: Any) -> Layer:
        """Return the layer, which has experts wherever the others have them."""
        further = {"num_layers": config.num_layers + 1, "sparse_layers": (*config.sparse_layers, True)}
        if hasattr(config, "sliding_windows"):
            further["sliding_windows"] = (*config.sliding_windows, None)
        return self.family.layers(dataclasses.replace(config, **further))[-1]

    @property
    def _layer(self) -> Layer:
        return self._layer_of(with_context(self.config, self.context))

    @property
    @override
    def layer_specs(self) -> tuple[CacheSpec, ...]:
        return (self._layer.mixer.cache_spec,)

    @property
    @override
    def feature_size(self) -> int:
        return self.config.hidden_size

    @override
    def specs(self) -> Params:
        names = self.family.names if isinstance(self.family.names, Names) else self.family.names(self.config)
        layer, size = self._layer_of(self.config), self.config.hidden_size
        prefix = f"{names.layers}.{self.config.num_layers}"
        head = embedding_spec(f"{prefix}.shared_head.head", vocab_size=self.config.vocab_size, hidden_size=size)
        return {
            "token_norm": layer.norm.specs(f"{prefix}.enorm", size),
            "feature_norm": layer.norm.specs(f"{prefix}.hnorm", size),
            "joined": ParamSpec(
                shape=(size, 2 * size), axes=(None, None), num_inputs=1, source=(f"{prefix}.eh_proj.weight",)
            ),
            "layer": layer.specs(prefix, names),
            "norm": layer.norm.specs(f"{prefix}.shared_head.norm", size),
            "lm_head": head,
        }

    @override
    def features(
        self, params: Params, tapped: Sequence[Float[Array, "T E"]], hidden: Float[Array, "T E"]
    ) -> Float[Array, "T F"]:
        return hidden

    @override
    def run(
        self, params: Params, batch: Batch, features: Float[Array, "T F"] | None, cache: KVCache
    ) -> tuple[Float[Array, "T E"], KVCache]:
        assert features is not None
        own, layer, context = params["drafter"], self._layer, batch.context
        assert layer.mixer.rope is not None
        token = self.family.embed(params, self.config, batch)
        token = jnp.where((batch.positions == 0)[:, None], 0, token)  # as the layer was trained
        x = [layer.norm(token, own["token_norm"]), layer.norm(features, own["feature_norm"])]
        x = linear(jnp.concatenate(x, axis=1), own["joined"], context=context)
        step = LayerStep(batch, cache.of_layer(0), rotations(layer.mixer.rope, batch.positions))
        x, update, kept = layer.run(own["layer"], x, None, step, consumer="stream")
        return add_update(x, update, context), cache.with_layer(0, kept)

    @override
    def logits(self, params: Params, hidden: Float[Array, "N E"], context: StepContext) -> Float[Array, "N V"]:
        own = params["drafter"]
        return unembed(own["lm_head"], self._layer.norm(hidden, own["norm"]), context=context)
