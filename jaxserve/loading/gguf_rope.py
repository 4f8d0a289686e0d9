"""Convert the metadata and tensors of a GGUF file about rotary embedding to fields of config.json. No jax."""

import math
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.loading.gguf import GGUFFile
from jaxserve.loading.gguf_keys import get, number, positive_integer, refuse

ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that belong to the config: factors of the wavelengths of rotary embedding."""


LOG_MULTIPLIERS = {"deepseek2": 10, "mistral3": 1, "mistral4": 10}
"""What turns `yarn_log_multiplier` into `mscale_all_dim`."""
OWN_BASE_IN_WINDOWS = ("gemma3", "gemma3n", "mellum", "mimo2", "olmo2")
"""Architectures whose layers with a window may rotate by a base of their own."""


def rope_fields(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    """Return `rope_parameters` for heads of this size. Raises CheckpointError for what is missing or not supported."""
    rotated = positive_integer(file, "rope.dimension_count", head_dim)
    fields: dict[str, Any] = {
        "rope_theta": get(file, "rope.freq_base", 10000.0),
        # The next float above the quotient, so that its product with head_dim does not round down.
        "partial_rotary_factor": 1.0 if rotated == head_dim else math.nextafter(rotated / head_dim, 2.0),
    }
    if file.architecture not in OWN_BASE_IN_WINDOWS:
        refuse(file, **{"rope.freq_base_swa": fields["rope_theta"]})
    refuse(file, **{"rope.dimension_count_swa": rotated})
    # As in llama.cpp: scaling is linear unless the file says otherwise; the factor once had another name.
    factor = get(file, "rope.scaling.factor", get(file, "rope.scale_linear"))
    scaling = get(file, "rope.scaling.type", "linear" if factor else "none")
    attention_factor = get(file, "rope.scaling.attn_factor")
    is_longrope = file.architecture in ("phi3", "phimoe") and "rope_factors_long.weight" in file.tensors
    if not is_longrope and attention_factor not in (None, 1.0):
        name = f"{file.architecture}.rope.scaling.attn_factor"
        raise CheckpointError(f"{file.path}: {name} {attention_factor!r} is not supported")
    if "rope_freqs.weight" in file.tensors:
        factors = _rope_factors(file, "rope_freqs.weight", rotated)
        return fields | {"rope_type": "frequency_factors", "factors": factors}
    if is_longrope:
        fields |= {
            "rope_type": "longrope",
            "short_factor": _rope_factors(file, "rope_factors_short.weight", rotated),
            "long_factor": _rope_factors(file, "rope_factors_long.weight", rotated),
            "original_max_position_embeddings": positive_integer(file, "rope.scaling.original_context_length"),
        }
        return fields | ({} if attention_factor is None else {"attention_factor": attention_factor})
    if scaling == "linear":
        return fields | {"rope_type": "linear", "factor": factor}
    if scaling == "yarn":
        return fields | {"rope_type": "yarn", "factor": factor, **_yarn_fields(file)}
    if scaling != "none":
        raise CheckpointError(
            f"{file.path}: rope.scaling.type {scaling!r} is not supported, only none, linear and yarn"
        )
    return fields


def _yarn_fields(file: GGUFFile) -> dict[str, Any]:
    prefix = "rope.scaling.yarn_"
    refuse(file, **{f"{prefix}attn_factor": 1.0, f"{prefix}ext_factor": 1.0})
    fields = {
        "original_max_position_embeddings": positive_integer(
            file, "rope.scaling.original_context_length", positive_integer(file, "context_length")
        ),
        "beta_fast": number(file, f"{prefix}beta_fast", 32.0),
        "beta_slow": number(file, f"{prefix}beta_slow", 1.0),
    }
    if file.architecture not in LOG_MULTIPLIERS:
        refuse(file, **{f"{prefix}log_multiplier": 0.0})
        return fields
    # In float32. No file has mscale, which is equal to it in published models.
    multiplier = round(LOG_MULTIPLIERS[file.architecture] * number(file, f"{prefix}log_multiplier", 0.0), 6)
    return fields | {"mscale": multiplier, "mscale_all_dim": multiplier}


def _rope_factors(file: GGUFFile, name: str, rotated: int) -> list[float]:
    if name not in file.tensors:
        raise CheckpointError(f"{file.path} has no tensor {name}")
    if complaint := file.tensors[name].complaint((rotated // 2,)):
        raise CheckpointError(f"{file.path}: {name} {complaint}")
    return file.tensors[name].read().astype(np.float64).tolist()
