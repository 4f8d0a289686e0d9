"""Which layers have block tables and pools in common, for the shapes of known models, and what that costs."""

import jax.numpy as jnp
import pytest

from jaxserve.execution.kv_layout import kv_layout
from jaxserve.layers.cache import SeveralSpecs, hold_in
from jaxserve.layers.paged_kv import KVSpec


def layout_of(windows, **options):
    return kv_layout(tuple(KVSpec(1, 8, window) for window in windows), **{"max_model_len": 32768} | options)


def period(num_layers, every, window=512):
    return [window if (index + 1) % every else None for index in range(num_layers)]


@pytest.mark.parametrize("window", [None, 4096])
def test_layers_of_one_kind_are_one_group_with_a_pool_each(window):
    layout = layout_of([window] * 5)
    assert layout.windows == (window,)
    assert layout.group_of_layer == (0,) * 5
    assert layout.pool_of_layer == (0, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("windows", "size", "num_full", "num_local"),
    [
        (period(26, 6), 4, 1, 6),  # Gemma 3 1B: 4 and 22
        (period(34, 6), 5, 1, 6),
        (period(48, 6), 8, 1, 5),
        (period(62, 6), 11, 1, 5),
        (period(26, 2, 4096), 13, 1, 1),  # Gemma 2 2B
        ([None] * 28 + [512] * 52, 28, 1, 2),  # as Qwen 2 may be
        ([None] + [512] * 3, 1, 1, 3),
    ],
)
def test_groups_of_equal_size(windows, size, num_full, num_local):
    layout = layout_of(windows)
    assert len(layout.pool_specs) == size
    assert (layout.windows.count(None), len(layout.windows) - layout.windows.count(None)) == (num_full, num_local)
    places = list(zip(layout.group_of_layer, layout.pool_of_layer, strict=True))
    assert len(set(places)) == len(windows), "two layers in one place"
    assert [layout.windows[group] for group, _ in places] == windows
    assert len(layout.windows) * size <= 1.1 * len(windows)
    assert layout.layers_by_window == {window: windows.count(window) for window in windows}


def test_a_window_that_no_sequence_outgrows_is_none():
    assert layout_of(period(6, 2), max_model_len=512).windows == (None,)
    assert set(layout_of(period(6, 2), max_model_len=513).windows) == {None, 512}


@pytest.mark.parametrize(("windows", "widest"), [((512, None), None), ((512, 1024), 1024)])
def test_layers_of_different_shapes_give_back_what_none_of_them_sees(windows, widest):
    specs = (KVSpec(1, 8, windows[0]), KVSpec(2, 8, windows[1]))
    layout = kv_layout(specs, max_model_len=32768)
    assert (layout.windows, layout.pool_specs, layout.pool_of_layer) == ((widest,), specs, (0, 1))


@pytest.mark.parametrize(
    ("counts", "shapes", "of_groups"),
    [((25, 5), ((8, 256), (2, 512)), 8), ((50, 10), ((16, 256), (4, 512)), 8), ((12, 3), ((1, 256), (1, 512)), 5)],
)  # Gemma 4 26B-A4B, 31B, E2B
def test_layers_of_two_shapes_have_groups_of_their_own_where_that_saves_memory(counts, shapes, of_groups):
    every = sum(counts) // counts[1]
    specs = tuple(KVSpec(*shapes[window is None], window) for window in period(sum(counts), every, window=1024))
    layout = kv_layout(specs, max_model_len=131072)
    assert len(layout.windows) == of_groups
    places = list(zip(layout.group_of_layer, layout.pool_of_layer, strict=True))
    assert len(set(places)) == len(specs), "two layers in one place"
    for spec, (group, pool) in zip(specs, places, strict=True):
        assert (layout.windows[group], layout.pool_specs[pool]) == (
            spec.sliding_window,
            KVSpec(*shapes[spec.sliding_window is None]),
        )
    assert layout.layers_by_window == dict(zip((1024, None), counts, strict=True))
    assert held(layout, 8192) < 0.8 * held(kv_layout(specs, max_model_len=1024), 8192)
    assert len(kv_layout(specs, max_model_len=1536).windows) == 1, "of short sequences little is given back"


def held(layout, length):
    """Return the values of keys in the blocks of a sequence of this length."""
    in_a_block = sum(spec.num_kv_heads * spec.head_dim for spec in layout.pool_specs)
    return in_a_block * sum(min(length, window or length) for window in layout.windows)


def test_layers_that_read_what_others_keep_have_their_place():
    own = [KVSpec(1, 8, 512), KVSpec(1, 8), KVSpec(1, 8, 512), KVSpec(1, 8)]
    layout = kv_layout((*own, KVSpec(1, 8, 512, source=2), KVSpec(1, 8, source=1)), max_model_len=32768)
    assert layout.pool_specs == kv_layout(tuple(own), max_model_len=32768).pool_specs
    places = list(zip(layout.group_of_layer, layout.pool_of_layer, strict=True))
    assert places == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 1), (1, 0)]
    different = (KVSpec(1, 8, 512), KVSpec(2, 8), KVSpec(2, 8, source=1))
    assert kv_layout(different, max_model_len=32768).pool_of_layer == (0, 1, 1)


def test_layers_may_keep_a_state_beside_what_they_attend_to():
    attended, state = KVSpec(1, 8), State(1, 8)
    specs = (SeveralSpecs((attended, state)),) * 2
    layout = kv_layout(specs, max_model_len=32768)
    assert (layout.windows, layout.pool_specs, layout.num_states) == ((None,), specs, 2)
    assert layout.layers_by_window == {None: 2}
    assert [spec.parts[0].dtype for spec in hold_in(specs, jnp.dtype(jnp.int8))] == [jnp.dtype(jnp.int8)] * 2
    with pytest.raises(ValueError, match="attend to all tokens"):
        SeveralSpecs((KVSpec(1, 8, 512), state))


class State(KVSpec):
    """The spec of a layer that keeps a state."""

    keeps_state = True


@pytest.mark.parametrize(
    ("windows", "of_group", "layers_by_window"),
    [((), 1, {}), ((512,), 512, {512: 1}), ((512, 512, None), None, {None: 3})],
)
def test_layers_that_keep_a_state_hold_no_block(windows, of_group, layers_by_window):
    specs = (State(1, 8), *(KVSpec(1, 8, window) for window in windows), State(1, 8))
    layout = kv_layout(specs, max_model_len=32768)
    assert (layout.windows, layout.pool_specs, layout.num_states) == ((of_group,), specs, 2)
    assert layout.layers_by_window == layers_by_window
