"""OPT (Zhang et al. 2022, arXiv:2205.01068): learned positions with an offset, norms before or after each sum."""

import dataclasses
import functools
from typing import Any

from jaxtyping import Array, Float

from jaxserve.layers.attention import attention_specs, self_attention
from jaxserve.layers.batch import Batch, Kernels, KVCache
from jaxserve.layers.decoder import Attend, Mlp, Names, Norm, decoder_specs, plain_layers, sequential_block
from jaxserve.layers.embedding import embed, embed_positions, embedding_spec, position_spec
from jaxserve.layers.linear import linear
from jaxserve.layers.mlp import mlp, mlp_specs
from jaxserve.layers.norm import layer_norm, layer_norm_specs
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.models import hf_config
from jaxserve.models.family import Family, logits

FIRST_POSITION = 2
"""Row of the position table for a text's first token."""
NORM_EPS = 1e-5

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "ffn_dim": 3072,
    "max_position_embeddings": 2048,
    "do_layer_norm_before": True,
    "num_attention_heads": 12,
    "activation_function": "relu",
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "tie_word_embeddings": True,
}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of one OPT."""

    vocab_size: int
    hidden_size: int
    word_embed_proj_dim: int
    """Size of embedded tokens; if it is not hidden_size, they are projected to it and back."""
    intermediate_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    max_position_embeddings: int
    activation: str
    tie_word_embeddings: bool
    bias: bool
    do_layer_norm_before: bool
    has_final_norm: bool
    has_norm_weights: bool

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS)
        hidden_size = hf_config.integer(fields, "hidden_size")
        norm_before = hf_config.flag(fields, "do_layer_norm_before")
        final_norm_removed = hf_config.flag(fields, "_remove_final_layer_norm")
        return cls(
            vocab_size=hf_config.integer(fields, "vocab_size"),
            hidden_size=hidden_size,
            word_embed_proj_dim=hf_config.integer(fields, "word_embed_proj_dim", hidden_size),
            intermediate_size=hf_config.integer(fields, "ffn_dim"),
            num_layers=hf_config.integer(fields, "num_hidden_layers"),
            num_heads=hf_config.integer(fields, "num_attention_heads"),
            head_dim=hf_config.quotient(fields, "hidden_size", "num_attention_heads"),
            max_position_embeddings=hf_config.integer(fields, "max_position_embeddings"),
            activation=hf_config.activation(fields, "activation_function"),
            tie_word_embeddings=hf_config.flag(fields, "tie_word_embeddings"),
            bias=hf_config.flag(fields, "enable_bias"),
            do_layer_norm_before=norm_before,
            has_final_norm=norm_before and not final_norm_removed,
            has_norm_weights=hf_config.flag(fields, "layer_norm_elementwise_affine"),
        )


def param_specs(config: Config) -> Params:
    """Declare every weight."""
    E, W = config.hidden_size, config.word_embed_proj_dim

    def feed_forward(prefix: str, config: Config) -> Params:
        layer = prefix.removesuffix(".mlp")  # its matrices are stored in the layer itself
        return mlp_specs(layer, config, up="fc1", down="fc2", bias=config.bias)

    def norm(source: str, size: int) -> Params:
        return layer_norm_specs(source, size) if config.has_norm_weights else {}

    names = Names(
        embed="model.decoder.embed_tokens", layers="model.decoder.layers", norm="model.decoder.final_layer_norm"
    )
    specs = decoder_specs(
        config,
        attention=functools.partial(attention_specs, qkv_bias=config.bias, out_bias=config.bias, output="out_proj"),
        mlp=feed_forward,
        norm=norm,
        norms={"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"},
        names=names,
    )
    specs["positions"] = position_spec(
        "model.decoder.embed_positions", num_positions=config.max_position_embeddings + FIRST_POSITION, hidden_size=E
    )
    if not config.has_final_norm:
        del specs["norm"]
    if W != E:
        tables = {"embed": names.embed, "lm_head": names.lm_head}
        for name in tables.keys() & specs.keys():
            specs[name] = embedding_spec(tables[name], vocab_size=config.vocab_size, hidden_size=W)
        for name, shape in {"project_in": (E, W), "project_out": (W, E)}.items():
            source = f"model.decoder.{name}.weight"
            specs[name] = ParamSpec(shape=shape, axes=("embed", None), num_inputs=1, source=(source,), quantize=True)
    return specs


def _norm_after_block(
    layer: Params,
    x: Array,
    update: Any,
    cache: Any,
    *,
    attend: Attend,
    mlp: Mlp,
    norm: Norm,
) -> tuple[Array, None, Any]:
    """Run attention, then the feed-forward, each added to the residual stream, which is normalised after each."""
    assert update is None, "each layer adds its own"
    update, cache = attend(layer["attention"], x, cache)
    x = norm(x + update, layer["attention_norm"])
    return norm(x + mlp(layer["mlp"], x), layer["mlp_norm"]), None, cache


def embed_tokens(params: Params, config: Config, batch: Batch) -> Float[Array, "T E"]:  # noqa: ARG001
    """Return rows of the embedding, widened if they are narrow, and those of positions added to them."""
    x = embed(params["embed"], batch)
    if "project_in" in params:
        x = linear(x, params["project_in"])
    return x + embed_positions(params["positions"], batch.positions + FIRST_POSITION)


def layers(
    params: Params, config: Config, x: Float[Array, "T E"], batch: Batch, kv_cache: KVCache, span: range
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run these layers: see `Family.layers`."""
    norm = functools.partial(layer_norm, eps=NORM_EPS)
    attend = functools.partial(self_attention, rotation=None)
    arrange = sequential_block if config.do_layer_norm_before else _norm_after_block
    return plain_layers(
        params, config, x, batch, kv_cache, span, attend=attend, norm=norm, feed_forward=mlp, arrange=arrange
    )


def head(params: Params, config: Config, hidden: Float[Array, "N E"], kernels: Kernels) -> Float[Array, "N V"]:
    """Return logits in float32, of narrowed hidden states if the embedding is narrow."""
    if "project_out" in params:
        hidden = linear(hidden, params["project_out"])
    return logits(params, config, hidden, kernels)


FAMILY = Family(
    Config=Config,
    param_specs=param_specs,
    embed=embed_tokens,
    layers=layers,
    head=head,
    doc=__doc__,
    own_layers="layer norms and biases",
)
