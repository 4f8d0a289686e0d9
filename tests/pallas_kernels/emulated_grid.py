"""The kernel of `layer_matmuls` in NumPy: all thread blocks at once, with what Pallas's interpreter for GPUs lacks.

The body that a GPU runs runs here, once a warpgroup, with counters that blocks wait for, clusters, and views of the
same shared memory. One warpgroup runs at a time, up to its next operation that others could see; a seed says which is
next, and when a copy ends. As on a GPU, whichever it is:

- what a copy is about to write is NaN from its beginning on, and it reads when it begins or when it ends;
- a wgmma reads when it begins or when somebody waits for it;
- what a warpgroup writes to global memory others see by its next signal, and maybe not before;
- a barrier is waited for by the parity of its phases: who is two of them late waits for ever;
- shared memory and results are NaN at first, counters among the results have any value.

Raises AssertionError where all wait, where a copy is under way when all have ended, and for an index outside an array
in shared memory. What else goes wrong is in the results. Not emulated: registers and their layouts, swizzling, MLIR.
"""

import math
import random
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from waiting import PATIENCE

from pallas_kernels.layer_matmuls import attention, device, kernel, sm90
from pallas_kernels.paged_attention import device as parts_device
from pallas_kernels.paged_attention import tiles

ROWS = 64


def emulate(monkeypatch, *, num_sms: int, seed: int = 0) -> "Grid":
    """Until the test ends, `layer_matmuls_sm90` and `decode_layer_sm90` run here, within `jax.disable_jit()`."""
    grid = Grid(seed)
    lax = {
        "axis_index": grid.axis_index,
        "div": lambda a, b: np.int32(int(a) // int(b)),
        "rem": lambda a, b: np.int32(int(a) % int(b)),
        "min": np.minimum,
        "max": np.maximum,
        "fori_loop": _fori_loop,
        "while_loop": _while_loop,
        "cond": lambda condition, yes, no: yes() if condition else no(),
        "broadcast_in_dim": _broadcast_in_dim,
        "rsqrt": lambda x: jnp.asarray(1 / np.sqrt(x)),  # of jax: its caller says that it returns such an array
    }
    of_pl = {
        "when": lambda condition: lambda run: run() if condition else None,
        "ds": lambda start, size: pl.Slice(int(start), size),
        "multiple_of": lambda x, _: x,
        "run_scoped": lambda run, acc: run(Accumulator(grid, np.zeros(acc.shape, np.float32))),
        "run_state": grid.run_state,
    }
    for module in (kernel, attention, tiles):
        monkeypatch.setattr(module, "lax", types.SimpleNamespace(**lax))
        monkeypatch.setattr(module, "jnp", np)
        monkeypatch.setattr(module, "pl", types.SimpleNamespace(**of_pl))
    for module in (kernel, attention):
        monkeypatch.setattr(module, "_int", np.int32)
        monkeypatch.setattr(module, "written", lambda sums: sums)
    for module in (sm90, kernel, attention):
        monkeypatch.setattr(module, "NUM_SMS", num_sms)
    of_attention = sm90.AttentionConfig
    monkeypatch.setattr(sm90, "AttentionConfig", lambda **sizes: of_attention(**sizes, num_ctas=num_sms))
    for name in ("barrier_wait", "barrier_arrive", "copy_gmem_to_smem", "async_store_smem", "wgmma", "wgmma_wait"):
        monkeypatch.setattr(plgpu, name, getattr(grid, name))
    monkeypatch.setattr(plgpu, "kernel", grid.kernel)
    monkeypatch.setattr(plgpu, "RefUnion", _Union)
    monkeypatch.setattr(plgpu, "SMEM", lambda shape, dtype, transforms=(): _Memory(shape, np.dtype(dtype)))
    monkeypatch.setattr(plgpu, "Barrier", _Barrier)
    monkeypatch.setattr(plgpu, "ACC", _Acc)
    monkeypatch.setattr(plgpu, "load", lambda ref, **_: grid.load(ref))
    monkeypatch.setattr(plgpu, "layout_cast", lambda x, _: x)
    monkeypatch.setattr(plgpu, "broadcasted_iota", lambda _, shape, axis, **__: np.indices(shape, np.int32)[axis])
    monkeypatch.setattr(plgpu, "set_max_registers", lambda *_, **__: None)
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    for name in ("signal", "wait", "clear", "load_columns", "store_columns", "load_row_sums", "store_row_sums"):
        monkeypatch.setattr(device, name, getattr(grid, name))
    for name in ("store_vector", "store_heads"):
        monkeypatch.setattr(device, name, getattr(grid, name))
    monkeypatch.setattr(parts_device, "signal", grid.signal)
    monkeypatch.setattr(parts_device, "wait", grid.wait_and_take)
    monkeypatch.setattr(parts_device, "store_first_rows", grid.store_first_rows)
    return grid


class _Memory(NamedTuple):
    """Shared memory that a kernel asks for."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Union:
    """Views of the same shared memory; a view is one array, or some that lie one after the other."""

    def __init__(self, *views):
        self.views = views

    def allocate(self, grid):
        sizes = [sum(part.nbytes for part in _parts(view)) for view in self.views]
        memory = np.full(max(sizes), 0xFF, np.uint8)  # NaN, in bfloat16
        return [_view(grid, memory, view) for view in self.views]


class _Barrier(NamedTuple):
    num_barriers: int = 1
    num_arrivals: int = 1


class _Acc(NamedTuple):
    """What wgmmas add up, as a type or with what it begins with."""

    shape: tuple[int, ...]
    dtype: Any = np.float32
    first: Any = None

    @staticmethod
    def init(x):
        return _Acc(x.shape, np.float32, np.array(x, np.float32))


def _parts(view):
    return [view] if isinstance(view, _Memory) else list(view)


def _view(grid, memory, view):
    refs, start = [], 0
    for part in _parts(view):
        array = memory[start : start + part.nbytes].view(part.dtype).reshape(part.shape)
        refs.append(Ref(grid, array, is_shared=True))
        start += part.nbytes
    return refs[0] if isinstance(view, _Memory) else refs


class Ref:
    """A part of an array, of which some may lie outside: zeros to who reads it, in global memory."""

    def __init__(self, grid, array, window=None, *, is_shared=False, is_transposed=False):
        self.grid, self.array, self.is_shared, self.is_transposed = grid, array, is_shared, is_transposed
        self.window = [(0, size) for size in array.shape] if window is None else window
        """Of each dimension, where the part begins and how much of it there is: None if it has only this index."""

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
        return Ref(self.grid, self.array, self.window, is_shared=self.is_shared, is_transposed=True)

    def part(self, index):
        index = list(index if isinstance(index, tuple) else (index,))
        window = []
        for start, size in self.window:
            if size is None or not index:
                window.append((start, size))
                continue
            i = index.pop(0)
            window.append((start + i.start, i.size) if isinstance(i, pl.Slice) else (start + int(i), None))
        assert not index
        return Ref(self.grid, self.array, window, is_shared=self.is_shared)

    def _inside(self):
        """The part's indices that lie inside the array, and where these are in the part."""
        inside, places = [], []
        for (start, size), length in zip(self.window, self.array.shape, strict=True):
            end = start + (1 if size is None else size)
            assert not self.is_shared or 0 <= start <= end <= length, "outside of an array in shared memory"
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
        """As much of them as lies inside the array."""
        inside, places = self._inside()
        shape = [1 if size is None else size for _, size in self.window]
        values = np.broadcast_to(values, self.shape).reshape(shape)
        self.array[inside] = values[places].astype(self.dtype)

    def __getitem__(self, index):
        value = self.grid.load(self if index is Ellipsis else self.part(index))
        return value if value.shape else value[()]

    def __setitem__(self, index, value):
        assert index is Ellipsis
        self.write(value)


class _At:
    def __init__(self, ref: Ref):
        self.ref = ref

    def __getitem__(self, index):
        return self.ref.part(index)


class Barriers:
    """Of one thread block."""

    def __init__(self, kind: _Barrier):
        self.num_arrivals = kind.num_arrivals
        self.arrivals = np.zeros(kind.num_barriers, int)
        self.observed: dict[tuple[int, int], int] = {}
        """How many phases a warpgroup has waited for."""

    @property
    def at(self):
        return _AtBarrier(self)

    def arrive(self, index):
        self.arrivals[index] += 1

    def is_passed(self, index, warpgroup):
        phases = self.arrivals[index] // self.num_arrivals
        return (phases - self.observed.get((warpgroup, index), 0)) % 2 == 1


class _AtBarrier:
    def __init__(self, barriers: Barriers):
        self.barriers = barriers

    def __getitem__(self, index):
        assert 0 <= index < len(self.barriers.arrivals)
        return self.barriers, int(index)


class Accumulator:
    """The sums of wgmmas, some of which may be under way."""

    def __init__(self, grid, sums):
        self.grid, self.sums = grid, sums
        self.pending: list[Callable[[], np.ndarray]] = []

    def end(self, but: int = 0):
        """Of all but the last ones."""
        while len(self.pending) > but:
            self.sums = self.sums + self.pending.pop(0)()

    def __getitem__(self, index):
        assert index is Ellipsis
        self.end()
        return self.sums


class _Warpgroup:
    def __init__(self, block: int, group: int, run: Callable[[], None]):
        self.block, self.group = block, group
        self.can_go_on: Callable[[], bool] = lambda: True
        self.turn, self.is_back = threading.Semaphore(0), threading.Semaphore(0)
        self.stores: list[tuple[Ref, Any]] = []
        """To global memory, that others need not see yet."""
        self.accumulator: Accumulator | None = None
        self.has_ended = False
        self.error: BaseException | None = None
        self.run = run


class _Stopped(BaseException):
    """Another warpgroup has failed."""


class Grid:
    """Who runs, and what is under way."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.copies: list[Callable[[], None]] = []
        """That have begun: what they do when they end."""
        self.current: _Warpgroup
        self.is_stopped = False
        self.shared: list[list[Any]] = []
        """By block: arrays in shared memory, and barriers."""
        self.cluster = 1

    def kernel(self, body, *, out_type, scratch_types, grid, num_threads, cluster=(), **_):
        """In place of `plgpu.kernel`."""
        self.cluster = math.prod(cluster)
        num_blocks = math.prod(grid) * self.cluster

        def run(*inputs):
            # An array of jax's is not for writing; of a ref, what it holds goes back when all is done.
            arrays = [np.array(x[...] if isinstance(x, jax.Ref) else x) for x in inputs]
            results = [self._garbage(x) for x in out_type]
            refs = [Ref(self, array) for array in (*arrays, *results)]
            self.shared = [[self._allocate(kind) for kind in scratch_types] for _ in range(num_blocks)]
            self._run([(block, group, body, refs) for block in range(num_blocks) for group in range(num_threads)])
            for x, array in zip(inputs, arrays, strict=True):
                if isinstance(x, jax.Ref):
                    x[...] = jnp.asarray(array)
                elif x.dtype == jnp.int32:
                    assert (array == np.asarray(x)).all(), "a counter that the next layer does not find as it was"
            return tuple(jnp.asarray(result) for result in results)

        return run

    def axis_index(self, name):
        block = self.current.block
        return np.int32({"wg": self.current.group, "cta": block // self.cluster, "rank": block % self.cluster}[name])

    def barrier_wait(self, barrier):
        barriers, index = _barrier(barrier)
        group = self.current.group
        self._pause(lambda: barriers.is_passed(index, group))
        barriers.observed[group, index] = barriers.observed.get((group, index), 0) + 1

    def barrier_arrive(self, barrier):
        self._pause()
        barriers, index = _barrier(barrier)
        barriers.arrive(index)

    def copy_gmem_to_smem(self, source, place, barrier):
        self._pause()
        assert source.shape == place.shape
        barriers, index = _barrier(barrier)
        self._begin_copy(source.read, place, lambda: barriers.arrive(index))

    def async_store_smem(self, values, place, barrier, *, cluster_idx, **_):
        """Into the memory of another block of the cluster."""
        self._pause()
        block = self.current.block
        other = self.shared[block // self.cluster * self.cluster + int(cluster_idx)]
        [number] = [i for i, x in enumerate(self.shared[block]) if isinstance(x, Ref) and x.array is place.array]
        [of_barrier] = [i for i, x in enumerate(self.shared[block]) if x is barrier]
        there = Ref(self, other[number].array, place.window, is_shared=True)
        self._begin_copy(lambda: values, there, lambda: other[of_barrier].arrive(0))

    def wgmma(self, accumulator, a, b):
        self._pause()
        self.current.accumulator = accumulator

        def multiply():
            return np.asarray(_read(a), np.float32) @ np.asarray(_read(b), np.float32)

        product = multiply() if self.random.random() < 0.5 else None
        accumulator.pending.append(lambda: multiply() if product is None else product)

    def wgmma_wait(self, but):
        self._pause()
        assert self.current.accumulator is not None, "a wait for nothing"
        self.current.accumulator.end(but)

    def run_state(self, run):
        def with_state(acc):
            accumulator = Accumulator(self, acc.first)
            run(accumulator)
            self._pause()
            return accumulator[...]

        return with_state

    def load(self, ref):
        self._pause()
        self._flush(self.current)  # one sees what oneself has written
        return ref.read()

    def signal(self, counter, **_):
        self._pause()
        self._flush(self.current)
        counter.part(0).write(_first(counter) + 1)

    def wait(self, counter, value, **_):
        self._pause(lambda: _first(counter) >= value)

    def wait_and_take(self, counter, value, **_):
        self.wait(counter, value)
        counter.part(0).write(_first(counter) - value)

    def clear(self, counter, **_):
        self._pause()
        counter.part(0).write(0)

    def load_columns(self, ref, first, num_columns, **_):
        values = self.load(ref.part((pl.Slice(0, ref.shape[0]), pl.Slice(int(first), num_columns))))
        return _pad_rows(values)

    def store_columns(self, ref, x, first, **_):
        x = np.asarray(x).astype(ref.dtype)[: ref.shape[0]]
        self._store(ref.part((pl.Slice(0, len(x)), pl.Slice(int(first), x.shape[1]))), x)

    def load_row_sums(self, ref, **_):
        return _pad_rows(self.load(ref))

    def store_row_sums(self, ref, sums, column, **_):
        self._store(ref.part((pl.Slice(0, ref.shape[0]), int(column))), sums[: ref.shape[0]])

    def store_vector(self, ref, x, **_):
        self._store(ref, x[: ref.shape[0]])

    def store_first_rows(self, ref, x, **_):
        self._store(ref, x[: ref.shape[0]])

    def store_heads(self, ref, x, row, first, start, number, **_):
        size = x.shape[1]
        for i in range(min(len(x), number - int(start))):
            self._store(ref.part((int(row), pl.Slice(int(first) + (int(start) + i) * size, size))), x[i])

    def _store(self, ref, values):
        self._pause()
        self.current.stores.append((ref, np.array(values)))

    def _begin_copy(self, read, place, arrive):
        values = read() if self.random.random() < 0.5 else None
        place.write(np.full(place.shape, np.nan))

        def end():
            place.write(read() if values is None else values)
            arrive()

        self.copies.append(end)

    def _flush(self, warpgroup):
        for ref, values in warpgroup.stores:
            ref.write(values)
        warpgroup.stores.clear()

    def _garbage(self, x):
        fill = np.nan if jnp.issubdtype(x.dtype, jnp.floating) else self.random.randrange(1, 2**30)
        return np.full(x.shape, fill, x.dtype)

    def _allocate(self, kind):
        if isinstance(kind, _Barrier):
            return Barriers(kind)
        if isinstance(kind, _Union):
            return kind.allocate(self)
        return Ref(self, np.full(kind.shape, np.nan, kind.dtype), is_shared=True)

    def _pause(self, can_go_on: Callable[[], bool] = lambda: True):
        """Let others run, until the seed chooses this warpgroup again."""
        warpgroup = self.current
        warpgroup.can_go_on = can_go_on
        warpgroup.is_back.release()
        warpgroup.turn.acquire()
        if self.is_stopped:
            raise _Stopped

    def _run(self, todo):
        """Has all warpgroups run to their ends, by turns. Raises what one of them raises."""
        warpgroups = [
            _Warpgroup(block, group, lambda block=block, body=body, refs=refs: body(*refs, *self.shared[block]))
            for block, group, body, refs in todo
        ]
        threads = [threading.Thread(target=self._run_one, args=(one,), daemon=True) for one in warpgroups]
        for thread in threads:
            thread.start()
        share = self.random.choice((0.05, 0.3, 0.6))  # of turns that copies get: slow ones, or fast
        left = list(warpgroups)
        try:
            while left:
                ready = [one for one in left if one.can_go_on()]
                if self.copies and (not ready or self.random.random() < share):
                    self.copies.pop(self.random.randrange(len(self.copies)))()
                    continue
                assert ready, "all wait: " + ", ".join(f"block {one.block} warpgroup {one.group}" for one in left)
                self._take_turn(self.random.choice(ready))
                left = [one for one in left if not one.has_ended]
            assert not self.copies, "copies that nobody has waited for"
        finally:
            self.is_stopped = True
            for one in left:
                one.turn.release()
            for thread in threads:
                thread.join(PATIENCE)
            self.is_stopped = False
            self.copies.clear()

    def _take_turn(self, warpgroup):
        self.current = warpgroup
        warpgroup.turn.release()
        assert warpgroup.is_back.acquire(timeout=PATIENCE)
        if warpgroup.error is not None:
            raise warpgroup.error
        if warpgroup.has_ended or self.random.random() < 0.1:
            self._flush(warpgroup)

    def _run_one(self, warpgroup):
        warpgroup.turn.acquire()
        try:
            if not self.is_stopped:
                with np.errstate(all="ignore"):  # rows of no use
                    warpgroup.run()
        except _Stopped:
            pass
        except BaseException as error:
            warpgroup.error = error
        warpgroup.has_ended = True
        warpgroup.is_back.release()


def _barrier(barrier):
    return (barrier, 0) if isinstance(barrier, Barriers) else barrier


def _first(counter):
    return int(counter.read().flat[0])


def _read(x):
    return x.read() if isinstance(x, Ref) else x


def _pad_rows(x):
    """To 64, with the last one again."""
    x = np.asarray(x, np.float32)
    return x[np.minimum(np.arange(ROWS), len(x) - 1)]


def _fori_loop(start, end, body, state):
    for i in range(int(start), int(end)):
        state = body(np.int32(i), state)
    return state


def _while_loop(condition, body, state):
    while condition(state):
        state = body(state)
    return state


def _broadcast_in_dim(x, shape, axes):
    [axis] = axes
    return np.broadcast_to(np.expand_dims(x, tuple(i for i in range(len(shape)) if i != axis)), shape)
