"""Arrays in global and in shared memory, and barriers, for `emulated_grid`.

A CTA's memory knows its owner, what else occupies the same bytes, and whether the owner has ended.
"""

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jax.experimental import pallas as pl

if TYPE_CHECKING:
    from emulated_grid import Grid


class Memory(NamedTuple):
    """Shared memory that a kernel requests."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Views:
    """Views of the same shared memory; a view is one array, or several that follow each other."""

    def __init__(self, *views):
        self.views = views

    def allocate(self, grid, block):
        """Return the refs of a CTA, or lists of them."""
        sizes = [sum(part.nbytes for part in _parts(view)) for view in self.views]
        memory = np.full(max(sizes), 0xFF, np.uint8)  # NaN, in bfloat16
        return [_view(grid, block, memory, view) for view in self.views]


class BarrierKind(NamedTuple):
    """Barriers that a kernel requests."""

    num_barriers: int = 1
    num_arrivals: int = 1
    of_all: bool = False
    """If true, an arrival counts in each CTA of the cluster."""


def _parts(view):
    return [view] if isinstance(view, Memory) else list(view)


def _view(grid, block, memory, view):
    refs, start = [], 0
    for part in _parts(view):
        array = memory[start : start + part.nbytes].view(part.dtype).reshape(part.shape)
        refs.append(Ref(grid, array, block=block))
        start += part.nbytes
    return refs[0] if isinstance(view, Memory) else refs


class Ref:
    """A part of an array in global memory, or in the shared memory of a CTA.

    The part that a copy reads may exceed global memory: it reads zeros there.
    """

    def __init__(self, grid, array, window=None, *, block=None, is_transposed=False):
        self.grid, self.array, self.block, self.is_transposed = grid, array, block, is_transposed
        self.window = [(0, size) for size in array.shape] if window is None else window
        """Start and size of the part in each dimension; the size is None if an index has removed the dimension."""

    @property
    def shape(self):
        return tuple(size for _, size in self.window if size is not None)

    @property
    def dtype(self):
        return self.array.dtype

    @property
    def at(self):
        return _At(self)

    def transpose(self, axes):
        assert axes == (1, 0)
        return Ref(self.grid, self.array, self.window, block=self.block, is_transposed=True)

    def part(self, index):
        assert not self.is_transposed
        index = list(index if isinstance(index, tuple) else (index,))
        window = []
        for start, size in self.window:
            if size is None or not index:
                window.append((start, size))
                continue
            i = index.pop(0)
            if isinstance(i, slice):
                assert i == slice(None)
                window.append((start, size))
            else:
                window.append((start + int(i.start), i.size) if isinstance(i, pl.Slice) else (start + int(i), None))
        assert not index
        return Ref(self.grid, self.array, window, block=self.block)

    @property
    def is_inside(self):
        ends = [start + (1 if size is None else size) for start, size in self.window]
        starts = [start for start, _ in self.window]
        return all(0 <= a <= b <= n for a, b, n in zip(starts, ends, self.array.shape, strict=True))

    def _inside(self):
        """Return the part's indices that are inside the array, and where these are in the part."""
        if self.block is not None:
            assert self.is_inside, "outside of an array in shared memory"
            assert self.block not in self.grid.ended, "shared memory of a block that has ended"
        inside, places = [], []
        for (start, size), length in zip(self.window, self.array.shape, strict=True):
            end = start + (1 if size is None else size)
            first, last = min(max(start, 0), length), max(min(end, length), 0)
            inside.append(slice(first, max(first, last)))
            places.append(slice(first - start, max(first, last) - start))
        return tuple(inside), tuple(places)

    def read(self):
        inside, places = self._inside()
        result = np.zeros([1 if size is None else size for _, size in self.window], self.dtype)
        result[places] = self.array[inside]
        result = result.reshape(self.shape)
        return result.T if self.is_transposed else result

    def write(self, values):
        """Write the values that are inside the array."""
        inside, places = self._inside()
        shape = [1 if size is None else size for _, size in self.window]
        values = np.broadcast_to(values, self.shape).reshape(shape)
        self.array[inside] = values[places].astype(self.dtype)

    def __getitem__(self, index):
        value = self.grid.load(self if index is Ellipsis else self.part(index))
        return value if value.shape else value[()]

    def __setitem__(self, index, value):
        part = self if index is Ellipsis else self.part(index)
        if self.block is not None:
            self.grid.pause()
            part.write(value)
        else:
            self.grid.store(part, value)


class _At:
    def __init__(self, ref: Ref):
        self.ref = ref

    def __getitem__(self, index):
        return self.ref.part(index)


class Barriers:
    """Barriers of one CTA. One CTA's part of a collective copy counts as a part of an arrival."""

    def __init__(self, grid: "Grid", kind: BarrierKind, block: int, cluster: int):
        self.grid, self.block = grid, block
        self.of_all = kind.of_all
        self.units = cluster
        """Number of units that one arrival counts."""
        self.units_of_phase = kind.num_arrivals * cluster * (cluster if kind.of_all else 1)
        self.arrived = np.zeros(kind.num_barriers, int)
        self.observed: dict[tuple[int, int], int] = {}
        """How many phases a warpgroup has waited for."""

    @property
    def at(self):
        return _AtBarrier(self)

    def arrive(self, index, units=None):
        assert self.block not in self.grid.ended, "shared memory of a block that has ended"
        self.arrived[index] += self.units if units is None else units

    def is_passed(self, index, warpgroup):
        phases = self.arrived[index] // self.units_of_phase
        return (phases - self.observed.get((warpgroup, index), 0)) % 2 == 1

    def check_observed(self):
        """Check that no barrier ends with a phase that nobody has waited for."""
        observed = np.zeros(len(self.arrived), int)
        for (_, index), phases in self.observed.items():
            observed[index] = max(observed[index], phases)
        assert (observed == self.arrived // self.units_of_phase).all(), "a barrier's phase that nobody has waited for"


class _AtBarrier:
    def __init__(self, barriers: Barriers):
        self.barriers = barriers

    def __getitem__(self, index):
        assert 0 <= index < len(self.barriers.arrived)
        return self.barriers, int(index)
