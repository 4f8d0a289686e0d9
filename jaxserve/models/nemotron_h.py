"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 (NVIDIA 2025, arXiv:2504.03624): Mamba-2, a few layers that attend without
positions, and feed-forwards or experts with a squared ReLU, in the order of a pattern.

Checkpoints count each block as a layer. Here a block that mixes tokens and the feed-forward after it are one.
"""

import dataclasses
import math
from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import ONE_NORM, PRE_NORMS, Layer
from jaxserve.layers.mamba import Mamba2
from jaxserve.layers.mlp import FeedForward
from jaxserve.layers.moe import Experts, Routing
from jaxserve.layers.names import ExpertNames
from jaxserve.layers.params import Params
from jaxserve.models import deepseek_v3, hf_config, mamba2
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 131072, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 4096, "intermediate_size": 21504, "mlp_hidden_act": "relu2", "ssm_state_size": 128,
    "mamba_num_heads": 128, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "n_groups": 8, "conv_kernel": 4,
    "use_conv_bias": True, "n_routed_experts": 8, "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688, "num_experts_per_tok": 2, "routed_scaling_factor": 1.0, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "layer_norm_epsilon": 1e-05
}  # fmt: skip

ALIASES = {
    "mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_dt_limit": "time_step_limit",
    "mamba_dt_min": "time_step_min", "mamba_conv_bias": "use_conv_bias", "layer_types": "layers_block_type",
    "num_local_experts": "n_routed_experts"
}  # fmt: skip
"""Other names of fields, as in transformers."""

MAMBA_NAMES = replace(
    mamba2.OWN_NAMES,
    heads="mamba_num_heads",
    head_size="mamba_head_dim",
    state_size="ssm_state_size",
    activation="mamba_hidden_act",
)

MAMBA, ATTENTION, MLP, EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
"""The kinds of blocks in `layers_block_type`."""
LETTERS = {"M": MAMBA, "*": ATTENTION, "-": MLP, "E": EXPERTS}
"""The kinds of blocks in `hybrid_override_pattern`."""
OLD_KINDS = {"mamba": MAMBA, "attention": ATTENTION}
"""Names of kinds before transformers 5."""

MIN_STEP = 0.001
"""The usual `time_step_min`: states hardly change in steps as small, so that a limit there makes no difference."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(DecoderConfig):
    """The shape of one Nemotron-H.

    Attributes:
        blocks: the kind of each block of the checkpoint.
        mixer: the block with a state.
        experts: the experts of a block, None if no block has some.
    """

    rope: None = dataclasses.field(init=False, default=None)
    blocks: tuple[str, ...]
    mixer: Mamba2
    mlp_bias: bool = dataclasses.field()  # without a default, so that it is read
    experts: Experts | None

    @property
    def routing(self) -> Routing | None:
        """How a token's experts are chosen, None if there are none."""
        return None if self.experts is None else self.experts.routing

    @property
    def places(self) -> tuple[tuple[int, int | None], ...]:
        """For each layer the index of its first block, and that of its feed-forward, None if there is none."""
        mixers = [index for index, kind in enumerate(self.blocks) if _mixes(kind)]
        has_more = [index + 1 < len(self.blocks) and not _mixes(self.blocks[index + 1]) for index in mixers]
        return tuple((index, index + 1 if more else None) for index, more in zip(mixers, has_more, strict=True))


def _read(fields: dict[str, Any]) -> Config:
    hf_config.require(fields, attention_bias=False, mamba_proj_bias=False, sliding_window=None)
    blocks = _blocks(fields)
    fields |= {
        "num_hidden_layers": sum(_mixes(kind) for kind in blocks),
        "rms_norm_eps": hf_config.number(fields, "layer_norm_epsilon"),
        "hidden_act": hf_config.activation(fields, "mlp_hidden_act"),
    }
    mixer = mamba2.mixer(fields, MAMBA_NAMES, eps="layer_norm_epsilon")
    if (mixer.min_step, mixer.max_step) != (0.0, math.inf):
        raise CheckpointError(
            f"config.json: time_step_limit {fields['time_step_limit']!r} is not supported: NVIDIA's code limits step "
            "sizes by it, and transformers does not"
        )
    step = fields.get("time_step_min")
    if isinstance(step, int | float) and step > 1.01 * MIN_STEP:  # it may have been rounded
        raise CheckpointError(
            f"config.json: time_step_min {step!r:.100} is not supported: transformers makes no step smaller, and "
            "NVIDIA's code does"
        )
    return read_config(
        Config,
        fields,
        blocks=blocks,
        is_gated=False,
        mixer=mixer,
        experts=_experts(fields, deepseek_v3.routing(fields)) if EXPERTS in blocks else None,
    )


def _mixes(kind: str) -> bool:
    return kind in (MAMBA, ATTENTION)


def _blocks(fields: dict[str, Any]) -> tuple[str, ...]:
    """Read the kind of each block. Raises CheckpointError for a feed-forward that is first, or after another one."""
    name, pattern = "layers_block_type", fields.get("hybrid_override_pattern")
    kinds = fields.get(name)
    if kinds is None and pattern is not None:
        name, kinds = "hybrid_override_pattern", list(pattern) if isinstance(pattern, str) else pattern
        kinds = [LETTERS.get(letter, letter) for letter in kinds] if isinstance(kinds, list) else kinds
    elif kinds is None:
        kinds = [MAMBA, EXPERTS, ATTENTION, MLP]
    elif isinstance(kinds, list):
        kinds = [OLD_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    known = tuple(LETTERS.values())
    count = max(1, len(kinds)) if isinstance(kinds, list) else 1
    blocks = hf_config.layer_kinds({"num_hidden_layers": count, name: kinds}, known, (), name=name)
    for index, kind in enumerate(blocks):
        if not _mixes(kind) and (index == 0 or not _mixes(blocks[index - 1])):
            raise CheckpointError(
                f"config.json: {name}: block {index} ({kind}) is not supported, as no block that mixes tokens is "
                "right before it"
            )
    return blocks


def _experts(fields: dict[str, Any], routing: Routing) -> Experts:
    has_bias = hf_config.flag(fields, "mlp_bias")
    activation = hf_config.activation(fields, "mlp_hidden_act")
    shared = hf_config.integer(fields, "moe_shared_expert_intermediate_size")
    return Experts(
        routing=routing,
        size=hf_config.integer(fields, "moe_intermediate_size"),
        activation=activation,
        has_selection_bias=True,
        shared=FeedForward(size=shared, activation=activation, is_gated=False, has_bias=has_bias),
        is_gated=False,
        latent_size=hf_config.optional_integer(fields, "moe_latent_size"),
        has_latent_bias=has_bias,
    )


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""
    mixers = {MAMBA: config.mixer, ATTENTION: config.attention}
    blocks = {None: None, MLP: config.feed_forward, EXPERTS: config.experts}
    return tuple(
        replace(
            config.layer,
            mixer=mixers[config.blocks[first]],
            feed_forward=blocks[None if second is None else config.blocks[second]],
            norms=ONE_NORM if second is None else PRE_NORMS,
        )
        for first, second in config.places
    )


def number_blocks(specs: Params, config: Config) -> Params:
    """Return the declaration in which each block has the number that it has in the checkpoint."""

    def declare(layer: Layer, first: int, second: int | None) -> Params:
        own = layer.specs(f"{NAMES.layers}.{first}", NAMES)
        if second is None:
            return own
        of_second = layer.specs(f"{NAMES.layers}.{second}", NAMES)
        return own | {name: of_second[name] for name in ("mlp_norm", "mlp")}

    places = zip(layers(config), config.places, strict=True)
    return specs | {"layers": [declare(layer, *place) for layer, place in places]}


NAMES = replace(mamba2.NAMES, mlp="mixer", mlp_norm="norm", experts=ExpertNames(shared="shared_experts"))
FAMILY = Family(
    Config,
    DEFAULTS,
    _read,
    aliases=ALIASES,
    old_names={"attention_head_dim": "head_dim"},
    layers=layers,
    names=NAMES,
    amend=number_blocks,
    doc=__doc__,
    features=("Mamba-2", "no positions in layers that attend"),
)
