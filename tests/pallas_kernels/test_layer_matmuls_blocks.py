"""CTAs of `layer_matmuls` and `decode_layer` all at once, in any order: counters, the ring, shared tiles."""

from typing import Any

import jax
import numpy as np
import pytest
import test_decode_layer_kernel
import test_layer_matmuls
from depths import quick_first
from emulated_grid import emulate
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.device import counters, products, registers
from pallas_kernels.layer_matmuls import attention, device, kernel, sm90
from pallas_kernels.layer_matmuls.sm90 import Config, decode_layer_sm90, layer_matmuls_sm90
from pallas_kernels.paging import tiles

NUM_SMS = 6
ROWS = 64

# Sizes, the use of shared memory, and for o, gate and up, down, qkv: rounds, and CTAs that share a tile.
MATMULS = {
    "1 row": (
        {"num_rows": 1, "depth": 256, "hidden": 192, "inner": 128, "outputs": 72},
        Config(slot_bytes=8192, w_slots=3, x_bytes=8192),
        [(1, 1)] * 4,
    ),
    "8 rows, no qkv": (
        {"num_rows": 8, "depth": 128, "hidden": 320, "inner": 128, "outputs": None},
        Config(slot_bytes=8192, w_slots=4, x_bytes=4096, bytes_in_flight=8192),
        [(1, 1)] * 3,
    ),
    "16 rows in rounds": (
        {"num_rows": 16, "depth": 128, "hidden": 832, "inner": 448, "outputs": 64},
        Config(slot_bytes=16384, w_slots=2, x_bytes=16384),
        [(2, 1), (2, 1), (2, 1), (1, 1)],
    ),
    "blocks without a tile": (
        {"num_rows": 3, "depth": 64, "hidden": 64, "inner": 448, "outputs": 64},
        Config(slot_bytes=16384, w_slots=3, x_bytes=8192),
        [(1, 1), (2, 1), (1, 1), (1, 1)],
    ),
    "64 rows, shared tiles": (
        {"num_rows": 64, "depth": 512, "hidden": 320, "inner": 448, "outputs": 328},
        Config(slot_bytes=16384, w_slots=3, x_bytes=65536, first_bytes_in_flight=16384),
        [(1, 2), (2, 1), (1, 2), (1, 2)],
    ),
}


class Device:
    """Replaces `layer_matmuls.device` and that of paged attention."""

    def __init__(self, grid):
        self.grid = grid
        self.signal, self.wait = grid.signal, grid.wait

    def clear(self, counter, **_):
        self.grid.clear(counter)

    def load_columns(self, ref, first, num_columns, **_):
        """Load columns, zeros beyond the last one."""
        there = self.grid.load(ref.part((slice(None), _columns(ref, first, num_columns))))
        return _pad_rows(np.pad(np.asarray(there, np.float32), ((0, 0), (0, num_columns - there.shape[1]))))

    def store_columns(self, ref, x, first, **_):
        """Write the rows and columns that are inside the array."""
        columns = _columns(ref, first, x.shape[1])
        self.grid.store(
            ref.part((slice(None), columns)), np.asarray(x).astype(ref.dtype)[: ref.shape[0], : columns.size]
        )

    def load_row_sums(self, ref, **_):
        return _pad_rows(self.grid.load(ref))

    def store_row_sums(self, ref, sums, column, **_):
        self.grid.store(ref.part((slice(None), int(column))), sums[: ref.shape[0]])

    def store_first_rows(self, ref, x, **_):
        self.grid.store(ref, x[: ref.shape[0]])

    def store_heads(self, ref, x, row, first, start, number, **_):
        size = x.shape[1]
        for i in range(min(len(x), number - int(start))):
            self.grid.store(ref.part((int(row), pl.Slice(int(first) + (int(start) + i) * size, size))), x[i])


def _columns(ref, first, number):
    """Return the slice of these columns that is inside the array."""
    return pl.Slice(min(int(first), ref.shape[1]), max(min(number, ref.shape[1] - int(first)), 0))


def _pad_rows(x):
    """To 64, with the last one again."""
    return np.asarray(x, np.float32)[np.minimum(np.arange(ROWS), len(x) - 1)]


def emulate_layers(monkeypatch, seed=0) -> Any:
    grid = emulate(monkeypatch, kernel, products, attention, tiles, seed=seed)
    test_layer_matmuls.cut_for(monkeypatch, NUM_SMS)
    of_blocks = Device(grid)
    for name in ("signal", "wait", "clear", "load_columns", "store_columns", "load_row_sums", "store_row_sums"):
        monkeypatch.setattr(device, name, getattr(of_blocks, name))
    monkeypatch.setattr(device, "store_heads", of_blocks.store_heads)
    monkeypatch.setattr(device, "store_vector", of_blocks.store_first_rows)
    monkeypatch.setattr(counters, "signal", grid.signal)
    monkeypatch.setattr(counters, "take", grid.wait_and_take)
    monkeypatch.setattr(registers, "store_first_rows", of_blocks.store_first_rows)
    return grid


def run(monkeypatch, name, seed, fault=lambda grid, monkeypatch: None):
    sizes, config, expected = MATMULS[name]
    case = test_layer_matmuls.make_case(**sizes)
    grid = emulate_layers(monkeypatch, seed)
    fault(grid, monkeypatch)
    matmuls = []
    cut = sm90.cut
    monkeypatch.setattr(sm90, "cut", lambda *args: matmuls.append(cut(*args)) or matmuls[-1])
    with jax.disable_jit():
        got = layer_matmuls_sm90(*case, activation=jax.nn.silu, eps=test_layer_matmuls.EPS, config=config)
    assert [(matmul.rounds, matmul.split) for matmul in matmuls] == expected
    test_layer_matmuls.check(got, case)


@pytest.mark.parametrize("seed", quick_first(range(2)))
@pytest.mark.parametrize("name", quick_first(MATMULS))
def test_any_order_of_matmuls(monkeypatch, name, seed):
    run(monkeypatch, name, seed)


# Lengths of contexts, sizes, and the use of shared memory.
LAYERS = {
    "cut contexts": ([5, 0, 1, 300, 64, 65, 17], {}, Config(slot_bytes=8192, w_slots=3, x_bytes=16384)),
    "one of many parts": (
        [128, 129, 0, 3, 700, 2, 1, 16, 33],
        {"queries": 5, "head_dim": 128, "num_kv_heads": 1, "outputs": None},
        Config(slot_bytes=16384, w_slots=4, x_bytes=16384, bytes_in_flight=16384),
    ),
    "nothing but padding": ([0, 0], {"block_size": 8}, Config(slot_bytes=8192, w_slots=2, x_bytes=8192)),
    "more blocks than work": ([20], {"block_size": 64}, Config(slot_bytes=8192, w_slots=5, x_bytes=8192)),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", quick_first(range(2)))
@pytest.mark.parametrize("name", quick_first(LAYERS))
def test_any_order_of_a_layer(monkeypatch, name, seed):
    seq_lens, sizes, config = LAYERS[name]
    case = test_decode_layer_kernel.make_case(seq_lens, **sizes)
    emulate_layers(monkeypatch, seed)
    scale = 0.125
    with jax.disable_jit():
        of_layer = {"scale": scale, "activation": jax.nn.silu, "eps": test_decode_layer_kernel.EPS}
        got = decode_layer_sm90(**case, **of_layer, config=config)
    if any(seq_lens):  # else it is enough that nothing waits for ever, or leaves a counter
        test_decode_layer_kernel.check(got, case, scale)


def _give_slots_back_unread(grid, monkeypatch):
    monkeypatch.setattr(kernel, "wait_until_free", lambda *_: None)


def _take_rows_that_are_not_there(grid, monkeypatch):
    monkeypatch.setattr(device, "wait", lambda *_, **__: None)


def _signal_before_stores(grid, monkeypatch):
    def signal(counter, **_):
        grid.pause()
        counter.write(counter.read() + 1)

    monkeypatch.setattr(device, "signal", signal)


def _free_steps_under_way(grid, monkeypatch):
    monkeypatch.setattr(plgpu, "wgmma_wait", lambda _: None)


def _leave_counters(grid, monkeypatch):
    monkeypatch.setattr(kernel, "_clear_counters", lambda *_: None)


def _take_sums_that_have_not_come(grid, monkeypatch):
    def wait(barrier):
        if barrier is not grid.shared[grid.current.block][-1]:
            grid.barrier_wait(barrier)

    monkeypatch.setattr(plgpu, "barrier_wait", wait)


def _count_for_all_but_one(grid, monkeypatch):
    signal = grid.signal

    def all_but_one(counter, **options):
        if grid.current.block != 1:
            signal(counter, **options)

    monkeypatch.setattr(device, "signal", all_but_one)


WRONG_RESULT = r"^assert np\.float64"
LEFT_COUNTER = "a counter that the next layer does not find as it was"
FAULTS = {
    _give_slots_back_unread: "all wait",
    # without the wait, a counter is cleared before others count
    _take_rows_that_are_not_there: f"{LEFT_COUNTER}|{WRONG_RESULT}",
    _signal_before_stores: WRONG_RESULT,
    _free_steps_under_way: WRONG_RESULT,
    _leave_counters: LEFT_COUNTER,
    _take_sums_that_have_not_come: f"has ended|nobody has waited for|{WRONG_RESULT}",
    _count_for_all_but_one: "all wait",
}


@pytest.mark.parametrize("fault", quick_first(FAULTS), ids=lambda fault: fault.__name__.strip("_"))
def test_faults_are_found(monkeypatch, fault):
    with pytest.raises(AssertionError, match=FAULTS[fault]):
        run(monkeypatch, "64 rows, shared tiles", 0, fault)
