"""The body of the kernel that adds up what devices have, on devices of NumPy arrays that run in any order.

Pallas's interpreter knows no other device's memory. Here the body that a GPU runs runs once a row of each device, with
`device` replaced: a seed says who is next wherever one device could see what another one does, within rows too. A
device's calls come one after the other, as kernels of a stream do, and nothing else keeps devices together.
"""

import random

import jax.numpy as jnp
import numpy as np
import pytest
from turns import Player, Turns

from pallas_kernels.all_reduce import device, sm90

SIZE, EPS = 8, 1e-5


class Place:
    """A ref: an array of one of the devices, or a part of it."""

    def __init__(self, memories, owner, name, index=()):
        self.memories, self.owner, self.name, self.index = memories, owner, name, index

    def of(self, owner):
        """The same of a device, as an array."""
        array = self.memories[owner][self.name]
        for index in self.index:
            array = array[(*index, ...) if isinstance(index, tuple) else (index, ...)]
        return array

    @property
    def at(self):
        return Parts(self)

    @property
    def shape(self):
        return self.of(self.owner).shape

    @property
    def dtype(self):
        return self.of(self.owner).dtype

    def __getitem__(self, index):
        return self.of(self.owner)[index]

    def __setitem__(self, index, value):
        self.of(self.owner)[index] = value


class Parts:
    """The `.at` of a ref."""

    def __init__(self, place):
        self.place = place

    def __getitem__(self, index):
        place = self.place
        return Place(place.memories, place.owner, place.name, (*place.index, index))


class Devices:
    """N devices with room for R rows, and what is left of their calls."""

    def __init__(self, num_devices, num_rows, seed):
        self.random = random.Random(seed)
        self.memories = [
            {
                "inbox": np.full((1, 2, num_devices, num_rows, SIZE), np.nan, np.float32),
                "arrived": np.zeros((1, num_devices, num_rows), np.int32),
                "calls": np.zeros((1, num_rows), np.int32),
                "ranks": np.array([rank], np.int32),
                "offsets": np.zeros((1, 2, num_devices, 2), np.int32),
            }
            for rank in range(num_devices)
        ]
        self.turns = Turns()

    def run(self, calls):
        """`calls[device]` is a list of (x, part): returns (total, normed) of each call of each device."""
        streams = [self._stream(owner, list(todo)) for owner, todo in enumerate(calls)]
        rows = [row for stream in streams for row in next(stream)]
        try:
            while rows:
                ready = [row for row in rows if row.can_go_on()]
                assert ready, "all devices wait"
                row = self.random.choice(ready)
                self.turns.let_run(row)
                if row.has_ended:
                    rows.remove(row)
                    if not any(other.owner == row.owner for other in rows):
                        rows += next(streams[row.owner], [])
        finally:
            self.turns.stop(rows)
        return [memory["results"] for memory in self.memories]

    def _stream(self, owner, todo):
        """The rows of a device's calls, a list a call; asked for when the last call has ended."""
        memory = self.memories[owner]
        memory["results"] = []
        for x, part in todo:
            memory |= {"x": x, "part": part, "weight": np.ones(SIZE, np.float32)}
            memory |= {"total": np.empty_like(x), "normed": np.empty_like(x)}
            yield [Row(self, owner, row) for row in range(len(x))]
            memory["results"].append((memory["total"], memory["normed"]))

    def pause(self, can_go_on=lambda: True):
        """Let the others run, until the seed chooses this row again."""
        self.turns.pause(can_go_on)


class Row(Player):
    """A thread block."""

    def __init__(self, devices, owner, index):
        super().__init__()
        self.devices, self.owner, self.index = devices, owner, index

    def run(self):
        names = ("x", "part", "weight", "inbox", "arrived", "calls", "ranks", "offsets", "total", "normed")
        sm90._body(*(Place(self.devices.memories, self.owner, name) for name in names), layout=None, eps=EPS)


def replace_device(monkeypatch, devices):
    """By what NumPy can do, in pieces."""

    def load(ref, layout):
        halves = []
        for half in np.split(ref.of(ref.owner), 2):
            devices.pause()
            halves.append(half.copy())
        return jnp.asarray(np.concatenate(halves))

    def send(place, offsets, row, *, layout):
        assert (place.name, offsets.name, offsets.index) == ("inbox", "offsets", ((0, 0),))
        for peer in range(len(devices.memories)):
            for half in (slice(None, SIZE // 2), slice(SIZE // 2, None)):
                devices.pause()
                place.of(peer)[half] = np.asarray(row)[half]

    def tell(counter, offsets, value):
        assert (counter.name, offsets.name, offsets.index) == ("arrived", "offsets", ((0, 1),))
        for peer in range(len(devices.memories)):
            devices.pause()
            counter.of(peer)[...] = value

    def wait(counter, value):
        devices.pause(lambda: np.int32(counter.of(counter.owner) - value) >= 0)

    def store(counter, value):
        devices.pause()
        counter.of(counter.owner)[...] = value

    for function in (send, tell, wait, store):
        monkeypatch.setattr(device, function.__name__, function)
    monkeypatch.setattr(sm90.plgpu, "load", load)
    monkeypatch.setattr(sm90.lax, "axis_index", lambda _: devices.turns.current.index)


def check(monkeypatch, num_devices, num_rows, seed, *, first_call=0):
    """Calls of 1 to all rows, whose parts are whole numbers: exact sums."""
    devices = Devices(num_devices, num_rows, seed)
    for memory in devices.memories:
        memory["calls"][:] = memory["arrived"][:] = first_call
    replace_device(monkeypatch, devices)
    rng = np.random.default_rng(seed)
    calls, want = [[] for _ in range(num_devices)], []
    for _ in range(5):
        x, *parts = rng.integers(-50, 50, (1 + num_devices, rng.integers(1, num_rows + 1), SIZE)).astype(np.float32)
        want.append(x + sum(parts))
        for owner, part in enumerate(parts):
            calls[owner].append((x, part))
    for results in devices.run(calls):
        for (total, normed), expected in zip(results, want, strict=True):
            np.testing.assert_array_equal(total, expected)
            scale = 1 / np.sqrt((expected**2).mean(axis=1, keepdims=True) + EPS)
            np.testing.assert_allclose(normed, expected * scale, rtol=1e-5)


@pytest.mark.parametrize(("num_devices", "num_rows"), [(2, 1), (2, 4), (3, 2), (4, 3)])
@pytest.mark.parametrize("seed", range(5))
def test_in_any_order(monkeypatch, num_devices, num_rows, seed):
    check(monkeypatch, num_devices, num_rows, seed)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_counters_start_over(monkeypatch):
    """After 2^32 calls, and halfway, where they change their sign."""
    for first_call in (-3, 2**31 - 3):
        check(monkeypatch, 2, 2, 0, first_call=first_call)


def test_one_place_for_a_row_would_not_do(monkeypatch):
    """Nor would this test, if it did not find that."""
    monkeypatch.setattr(sm90, "NUM_TURNS", 1)
    with pytest.raises(AssertionError, match="not equal"):
        check(monkeypatch, 2, 4, seed=3)
