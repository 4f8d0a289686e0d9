"""GLM 4 (GLM Team 2024, arXiv:2406.12793) of release 0414: norms before and after each block, partial rotation."""

import functools
from dataclasses import replace

from jaxserve.layers.layer import SANDWICH_NORMS
from jaxserve.models import glm

NAMES = replace(glm.NAMES, attention_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm")
READ = functools.partial(glm.read, norms=SANDWICH_NORMS)
FAMILY = replace(glm.FAMILY, read=READ, names=NAMES, doc=__doc__, features=("norms around blocks",))
