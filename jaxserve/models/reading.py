"""Read a family's Config from the fields of a config.json."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxserve.models import hf_config, hf_rope

LLAMA: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
}
"""Defaults that Llama's config has in transformers, and in part those of most of its relatives."""

_READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "num_layers": lambda fields: hf_config.integer(fields, "num_hidden_layers"),
    "num_heads": lambda fields: hf_config.integer(fields, "num_attention_heads"),
    "num_kv_heads": hf_config.num_kv_heads,
    "head_dim": hf_config.head_dim,
    "norm_eps": lambda fields: hf_config.number(fields, "rms_norm_eps"),
    "activation": hf_config.activation,
    "rope": hf_rope.rope,
    "expert_size": lambda fields: hf_config.integer(fields, "moe_intermediate_size"),
    "sparse_layers": lambda fields: (True,) * hf_config.integer(fields, "num_hidden_layers"),
    "sliding_windows": lambda fields: (None,) * hf_config.integer(fields, "num_hidden_layers"),
}
"""How fields of a `layers.decoder.DecoderConfig`, or of a `mixture.Config`, are read that have other names in
config.json, or defaults.
"""

_BY_TYPE: dict[Any, Callable[[dict[str, Any], str], Any]] = {
    bool: hf_config.flag,
    int: hf_config.integer,
    float: hf_config.number,
    int | None: hf_config.optional_integer,
    float | None: hf_config.optional_number,
}


def read_config[C](cls: type[C], fields: dict[str, Any], **own: Any) -> C:
    """Return a family's Config, of which `own` is read by the family.

    Of what is left, fields of a `layers.decoder.DecoderConfig` are read as Llama's, others by their types, under the
    names that they have in config.json too. Fields with a default keep it.
    """
    for field in dataclasses.fields(cls):  # pyright: ignore[reportArgumentType]
        if field.init and field.name not in own and field.default is dataclasses.MISSING:
            reader = _READERS.get(field.name)
            own[field.name] = _BY_TYPE[field.type](fields, field.name) if reader is None else reader(fields)
    return cls(**own)
