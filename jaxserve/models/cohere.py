"""Command R (Cohere 2024, huggingface.co/CohereForAI/c4ai-command-r-v01): attention parallel to the feed-forward."""

import dataclasses
from typing import Any, override

from jaxtyping import Array, Float

from jaxserve.layers.context import StepContext
from jaxserve.layers.decoder import BiasedConfig
from jaxserve.layers.layer import ONE_NORM, Arrangement
from jaxserve.layers.names import Names
from jaxserve.layers.norm import Norm
from jaxserve.layers.params import Params
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family, logits
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 256000, "hidden_size": 8192, "intermediate_size": 22528, "logit_scale": 0.0625,
    "num_hidden_layers": 40, "num_attention_heads": 64, "hidden_act": "silu", "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-05, "tie_word_embeddings": True
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(BiasedConfig):
    """The shape of one Command R."""

    use_qk_norm: bool
    logit_scale: float

    @property
    @override
    def norm(self) -> Norm:
        """The norm before the blocks, and those of queries and keys."""
        return Norm(eps=self.norm_eps, kind="layer", has_bias=False)


def read[C: Config](cls: type[C], fields: dict[str, Any], **own: Any) -> C:
    """Read the Config of a Command R or of one of its relatives, which read `own`."""
    norm_eps = hf_config.number(fields, "layer_norm_eps")
    return read_config(cls, fields, norm_eps=norm_eps, norms=ONE_NORM, arrangement=Arrangement.PARALLEL, **own)


def _read(fields: dict[str, Any]) -> Config:
    return read(
        Config,
        fields,
        head_norm="by head" if hf_config.flag(fields, "use_qk_norm") else None,
        rope=hf_rope.rope(fields, theta=500000.0),
    )


def head(params: Params, config: Any, hidden: Float[Array, "N E"], context: StepContext) -> Float[Array, "N V"]:
    """Return scaled logits in float32."""
    return logits(params, config, hidden, context) * config.logit_scale


NAMES = Names(is_interleaved=True)
FAMILY = Family(Config, DEFAULTS, _read, names=NAMES, head=head, doc=__doc__, features=("parallel blocks",))
