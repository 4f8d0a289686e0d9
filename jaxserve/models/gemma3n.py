"""Gemma 3n, the text model (Gemma Team 2025, huggingface.co/google/gemma-3n-E4B-it): Gemma 3 with several residual
streams, a branch of low rank beside the attention, gates most of which are 0 in the first layers, embeddings for each
layer, and last layers that read the keys and values of earlier ones.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.altup import AltUp, Laurel
from jaxserve.layers.attention import HeadNorm
from jaxserve.layers.decoder import BiasedConfig
from jaxserve.layers.layer import SANDWICH_NORMS, Layer
from jaxserve.layers.layer_input import LayerInput
from jaxserve.layers.names import SANDWICH_NAMES
from jaxserve.layers.rope import Rope
from jaxserve.models import gemma2, gemma3, gemma4, hf_config
from jaxserve.models.family import Family
from jaxserve.models.gemma import embed_tokens
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 35,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "tie_word_embeddings": True, "sliding_window": 512,
    "final_logit_softcapping": 30.0, "vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256,
    "altup_active_idx": 0, "altup_correct_scale": True, "altup_num_inputs": 4, "num_kv_shared_layers": 15,
    "laurel_rank": 64
}  # fmt: skip

SPARSE_LAYERS, SPARSITY = 10, 0.95
"""The first layers that are sparse if a config does not say which, in models with more layers, and how sparse."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BiasedConfig):
    """The shape of one Gemma 3n; `intermediate_size` is the largest of all layers.

    Attributes:
        sizes, sparsities: of the feed-forward of each layer.
        sources: the layer whose keys and values each layer reads; None if it has its own.
        input_size: P, the size of a token's embedding for a layer.
        input_vocab_size: the number of tokens that have such embeddings; others have that of token 0.
    """

    sliding_windows: tuple[int | None, ...]
    sizes: tuple[int, ...]
    sparsities: tuple[float, ...]
    sources: tuple[int | None, ...]
    input_size: int
    input_vocab_size: int
    laurel_rank: int
    num_streams: int
    active_stream: int
    scales_stream: bool
    logit_soft_cap: float | None
    local_rope: Rope


def _read(fields: dict[str, Any]) -> Config:
    head_dim = hf_config.integer(fields, "head_dim")
    windows = hf_config.periodic_windows(fields, hf_config.integer(fields, "sliding_window"), period=5)
    rope, local_rope = gemma3.ropes(fields, head_dim)
    num_streams = hf_config.integer(fields, "altup_num_inputs", minimum=2)
    active = hf_config.integer(fields, "altup_active_idx", minimum=0)
    if active >= num_streams:
        raise CheckpointError(f"config.json: altup_active_idx {active} is none of altup_num_inputs ({num_streams})")
    sizes = _sizes(fields, len(windows))
    return read_config(
        Config,
        fields,
        head_dim=head_dim,
        activation=hf_config.activation(fields, "hidden_activation"),
        intermediate_size=max(sizes),
        sliding_windows=windows,
        sizes=sizes,
        sparsities=_sparsities(fields, len(windows)),
        sources=hf_config.kv_sources(fields, windows),
        input_size=hf_config.integer(fields, "hidden_size_per_layer_input"),
        input_vocab_size=hf_config.integer(fields, "vocab_size_per_layer_input"),
        num_streams=num_streams,
        active_stream=active,
        scales_stream=hf_config.flag(fields, "altup_correct_scale"),
        logit_soft_cap=hf_config.optional_number(fields, "final_logit_softcapping"),
        rope=rope,
        local_rope=local_rope,
    )


def _sizes(fields: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    name = "intermediate_size"
    given = fields[name] if isinstance(fields[name], list) else [fields[name]] * num_layers
    if len(given) != num_layers:
        raise CheckpointError(f"config.json: {name} must be one integer, or one for each of {num_layers} layers")
    return tuple(hf_config.integer({name: size}, name) for size in given)


def _sparsities(fields: dict[str, Any], num_layers: int) -> tuple[float, ...]:
    given = fields.get("activation_sparsity_pattern")
    if given is None:
        num_sparse = SPARSE_LAYERS if num_layers > SPARSE_LAYERS else 0
        return (SPARSITY,) * num_sparse + (0.0,) * (num_layers - num_sparse)

    def is_fraction(value: Any) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1

    if not isinstance(given, list) or len(given) != num_layers or not all(map(is_fraction, given)):
        raise CheckpointError(
            "config.json: activation_sparsity_pattern must have a number of at least 0 and less than 1 for each of "
            f"{num_layers} layers, got {given!r:.100}"
        )
    return tuple(map(float, given))


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    attention = replace(
        config.attention,
        scale=1.0,
        head_norm=HeadNorm(norm=config.norm),
        value_norm=replace(config.norm, has_gain=False),
    )
    layer = replace(
        config.layer,
        norms=SANDWICH_NORMS,
        layer_input=LayerInput(size=config.input_size, activation=config.activation),
        laurel=Laurel(rank=config.laurel_rank, norm=config.norm),
    )
    streams = AltUp(
        num_streams=config.num_streams, active=config.active_stream, norm=config.norm, has_scale=config.scales_stream
    )

    def of_layer(index: int) -> Layer:
        window = config.sliding_windows[index]
        return replace(
            layer,
            mixer=replace(
                attention,
                rope=config.rope if window is None else config.local_rope,
                sliding_window=window,
                source=config.sources[index],
            ),
            feed_forward=replace(config.feed_forward, size=config.sizes[index], sparsity=config.sparsities[index]),
            streams=replace(streams, is_first=index == 0, is_last=index + 1 == config.num_layers),
        )

    return tuple(map(of_layer, range(config.num_layers)))


FAMILY = Family(
    Config,
    DEFAULTS,
    _read,
    layers=layers,
    names=SANDWICH_NAMES,
    amend=gemma4.amend,
    embed=embed_tokens,
    layer_inputs=gemma4.layer_inputs,
    head=gemma2.head,
    doc=__doc__,
    features=("QK norm", "norms of values", "norms around blocks", "several residual streams"),
)
