"""The bodies of the kernels that add up partial sums and gather logits, on devices of NumPy arrays that run in any
order.

Pallas's interpreter does not know other devices' memory. Here the body that runs on a GPU runs once per CTA of each
device, with `device` replaced: a seed decides who is next wherever one device could see what another one does, also
within rows. A device's calls come one after the other, as kernels of a stream do, and nothing else synchronises
devices.
"""

import functools
import itertools
import math
import random
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy_lax
import pytest
from depths import quick_first
from jax.experimental import pallas as pl
from turns import Player, Turns

from pallas_kernels.all_gather import sm90 as gathering
from pallas_kernels.all_reduce import sm90 as summing
from pallas_kernels.device import rows
from pallas_kernels.peers import device, exchange

SIZE, EPS = 10, 1e-5
PIECE = 4
"""Values of a row that are copied at a time: the last piece of a row is smaller."""

PIECES = math.ceil(SIZE / PIECE)


class Place:
    """A ref: an array of one of the devices, or a part of it."""

    def __init__(self, memories, owner, name, index=()):
        self.memories, self.owner, self.name, self.index = memories, owner, name, index

    def of(self, owner):
        """Return this part of `owner`'s memory as an array."""
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
        self.of(self.owner)[index if index is ... else int(index)] = value


class Parts:
    """The `.at` of a ref."""

    def __init__(self, target):
        self.target = target

    def __getitem__(self, index):
        target = self.target
        if isinstance(index, pl.Slice):
            index = slice(index.start, index.start + index.size)
        else:
            index = tuple(map(int, index)) if isinstance(index, tuple) else int(index)
        return Place(target.memories, target.owner, target.name, (*target.index, index))


class Kernel(NamedTuple):
    """What devices run: its name, the refs of its results after those of its arguments, and how rows are split."""

    name: str
    body: Any
    arguments: tuple[str, ...]
    results: dict[str, int]
    """Number of parts of each result's rows, by the result's name."""
    num_pieces: int


PEERS = ("inbox", "arrived", "calls", "ranks", "offsets")


class Devices:
    """N devices with buffers for R rows, and their remaining calls, each of the next kernel. A call has at most
    `num_blocks` CTAs.
    """

    def __init__(self, kernels, num_devices, num_rows, seed, *, num_blocks):
        self.kernels, self.num_blocks = kernels, num_blocks
        self.random = random.Random(seed)
        others, pieces = num_devices - 1, kernels[0].num_pieces
        self.memories = [
            {
                "inbox": np.full((1, 2, others, num_rows, SIZE), np.nan, np.float32),
                "arrived": np.zeros((1, others, num_rows, pieces), np.int32),
                "calls": np.zeros((1, num_rows, pieces), np.int32),
                "ranks": np.array([rank], np.int32),
                # instead of bytes: the index of the device
                "offsets": np.stack([[np.arange(num_devices, dtype=np.int32)] * 2]),
            }
            for rank in range(num_devices)
        ]
        self.turns = Turns()

    def run(self, calls):
        """`calls[device]` is a list of arguments: returns the results of each call of each device."""
        streams = [self._stream(owner, list(todo)) for owner, todo in enumerate(calls)]
        blocks = [block for stream in streams for block in next(stream)]
        try:
            while blocks:
                ready = [block for block in blocks if block.can_go_on()]
                assert ready, "all devices wait"
                block = self.random.choice(ready)
                self.turns.let_run(block)
                if block.has_ended:
                    blocks.remove(block)
                    if not any(other.owner == block.owner for other in blocks):
                        blocks += next(streams[block.owner], [])
        finally:
            self.turns.stop(blocks)
        return [memory["done"] for memory in self.memories]

    def _stream(self, owner, todo):
        """Yield the CTAs of a device's calls, one list per call, requested when the previous call has ended."""
        memory = self.memories[owner]
        memory["done"] = []
        for kernel, arguments in zip(itertools.cycle(self.kernels), todo, strict=False):
            memory |= dict(zip(kernel.arguments, arguments, strict=True))
            num_rows = len(memory["part"])
            for name, parts in kernel.results.items():
                memory[name] = np.full((num_rows, parts, SIZE) if parts > 1 else (num_rows, SIZE), np.nan, np.float32)
            num_blocks = min(num_rows * kernel.num_pieces, self.num_blocks)
            yield [Block(self, kernel, owner, index, num_blocks) for index in range(num_blocks)]
            memory["done"].append([memory[name] for name in kernel.results])

    def pause(self, can_go_on=lambda: True):
        """Let the others run, until the seed chooses this CTA again."""
        self.turns.pause(can_go_on)


class Block(Player):
    """A CTA."""

    def __init__(self, devices, kernel, owner, index, num_blocks):
        super().__init__()
        self.devices, self.kernel, self.owner, self.index, self.num_blocks = devices, kernel, owner, index, num_blocks

    def run(self):
        kernel = self.kernel
        names = (*kernel.arguments, *PEERS, *kernel.results)
        kernel.body(*(Place(self.devices.memories, self.owner, name) for name in names), num_blocks=self.num_blocks)


def replace_device(monkeypatch, devices):
    """Replace the device's operations by NumPy's, piece by piece."""

    def load(ref, layout):
        halves = []
        for half in np.split(ref.of(ref.owner), 2):
            devices.pause()
            halves.append(half.copy())
        return jnp.asarray(np.concatenate(halves))

    def peer_of(offset, index):
        assert (offset.name, offset.index[0][:2]) == ("offsets", (0, index))
        return int(offset.of(offset.owner))

    def send(target, offset, row, *, layout):
        for half in (slice(None, len(row) // 2), slice(len(row) // 2, None)):
            devices.pause()
            target.of(peer_of(offset, 0))[half] = np.asarray(row)[half]

    def put(source, target, owner, piece):
        values = slice(int(piece) * PIECE, (int(piece) + 1) * PIECE)
        for half in (slice(None, PIECE // 2), slice(PIECE // 2, None)):
            devices.pause()
            found = source.of(source.owner)[values][half].copy()
            devices.pause()
            target.of(owner)[values][half] = found

    def notify(counters, value):
        for counter, offset in counters:
            assert counter.name == "arrived"
            devices.pause()
            counter.of(peer_of(offset, 1))[...] = value

    def wait(counter, value):
        devices.pause(lambda: np.int32(counter.of(counter.owner) - value) >= 0)

    def store(counter, value):
        devices.pause()
        counter.of(counter.owner)[...] = value

    def copy(source, target, piece):
        put(source, target, target.owner, piece)

    def copy_to_peer(source, target, offset, piece):
        put(source, target, peer_of(offset, 0), piece)

    for function in (send, copy, copy_to_peer, notify, wait, store):
        monkeypatch.setattr(device, function.__name__, function)
    monkeypatch.setattr(rows.plgpu, "load", load)
    monkeypatch.setattr(rows.plgpu, "layout_cast", lambda values, layout: values)
    for module in (rows, summing):
        monkeypatch.setattr(module, "row_layout", lambda size: None)
    monkeypatch.setattr(summing.lax, "axis_index", lambda _: np.int32(devices.turns.current.index))
    monkeypatch.setattr(exchange.lax, "fori_loop", numpy_lax.fori_loop)
    monkeypatch.setattr(exchange.pl, "when", lambda condition: lambda run: run() if condition else None)
    monkeypatch.setattr(summing.lax, "cond", lambda condition, yes, no: yes() if condition else no())


class Overlapping(rows.RowParts):
    """Rows whose threads cannot share them evenly."""

    @property
    def spans(self):
        return [(0, 8), (6, 4)]


SUM = Kernel("sum", functools.partial(summing._body, parts=Overlapping(SIZE)), ("part",), {"total": 1}, 1)
SUM_WITH_NORM = Kernel(
    "sum with norm",
    functools.partial(summing._body_with_norm, parts=Overlapping(SIZE), eps=EPS),
    ("part", "x", "weight"),
    {"total": 1, "normed": 1},
    1,
)


def gather_of(num_devices):
    body = functools.partial(gathering._body, pieces=PIECES)
    return Kernel("gather", body, ("part",), {"gathered": num_devices}, PIECES)


def check(monkeypatch, kernels, num_devices, num_rows, seed, *, first_call=0, num_blocks=100):
    """Call these kernels alternately, with 1 to all rows, whose parts are integers: sums are exact."""
    devices = Devices(kernels, num_devices, num_rows, seed, num_blocks=num_blocks)
    for memory in devices.memories:
        memory["calls"][:] = memory["arrived"][:] = first_call
    replace_device(monkeypatch, devices)
    rng = np.random.default_rng(seed)
    calls, want = [[] for _ in range(num_devices)], []
    for kernel in itertools.islice(itertools.cycle(kernels), 5):
        x, *parts = rng.integers(-50, 50, (1 + num_devices, rng.integers(1, num_rows + 1), SIZE)).astype(np.float32)
        total = x + sum(parts)
        normed = total / np.sqrt((total**2).mean(axis=1, keepdims=True) + EPS)
        results = {"total": sum(parts) if kernel is SUM else total, "normed": normed, "gathered": np.stack(parts, 1)}
        want.append([results[name] for name in kernel.results])
        for owner, part in enumerate(parts):
            arguments = {"part": part, "x": x, "weight": np.ones(SIZE, np.float32)}
            calls[owner].append([arguments[name] for name in kernel.arguments])
    for results in devices.run(calls):
        for found, expected in zip(results, want, strict=True):
            np.testing.assert_array_equal(found[0], expected[0])
            np.testing.assert_allclose(found[-1], expected[-1], rtol=1e-5)


# With as many CTAs as there is work, and with fewer, which take turns.
@pytest.mark.parametrize("num_blocks", quick_first([100, 2]))
@pytest.mark.parametrize(("num_devices", "num_rows"), quick_first([(3, 2), (2, 1), (2, 5), (4, 3)]))
@pytest.mark.parametrize("seed", quick_first(range(2)))
def test_in_any_order(monkeypatch, num_devices, num_rows, seed, num_blocks):
    for kernels in ([SUM, SUM_WITH_NORM], [gather_of(num_devices)]):
        check(monkeypatch, kernels, num_devices, num_rows, seed, num_blocks=num_blocks)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_counters_start_over(monkeypatch):
    """After 2^32 calls, and halfway, where they change their sign."""
    for first_call in (-3, 2**31 - 3):
        for kernel in (SUM_WITH_NORM, gather_of(2)):
            check(monkeypatch, [kernel], 2, 2, 0, first_call=first_call)


@pytest.mark.parametrize(("kernel", "seed"), [(SUM_WITH_NORM, 8), (gather_of(2), 3)], ids=["sum", "gather"])
def test_one_buffer_for_a_piece_is_not_enough(monkeypatch, kernel, seed):
    """Nor would this test, if it did not find that."""
    monkeypatch.setattr(exchange, "NUM_TURNS", 1)
    with pytest.raises(AssertionError, match="not equal"):
        check(monkeypatch, [kernel], 2, 4, seed)
