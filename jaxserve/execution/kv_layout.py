"""KVLayout: which layers have their block tables in common, and which have a pool in common, given what each keeps and
how far back it attends.

Layers with equal windows form KV groups of one size g, and there are g pools: the layers of a group have one pool each,
and the layers of all groups use the same g pools. So a block, which is one block of every pool, has the same size
whichever group it is given to, and memory is never divided between layers that keep everything and layers that forget.
Gemma 3 with 4 layers of one kind and 22 of the other has g = 4, and the last of its 7 groups leaves two pools unused.

Layers of two shapes, as in Gemma 4, have groups and pools of their own. A block is one of every pool all the same, so
the pools of one shape are empty in blocks of the other's groups. Where sequences are long, that takes less memory than
one group that gives no block back. `TYPICAL_LENGTH` decides whether there are several groups, and how large they are.

Layers that read the keys and values of another have its group and its pool, and keep nothing.

Layers that keep a state need no blocks. Schedulers count tokens in blocks all the same, so a model of such layers alone
has blocks that take no memory and that are released as soon as their tokens are computed.
"""

import collections
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, cast

from jaxserve.layers.cache import CacheSpec, parts_of, source_of
from jaxserve.layers.paged_kv import KVSpec

MAX_PADDING = 0.1
"""Largest fraction of a kind's layers that may be missing from its last group. Larger groups mean fewer block
tables.
"""

TYPICAL_LENGTH = 8192
"""Length in tokens of the sequences for which the layout of layers of two shapes takes the least memory."""
MAX_GROUPS = 8
"""Most groups of layers of two shapes: each has a block table for every row of a step."""

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
    """Return the layout for these layers and for sequences of at most `max_model_len` tokens."""
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
    shapes = dict.fromkeys(_without_window(spec) for spec in kv_specs)
    widest = None if None in layers_of else max(window for window in layers_of if window is not None)
    layers = tuple(range(len(kv_specs)))
    together = KVLayout((widest,), (0,) * len(layers), layers, kv_specs)
    if len(layers_of) == 1:
        return together
    if len(shapes) == 1:
        return _layout_in_groups(kv_specs, windows, [_group_size([len(layers) for layers in layers_of.values()])])
    if len(shapes) > 2 or not all(isinstance(spec, KVSpec) and _of_tokens(spec) for spec in kv_specs):
        return together
    length = min(max_model_len, TYPICAL_LENGTH)
    kinds = collections.Counter((_without_window(spec), window) for spec, window in zip(kv_specs, windows, strict=True))
    most = [max(count for (other, _), count in kinds.items() if other == shape) for shape in shapes]
    layouts = [together]
    for sizes in itertools.product(*(range(1, count + 1) for count in most)):
        size_of = dict(zip(shapes, sizes, strict=True))
        if sum(-(-count // size_of[shape]) for (shape, _), count in kinds.items()) <= MAX_GROUPS:
            layouts.append(_layout_in_groups(kv_specs, windows, sizes))
    return min(layouts, key=lambda layout: _values_held(layout, length))


def _layout_in_groups(kv_specs: tuple[CacheSpec, ...], windows: list[int | None], sizes: Sequence[int]) -> KVLayout:
    """Return the layout of groups of layers of one shape and window, at most as many as `sizes` has for the shape."""
    shapes = list(dict.fromkeys(map(_without_window, kv_specs)))
    kinds = [(shapes.index(_without_window(spec)), window) for spec, window in zip(kv_specs, windows, strict=True)]
    first_pool = [sum(sizes[:shape]) for shape in range(len(shapes))]
    group_windows: list[int | None] = []
    places: dict[int, tuple[int, int]] = {}
    for kind in dict.fromkeys(kinds):
        of_kind = [layer for layer, other in enumerate(kinds) if other == kind]
        for layers in itertools.batched(of_kind, sizes[kind[0]]):
            places |= {layer: (len(group_windows), first_pool[kind[0]] + pool) for pool, layer in enumerate(layers)}
            group_windows.append(kind[1])
    return KVLayout(
        windows=tuple(group_windows),
        group_of_layer=tuple(places[layer][0] for layer in range(len(kv_specs))),
        pool_of_layer=tuple(places[layer][1] for layer in range(len(kv_specs))),
        pool_specs=tuple(shape for shape, size in zip(shapes, sizes, strict=True) for _ in range(size)),
    )


def _values_held(layout: KVLayout, length: int) -> int:
    """Return the size of the blocks of a sequence of `length` tokens, in values of keys; all layers keep KV pages."""
    per_token = sum(cast(KVSpec, spec).num_kv_heads * cast(KVSpec, spec).head_dim for spec in layout.pool_specs)
    return per_token * sum(length if window is None else min(window, length) for window in layout.windows)


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
    windows = (None,) * len(layout.windows)  # also where no layer of the model has anything of tokens
    return dataclasses.replace(layout, windows=windows), 0


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
