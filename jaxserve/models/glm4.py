"""GLM 4 (GLM Team 2024, arXiv:2406.12793) of release 0414: norms before and after each block, partial rotation."""

import functools

from jaxtyping import Array, Float

from jaxserve.layers.attention import self_attention
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.decoder import plain_layers
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.params import Params
from jaxserve.layers.rope import rotations
from jaxserve.models import glm
from jaxserve.models.family import Family

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_self_attn_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_mlp_layernorm",
}
"""The norms of a layer and their names in checkpoints."""


def layers(
    params: Params, config: glm.Config, x: Float[Array, "T E"], batch: Batch, kv_cache: KVCache, span: range
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run these layers: see `Family.layers`."""
    rotation = rotations(config.rope, batch.positions)
    norm = functools.partial(rms_norm, eps=config.norm_eps)
    attend = functools.partial(self_attention, rotation=rotation)
    return plain_layers(params, config, x, batch, kv_cache, span, attend=attend, norm=norm)


FAMILY = Family(
    Config=glm.Config,
    param_specs=functools.partial(glm.param_specs, norms=NORMS),
    layers=layers,
    doc=__doc__,
    features=("norms around blocks",),
    own_layers="norms around blocks",
)
