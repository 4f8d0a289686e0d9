"""KVLayout: which layers of a model share their blocks, and which share a pool. From what each layer keeps and sees.

Layers that look equally far back form groups of one size g, and there are g pools: the layers of a group have one each,
those of the other groups have the same ones. So a block, which is a place in all pools, is of one size whichever group
takes it, and memory is never divided between layers that keep all and those that forget. Gemma 3 with 4 layers of the
one kind and 22 of the other has g = 4, and of its 7 groups the last leaves two places empty.
"""

import collections
import dataclasses
import itertools
from typing import Any, cast

from jaxserve.layers.cache import CacheSpec

MAX_PADDING = 0.1
"""Of the layers of a kind, so many may be missing from its last group. Larger groups mean fewer block tables."""


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """The groups and pools of a model."""

    windows: tuple[int | None, ...]
    """Of each group: to how many tokens its layers attend, None: to all."""
    group_of_layer: tuple[int, ...]
    pool_of_layer: tuple[int, ...]
    pool_specs: tuple[CacheSpec, ...]
    """What the layers of each pool keep."""

    @property
    def is_paged(self) -> bool:
        """Whether blocks hold all that a request has left behind, so that another may continue from them."""
        return all(spec.is_paged for spec in self.pool_specs)

    @property
    def layers_by_window(self) -> dict[int | None, int]:
        """How many layers there are of each kind."""
        return dict(collections.Counter(self.windows[group] for group in self.group_of_layer))


def kv_layout(kv_specs: tuple[CacheSpec, ...], *, max_model_len: int) -> KVLayout:
    """The layout for these layers and sequences of at most `max_model_len` tokens.

    If layers differ in what they keep of a token, they cannot share pools: all are one group then, which gives back
    what none of them looks at.
    """
    windows = [_window(spec, max_model_len) for spec in kv_specs]
    layers_of = {window: [i for i, other in enumerate(windows) if other == window] for window in dict.fromkeys(windows)}
    shapes = {_without_window(spec) for spec in kv_specs}
    if len(layers_of) == 1 or len(shapes) > 1:
        widest = None if None in layers_of else max(window for window in layers_of if window is not None)
        layers = tuple(range(len(kv_specs)))
        return KVLayout((widest,), (0,) * len(layers), layers, kv_specs)

    size = _group_size([len(layers) for layers in layers_of.values()])
    groups = [
        (window, list(layers)) for window, of_kind in layers_of.items() for layers in itertools.batched(of_kind, size)
    ]
    places = {layer: (group, pool) for group, (_, layers) in enumerate(groups) for pool, layer in enumerate(layers)}
    return KVLayout(
        windows=tuple(window for window, _ in groups),
        group_of_layer=tuple(places[layer][0] for layer in range(len(kv_specs))),
        pool_of_layer=tuple(places[layer][1] for layer in range(len(kv_specs))),
        pool_specs=tuple(shapes) * size,
    )


def _without_window(spec: CacheSpec) -> CacheSpec:
    return spec if spec.sliding_window is None else dataclasses.replace(cast(Any, spec), sliding_window=None)


def _window(spec: CacheSpec, max_model_len: int) -> int | None:
    """Return the layer's window, or None if it is at least `max_model_len` and can never take effect."""
    return spec.sliding_window if spec.sliding_window is not None and spec.sliding_window < max_model_len else None


def _group_size(counts: list[int]) -> int:
    """The largest for which no kind, of so many layers each, has its last group padded by more than MAX_PADDING."""

    def padded(count: int, size: int) -> int:
        return -(-count // size) * size

    return max(
        size
        for size in range(1, max(counts) + 1)
        if all(padded(count, size) <= (1 + MAX_PADDING) * count for count in counts)
    )
