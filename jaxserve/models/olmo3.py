"""OLMo 3 (OLMo Team 2025, arXiv:2512.13961): OLMo 2 with a sliding window in three of four layers, whose rotations are
not scaled.
"""

import dataclasses
import functools
from typing import Any

from jaxtyping import Array, Float

from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.decoder import plain_layers, windowed_attends
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.params import Params
from jaxserve.layers.rope import Rope
from jaxserve.models import hf_config, hf_rope, olmo2
from jaxserve.models.family import Family

THETA = 500_000.0

DEFAULTS: dict[str, Any] = olmo2.DEFAULTS | {"sliding_window": 4096}
"""Defaults of this family's config in transformers, for fields that a config.json omits."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(olmo2.Config):
    """The shape of one OLMo 3."""

    sliding_windows: tuple[int | None, ...]
    local_rope: Rope
    """Rotary embedding of layers with a sliding window."""

    @classmethod
    def from_hf(cls, fields: dict[str, Any]) -> "Config":
        """Read the fields of config.json. Raises CheckpointError, naming the field that is missing or not supported."""
        fields = hf_config.with_defaults(fields, DEFAULTS)
        window = hf_config.optional_integer(fields, "sliding_window")
        rope, local_rope = hf_rope.ropes_by_type(
            fields, size=hf_config.head_dim(fields), theta=THETA, local_theta=THETA
        )
        return cls(
            **hf_config.as_llama(fields),
            attention_bias=hf_config.flag(fields, "attention_bias"),
            sliding_windows=hf_config.periodic_windows(fields, window, period=4),
            rope=rope,
            local_rope=local_rope,
        )


def layers(
    params: Params, config: Config, x: Float[Array, "T E"], batch: Batch, kv_cache: KVCache, span: range
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run these layers: see `Family.layers`."""
    norm = functools.partial(rms_norm, eps=config.norm_eps)
    norm_heads = functools.partial(olmo2.norm_heads_together, norm)
    attends = windowed_attends(config, batch, scale=config.head_dim**-0.5, norm=norm_heads)
    return plain_layers(params, config, x, batch, kv_cache, span, attend=attends, norm=norm)


FAMILY = Family(
    Config=Config,
    param_specs=olmo2.param_specs,
    layers=layers,
    doc=__doc__,
    features=olmo2.FAMILY.features,
    own_layers=olmo2.FAMILY.own_layers,
)
