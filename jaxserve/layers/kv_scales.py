"""Static scales of keys and values in 8 bits: weights of a layer's attention, in checkpoints that bring them."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from jaxserve.layers.params import Params, ParamSpec

NAME = "kv_scales"


class KVScales(msgspec.Struct, frozen=True):
    """The tensors that have the scales of one layer's keys, then of its values, or of both; and their shapes."""

    sources: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


def num_kv_heads(attention: Params) -> int | None:
    """Return the number of heads that have scales in a block, 1 for latents; None if it keeps no vectors."""
    return attention["qkv"].shape[0] if "qkv" in attention else 1 if "k_up" in attention else None


def with_kv_scales(specs: Params, scales: Sequence[KVScales | None]) -> Params:
    """Return specs whose layers have static scales, [K, 2] in float32, where `scales` says so."""
    if not any(scales):
        return specs
    return specs | {
        "layers": [
            layer if found is None else layer | {"attention": _with_scales(layer["attention"], found)}
            for layer, found in zip(specs["layers"], scales, strict=True)
        ]
    }


def kv_scales_of(specs: Params) -> tuple[KVScales | None, ...]:
    """Return what `with_kv_scales` was given; empty if no layer has any."""
    declared: list[Any] = [layer["attention"].get(NAME) for layer in specs["layers"]]
    found = (None if spec is None else KVScales(spec.source, spec.source_shapes) for spec in declared)
    return tuple(found) if any(declared) else ()


def _with_scales(attention: Params, scales: KVScales) -> Params:
    num_heads = num_kv_heads(attention)
    assert num_heads is not None
    rows, start = [], 0
    for shape in scales.shapes:
        size = int(np.prod(shape))
        rows.append(np.broadcast_to(start + np.arange(size), num_heads))  # one for all heads, or one for each
        start += size
    spec = ParamSpec(
        shape=(num_heads, 2),
        axes=("kv_heads" if "qkv" in attention else None, None),
        dtype=np.float32,
        source=scales.sources,
        source_shapes=scales.shapes,
        rows=np.stack([rows[0], rows[-1]], axis=1).ravel(),
        init_scale=None,
    )
    return attention | {NAME: spec}
