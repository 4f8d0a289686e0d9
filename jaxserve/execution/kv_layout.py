"""KVLayout: which layers have their block tables in common, and which have a pool in common, given what each keeps and
how far back it attends.

Layers with equal windows form KV groups of one size g, and there are g pools: the layers of a group have one pool each,
and the layers of all groups use the same g pools. So a block, which is one block of every pool, has the same size
whichever group it is given to, and memory is never divided between layers that keep everything and layers that forget.
Gemma 3 with 4 layers of one kind and 22 of the other has g = 4, and the last of its 7 groups leaves two pools unused.

Layers that read the keys and values of another have its group and its pool, and keep nothing.

Layers that keep a state need no blocks. Schedulers count tokens in blocks all the same, so a model of such layers alone
has blocks that take no memory and that are released as soon as their tokens are computed.
"""

import collections
import dataclasses
import itertools
from typing import Any, cast

from jaxserve.layers.cache import CacheSpec, parts_of, source_of

MAX_PADDING = 0.1
"""Largest fraction of a kind's layers that may be missing from its last group. Larger groups mean fewer block
tables.
"""

ITSELF = 1
"""Window of layers that attend to no token but the one that is computed."""


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """The groups and pools of a model."""

    windows: tuple[int | None, ...]
    """For each group, the number of tokens to which its layers attend; None: all."""
    group_of_layer: tuple[int, ...]
    pool_of_layer: tuple[int, ...]
    pool_specs: tuple[CacheSpec, ...]
    """What the layers of each pool keep."""

    @property
    def layers_by_window(self) -> dict[int | None, int]:
        """The number of layers of each kind, without those that keep only a state."""
        layers = zip(self.group_of_layer, self.pool_of_layer, strict=True)
        return dict(
            collections.Counter(self.windows[group] for group, pool in layers if _of_tokens(self.pool_specs[pool]))
        )

    def pools_of(self, span: range) -> tuple[CacheSpec | None, ...]:
        """Return what each pool keeps, None for pools that no layer of a range has."""
        pools = {self.pool_of_layer[layer] for layer in span}
        return tuple(spec if index in pools else None for index, spec in enumerate(self.pool_specs))

    @property
    def pools_of_states(self) -> tuple[int, ...]:
        """The pools of layers that keep a state: each has its own."""
        return tuple(index for index, spec in enumerate(self.pool_specs) if spec.keeps_state)

    @property
    def num_states(self) -> int:
        """The number of layers that keep a state."""
        return len(self.pools_of_states)


def kv_layout(kv_specs: tuple[CacheSpec, ...], *, max_model_len: int) -> KVLayout:
    """Return the layout for these layers and for sequences of at most `max_model_len` tokens.

    If layers differ in what they keep, they cannot have pools in common: all are one group then, which gives back
    blocks that no layer attends to.
    """
    owners = [layer for layer, spec in enumerate(kv_specs) if source_of(spec) is None]
    layout = _layout_of_owners(tuple(kv_specs[layer] for layer in owners), max_model_len=max_model_len)
    if len(owners) == len(kv_specs):
        return layout
    sources = [layer if (source := source_of(spec)) is None else source for layer, spec in enumerate(kv_specs)]
    places = [owners.index(source) for source in sources]
    return dataclasses.replace(
        layout,
        group_of_layer=tuple(layout.group_of_layer[place] for place in places),
        pool_of_layer=tuple(layout.pool_of_layer[place] for place in places),
    )


def _layout_of_owners(kv_specs: tuple[CacheSpec, ...], *, max_model_len: int) -> KVLayout:
    """Return the layout of layers that keep something each."""
    windows = [_window(spec, max_model_len) for spec in kv_specs if _of_tokens(spec)] or [ITSELF]
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
    group_and_pool = {
        layer: (group, pool) for group, (_, layers) in enumerate(groups) for pool, layer in enumerate(layers)
    }
    return KVLayout(
        windows=tuple(window for window, _ in groups),
        group_of_layer=tuple(group_and_pool[layer][0] for layer in range(len(kv_specs))),
        pool_of_layer=tuple(group_and_pool[layer][1] for layer in range(len(kv_specs))),
        pool_specs=tuple(shapes) * size,
    )


def kv_layout_with(
    kv_specs: tuple[CacheSpec, ...], of_drafter: tuple[CacheSpec, ...], *, max_model_len: int
) -> tuple[KVLayout, int]:
    """Return the layout of a model's layers, and the group whose block tables a drafter's layers use, in pools of their
    own: one that keeps all tokens to which they attend. If there is none, the model's layers keep all tokens.
    """
    layout = kv_layout(kv_specs, max_model_len=max_model_len)
    needed = [_window(spec, max_model_len) for spec in of_drafter]
    for group, window in enumerate(layout.windows):
        if window is None or all(other is not None and other <= window for other in needed):
            return layout, group
    layout = kv_layout(tuple(map(_without_window, kv_specs)), max_model_len=max_model_len)
    return dataclasses.replace(layout, windows=(None,)), 0  # also where no layer of the model has anything of tokens


def _of_tokens(spec: CacheSpec) -> bool:
    """Return true if a layer keeps something of each token."""
    return not all(part.keeps_state for part in parts_of(spec))


def _without_window(spec: CacheSpec) -> CacheSpec:
    return spec if spec.sliding_window is None else dataclasses.replace(cast(Any, spec), sliding_window=None)


def _window(spec: CacheSpec, max_model_len: int) -> int | None:
    """Return the layer's window, or None if it is at least `max_model_len` and can never take effect."""
    return spec.sliding_window if spec.sliding_window is not None and spec.sliding_window < max_model_len else None


def _group_size(counts: list[int]) -> int:
    """Return the largest size for which the last group of no kind, given each kind's number of layers, is padded by
    more than MAX_PADDING.
    """

    def padded(count: int, size: int) -> int:
        return -(-count // size) * size

    return max(
        size
        for size in range(1, max(counts) + 1)
        if all(padded(count, size) <= (1 + MAX_PADDING) * count for count in counts)
    )
