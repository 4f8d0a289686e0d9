"""Which static scales of keys and values a checkpoint has, under the names that converters give them."""

import pathlib
from collections.abc import Mapping

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.layers.kv_scales import KVScales, num_kv_heads
from jaxserve.layers.params import Params
from jaxserve.loading import store_manifest
from jaxserve.loading.huggingface import StoredTensor, named_tensors


def static_scales(path: str | pathlib.Path, specs: Params) -> tuple[KVScales | None, ...]:
    """Return the scales of each layer that has any; empty if no layer does, or if `path` is no directory of tensors.

    Raises CheckpointError for a scale that is not positive, one for keys without one for values, and one that is
    neither for all heads nor for each.
    """
    if not any(pathlib.Path(path).glob("*.safetensors")) or store_manifest.is_store(path):
        return ()
    with named_tensors(path, specs) as tensors:
        found = tuple(_of_layer(layer["attention"], tensors) for layer in specs["layers"])
    return found if any(found) else ()


def _of_layer(attention: Params, tensors: Mapping[str, StoredTensor]) -> KVScales | None:
    num_heads = num_kv_heads(attention)
    if num_heads is None:
        return None
    block = attention["out"].source[0].rsplit(".", 2)[0]
    projections = [name.removesuffix(".weight") for name in attention["qkv"].source] if "qkv" in attention else []

    def stored(kind: str, index: int) -> list[str]:
        modules = (block, f"{block}.attn", f"{block}.{kind}_proj", f"{block}.qkv_proj", *projections[-index:][:1])
        names = (*(f"{module}.{kind}_scale" for module in modules), f"{block}.{kind}_proj.output_scale")
        return [name for name in dict.fromkeys(names) if name in tensors]

    of_keys, of_values = stored("k", 2), stored("v", 1)
    names = (*of_keys, *of_values) or (*stored("kv", 1),)
    if not names:
        return None
    if bool(of_keys) != bool(of_values) or len(names) > 2:
        raise CheckpointError(f"{block}: there must be one k_scale and one v_scale, or one kv_scale, got {names}")
    shapes = []
    for name in names:
        values = np.asarray(tensors[name].read(), np.float32)
        if values.size not in (1, num_heads):
            raise CheckpointError(f"{name} must have one value or {num_heads}, one a KV head, got {values.shape}")
        if not (np.isfinite(values) & (values > 0)).all():
            raise CheckpointError(f"{name} must be positive and finite, got {values.ravel()[:8].tolist()}")
        shapes.append(values.shape)
    return KVScales(names, tuple(shapes))
