"""Multi-token prediction (Liu et al. 2024, arXiv:2412.19437, section 2.2): a further layer reads each token together
with the hidden state of the one before. DeepSeek V3, GLM 4.5 and Qwen 3 Next have such layers.

The layer stands in the model's own checkpoint. Its embedding is the model's.
"""

import dataclasses
from collections.abc import Mapping
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
from jaxserve.layers.params import Params, matrix_spec
from jaxserve.layers.rope import rotations
from jaxserve.models import get_family, with_context
from jaxserve.models.family import Family
from jaxserve.speculation import Speculation
from jaxserve.speculative.drafter import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How a further layer is stored and used.

    Attributes:
        count: the field of config.json with the number of such layers, and the number if it is not there.
        prefix: of all names in the checkpoint; None: that of a layer behind the model's last one.
        layer: of the names of the layer itself, behind `prefix`.
        token_norm, feature_norm, joined, norm: names of what is around the layer.
        has_head: the layer has an LM head of its own; otherwise it uses the model's.
        continues_normed: its hidden states are features behind the last norm, as the model's are, not before it.
        reads_first: it reads the first token of a sequence, instead of zeros.
    """

    count: tuple[str, int] = ("num_nextn_predict_layers", 0)
    prefix: str | None = None
    layer: str = ""
    token_norm: str = "enorm"
    feature_norm: str = "hnorm"
    joined: str = "eh_proj"
    norm: str = "shared_head.norm"
    has_head: bool = True
    continues_normed: bool = False
    reads_first: bool = False


DEEPSEEK = Form()
QWEN_3_NEXT = Form(
    count=("num_nextn_predict_layers", 1),
    prefix="mtp",
    layer=".layers.0",
    token_norm="pre_fc_norm_embedding",
    feature_norm="pre_fc_norm_hidden",
    joined="fc",
    norm="norm",
    has_head=False,
    continues_normed=True,
    reads_first=True,
)
QWEN_3_5 = dataclasses.replace(QWEN_3_NEXT, count=("mtp_num_hidden_layers", 1))
FORMS: Mapping[str, Form] = {
    "deepseek_v3": DEEPSEEK,
    "glm4_moe": DEEPSEEK,
    "glm4_moe_lite": DEEPSEEK,
    "qwen3_next": QWEN_3_NEXT,
    "qwen3_5_text": QWEN_3_5,
    "qwen3_5_moe_text": QWEN_3_5,
}
"""The further layers of models, by their type."""


@dataclasses.dataclass(frozen=True)
class MTP(Drafter):
    """The further layer of a model of `family`, whose own config is `config`."""

    num_drafts: int
    form: Form
    family: Family
    config: Any
    context: int

    @classmethod
    def of(cls, speculation: Speculation, target: dict[str, Any], _: dict[str, Any] | None, context: int) -> "MTP":
        """Make the drafter of these options for a model of this config.json, which reads texts of up to `context`
        tokens. Raises ConfigError if the model has no such layer.
        """
        kind = target.get("model_type")
        form = FORMS.get(str(kind))
        if form is None:
            raise ConfigError(
                f"speculative_config: method mtp is not supported for a {kind} model, only for {', '.join(FORMS)}"
            )
        name, default = form.count
        count = default if target.get(name) is None else target[name]
        if count != 1:
            raise ConfigError(
                f"speculative_config: method mtp needs a model with one layer that predicts further tokens, but "
                f"{name} is {count}"
            )
        if target.get("mtp_use_dedicated_embeddings"):
            raise ConfigError(
                "speculative_config: method mtp needs a further layer that reads the model's embedding, but "
                "mtp_use_dedicated_embeddings is true"
            )
        family = get_family(target)
        return cls(speculation.num_drafts, form, family, family.config(target), context)

    def _layer_of(self, config: Any) -> Layer:
        """Return the layer, which attends to all tokens and has experts: where it is numbered by itself, as the first
        layer has them.
        """
        sparse = getattr(config, "sparse_layers", ())
        is_sparse = sparse[0] if sparse and self.form.layer else True
        own = {"sparse_layers": is_sparse, "sliding_windows": None, "attends": True}
        further = {name: (*getattr(config, name), value) for name, value in own.items() if hasattr(config, name)}
        return self.family.layers(dataclasses.replace(config, num_layers=config.num_layers + 1, **further))[-1]

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
        layer, size, form = self._layer_of(self.config), self.config.hidden_size, self.form
        prefix = f"{names.layers}.{self.config.num_layers}" if form.prefix is None else form.prefix
        specs: Params = {
            "token_norm": layer.norm.specs(f"{prefix}.{form.token_norm}", size),
            "feature_norm": layer.norm.specs(f"{prefix}.{form.feature_norm}", size),
            "joined": matrix_spec(f"{prefix}.{form.joined}", (size, 2 * size), (None, None)),
            "layer": layer.specs(prefix + form.layer, names),
            "norm": layer.norm.specs(f"{prefix}.{form.norm}", size),
        }
        if form.has_head:
            head = f"{prefix}.shared_head.head"
            specs["lm_head"] = embedding_spec(head, vocab_size=self.config.vocab_size, hidden_size=size)
        return specs

    @override
    def run(
        self, params: Params, batch: Batch, features: Float[Array, "T F"] | None, cache: KVCache
    ) -> tuple[Float[Array, "T E"], KVCache]:
        assert features is not None
        own, layer, context = params["drafter"], self._layer, batch.context
        assert layer.mixer.rope is not None
        token = self.family.embed(params, self.config, batch)
        if not self.form.reads_first:
            token = jnp.where((batch.positions == 0)[:, None], 0, token)  # as the layer was trained
        x = [layer.norm(token, own["token_norm"]), layer.norm(features, own["feature_norm"])]
        x = linear(jnp.concatenate(x, axis=1), own["joined"], context=context)
        step = LayerStep(batch, cache.of_layer(0), rotations(layer.mixer.rope, batch.positions))
        x, update, kept = layer.run(own["layer"], x, None, step, consumer="stream")
        x = add_update(x, update, context)
        return layer.norm(x, own["norm"]) if self.form.continues_normed else x, cache.with_layer(0, kept)

    @override
    def logits(self, params: Params, hidden: Float[Array, "N E"], context: StepContext) -> Float[Array, "N V"]:
        own = params["drafter"]
        if not self.form.continues_normed:
            hidden = self._layer.norm(hidden, own["norm"])
        if self.form.has_head:
            return unembed(own["lm_head"], hidden, context=context)
        return self.family.head(params, self.config, hidden, context)
