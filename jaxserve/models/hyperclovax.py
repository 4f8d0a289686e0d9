"""HyperCLOVA X SEED Think (NAVER 2025, huggingface.co/naver-hyperclovax/HyperCLOVAX-SEED-Think-14B): Granite with norms
before and after each block, and logits that are multiplied.
"""

from dataclasses import replace
from typing import Any

from jaxtyping import Array, Float

from jaxserve.layers.context import StepContext
from jaxserve.layers.layer import PRE_NORMS, SANDWICH_NORMS
from jaxserve.layers.names import Names
from jaxserve.layers.params import Params
from jaxserve.models import granite, hf_config
from jaxserve.models.family import logits
from jaxserve.models.granite import Config

DEFAULTS: dict[str, Any] = granite.DEFAULTS | {"attention_multiplier": None, "use_post_norm": True}


def _read(fields: dict[str, Any]) -> Config:
    if fields["attention_multiplier"] is None:
        fields |= {"attention_multiplier": hf_config.head_dim(fields) ** -0.5}
    has_post_norms = hf_config.flag(fields, "use_post_norm")
    return granite.read(Config, fields, norms=SANDWICH_NORMS if has_post_norms else PRE_NORMS)


def head(params: Params, config: Config, hidden: Float[Array, "N E"], context: StepContext) -> Float[Array, "N V"]:
    """Return scaled logits in float32."""
    return logits(params, config, hidden, context) * config.logits_scaling


NAMES = Names(attention_post_norm="post_norm1", mlp_post_norm="post_norm2")
FAMILY = replace(granite.FAMILY, defaults=DEFAULTS, read=_read, names=NAMES, head=head, doc=__doc__)
