"""StableLM 3B and 2 (Bellagente et al. 2024, arXiv:2402.17834): Llama with layer norms and partial rotation."""

from dataclasses import replace
from typing import Any

from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.layer import ONE_NORM, Arrangement
from jaxserve.layers.names import Names
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.models import hf_config, hf_rope
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = {
    "vocab_size": 50304, "intermediate_size": 6912, "hidden_size": 2560, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "hidden_act": "silu", "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-05
}  # fmt: skip


def _read(fields: dict[str, Any]) -> DecoderConfig:
    head_dim = hf_config.quotient(fields, "hidden_size", "num_attention_heads")
    is_parallel = hf_config.flag(fields, "use_parallel_residual")
    return read_config(
        DecoderConfig,
        fields,
        head_dim=head_dim,
        head_norm="by head" if hf_config.flag(fields, "qk_layernorm") else None,
        **({"norms": ONE_NORM, "arrangement": Arrangement.PARALLEL} if is_parallel else {}),
        norm_kind="layer",
        norm_eps=hf_config.number(fields, "layer_norm_eps"),
        qkv_bias=hf_config.flag(fields, "use_qkv_bias"),
        rope=hf_rope.rope(fields, size=head_dim, partial_rotary_factor=0.25),
    )


def amend(specs: Params, config: DecoderConfig) -> Params:
    """Declare the norm of each head as the tensor of its own that it is in the checkpoint."""
    for layer in specs["layers"] if config.head_norm is not None else ():
        for norm in (layer["attention"]["q_norm"], layer["attention"]["k_norm"]):
            gain: ParamSpec = norm["gain"]
            module = gain.source[0].removesuffix(".weight")
            sources = tuple(f"{module}.norms.{index}.weight" for index in range(gain.shape[0]))
            norm["gain"] = replace(gain, source=sources, source_shapes=(gain.shape[1:],) * len(sources))
    return specs


NAMES = Names(q_norm="q_layernorm", k_norm="k_layernorm")
FAMILY = Family(
    DecoderConfig, DEFAULTS, _read, names=NAMES, amend=amend, doc=__doc__, features=("QK norm", "parallel blocks")
)
