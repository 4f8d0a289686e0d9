"""Run kernels for Hopper in NumPy: all CTAs at once, with what Pallas's interpreter for GPUs lacks.

The body that runs on a GPU runs here, once per warpgroup, with counters that CTAs wait for, clusters, and views of the
same shared memory. One warpgroup runs at a time, up to its next operation that is visible to others; a seed decides
which is next, and when a copy ends. As on a GPU, in any order:

- the target of a copy is NaN from the copy's beginning on; the copy reads its source when it begins or when it ends;
- a wgmma reads when it begins or when somebody waits for it;
- others see what a warpgroup writes to global memory by its next signal, and maybe not before;
- a barrier is waited for by the parity of its phases: a warpgroup that is two phases late waits for a third one;
- shared memory and results are NaN at first, counters among the results have any value;
- some warpgroups are up to a hundred times as slow as others, and some copies last until nothing else can go on.

Raises AssertionError if all wait; for a copy or a barrier's phase that nobody has waited for; for shared memory of a
CTA that has ended; for an index out of bounds, except in copies to and from global memory; for counters that are not
left as they were. Other faults show in the results. Not emulated: that a CTA of a cluster may begin late, that a
counter is cleared for others later than for oneself, registers and their layouts, swizzling, fences, MLIR.
"""

import itertools
import math
import random
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from emulated_memory import BarrierKind, Barriers, Memory, Ref, Views
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from numpy_lax import broadcast_in_dim, fori_loop, while_loop
from turns import Player, Turns

OPERATIONS = (
    "async_store_smem",
    "barrier_arrive",
    "barrier_wait",
    "copy_gmem_to_smem",
    "copy_smem_to_gmem",
    "kernel",
    "load",
    "wait_smem_to_gmem",
    "wgmma",
    "wgmma_wait",
)


def emulate(monkeypatch, *modules, seed: int = 0, of_jax: bool = False) -> "Grid":
    """Until the test ends, run kernels whose bodies are in these modules here: within `jax.disable_jit()`.

    The arrays that they load are of jax if `of_jax`, which their functions may require, else of NumPy, which takes less
    time.
    """
    grid = Grid(seed, jnp.asarray if of_jax else np.asarray)
    lax = {
        "axis_index": grid.axis_index,
        "div": np.floor_divide,  # never of negative values
        "rem": np.remainder,
        "min": np.minimum,
        "max": np.maximum,
        "fori_loop": fori_loop,
        "while_loop": while_loop,
        "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
        "select": lambda condition, yes, no: yes if condition else no,
        "cond": lambda condition, yes, no: yes() if condition else no(),
        "switch": lambda index, branches: branches[index](),
        "broadcast_in_dim": lambda x, shape, axes: grid.as_array(broadcast_in_dim(x, shape, axes)),
        "rsqrt": lambda x: jnp.asarray(1 / np.sqrt(x)),
        "bitcast_convert_type": lambda x, dtype: jnp.asarray(np.asarray(x).view(dtype)),
        "optimization_barrier": lambda x: x,
    }
    of_pl = {
        "when": lambda condition: lambda run: run() if condition else None,
        "loop": lambda start, end: lambda run: fori_loop(start, end, lambda i, _: run(i), None),
        "ds": lambda start, size: pl.Slice(int(start), size),
        "multiple_of": lambda x, _: x,
        "run_scoped": lambda run, acc: run(Accumulator(grid, np.zeros(acc.shape, np.float32))),
        "run_state": grid.run_state,
    }
    for module in modules:
        monkeypatch.setattr(module, "lax", types.SimpleNamespace(**lax), raising=False)
        monkeypatch.setattr(module, "jnp", np)
        monkeypatch.setattr(module, "pl", types.SimpleNamespace(**of_pl), raising=False)
        for name, value in {"_int": np.int32, "written": lambda sums: sums}.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    for name in OPERATIONS:
        monkeypatch.setattr(plgpu, name, getattr(grid, name))
    monkeypatch.setattr(plgpu, "RefUnion", Views)
    monkeypatch.setattr(plgpu, "SMEM", lambda shape, dtype, transforms=(): Memory(shape, np.dtype(dtype)))
    monkeypatch.setattr(plgpu, "Barrier", BarrierKind)
    monkeypatch.setattr(
        plgpu, "ClusterBarrier", lambda *, collective_axes, **numbers: BarrierKind(**numbers, of_all=True)
    )
    monkeypatch.setattr(plgpu, "ACC", _Acc)
    monkeypatch.setattr(plgpu, "layout_cast", lambda x, _: x)
    monkeypatch.setattr(plgpu, "broadcasted_iota", lambda _, shape, axis, **__: np.indices(shape, np.int32)[axis])
    monkeypatch.setattr(plgpu, "set_max_registers", lambda *_, **__: None)
    monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
    monkeypatch.setattr(plgpu, "warp_map", lambda run: [run(warp) for warp in range(4)])
    return grid


class _Acc(NamedTuple):
    """The accumulator of wgmmas, as a type or with its initial value."""

    shape: tuple[int, ...]
    dtype: Any = np.float32
    first: Any = None

    @staticmethod
    def init(x):
        return _Acc(x.shape, np.float32, np.array(x, np.float32))


class Accumulator:
    """The sums of wgmmas, some of which may be under way."""

    def __init__(self, grid, sums):
        self.grid, self.sums = grid, sums
        self.pending: list[Callable[[], np.ndarray]] = []

    def end(self, but: int = 0):
        """Finish all but the last `but` operations."""
        while len(self.pending) > but:
            self.sums = self.sums + self.pending.pop(0)()

    def __getitem__(self, index):
        assert index is Ellipsis
        self.end()
        return self.grid.as_array(self.sums)


class _Warpgroup(Player):
    def __init__(self, block: int, group: int, body: Callable[[int], None]):
        super().__init__()
        self.block, self.group, self.body = block, group, body
        self.stores: list[tuple[Ref, Any]] = []
        """Stores that others may not see yet."""
        self.accumulator: Accumulator | None = None
        self.results: list[_ResultCopy] = []
        """Copies from shared to global memory that have not ended."""

    def run(self):
        with np.errstate(all="ignore"):  # unused rows
            self.body(self.block)


class _ResultCopy:
    """A copy from shared to global memory: it reads at some time, and writes later."""

    def __init__(self, source: Ref, place: Ref):
        self.source, self.place = source, place
        self.values: Any = None
        self.is_written = False

    def go_on(self) -> bool:
        """Do one step; return true if there is another."""
        if self.values is None:
            self.values = self.source.read()
            return True
        self.place.write(self.values)
        self.is_written = True
        return False


class Grid:
    """The emulator's state: who runs, and which copies have not ended."""

    def __init__(self, seed: int, as_array: Callable[[Any], Any]):
        self.random = random.Random(seed)
        self.as_array = as_array
        self.copies: list[Callable[[], None]] = []
        """Copies that have begun: what they do when they end."""
        self.turns = Turns()
        self.shared: list[list[Any]] = []
        """Arrays in shared memory and barriers of each CTA."""
        self.ended: set[int] = set()
        """CTAs that have ended."""
        self.cluster = 1
        self.axes: dict[str, Callable[[], int]] = {}
        self.syncs: dict[_Warpgroup, int] = {}

    def kernel(
        self,
        body,
        *,
        out_type,
        scratch_types,
        grid,
        grid_names,
        num_threads,
        thread_name,
        cluster=(),
        cluster_names=(),
        **_,
    ):
        """Replaces `plgpu.kernel`, with one axis of CTAs and at most one of clusters."""
        self.cluster = math.prod(cluster)
        self.axes = {thread_name: lambda: self.current.group, grid_names[0]: lambda: self.current.block // self.cluster}
        self.axes |= dict.fromkeys(cluster_names, lambda: self.current.block % self.cluster)
        [num_blocks] = grid
        num_blocks *= self.cluster
        out_types = out_type if isinstance(out_type, tuple) else (out_type,)

        def run(*inputs):
            # An array of jax is read-only; the values of a ref are written back when all is done.
            arrays = [np.array(x[...] if isinstance(x, jax.Ref) else x) for x in inputs]
            results = [self._garbage(x) for x in out_types]
            refs = [Ref(self, array) for array in (*arrays, *results)]
            self.shared = [
                [kind and self._allocate(kind, block) for kind in scratch_types] for block in range(num_blocks)
            ]
            self._run(num_blocks, num_threads, lambda block: body(*refs, *self.shared[block]))
            for x, array in zip(inputs, arrays, strict=True):
                if isinstance(x, jax.Ref):
                    x[...] = jnp.asarray(array)
                elif x.dtype == jnp.int32:
                    assert (array == np.asarray(x)).all(), "a counter that the next layer does not find as it was"
            results = tuple(jnp.asarray(result) for result in results)
            return results if isinstance(out_type, tuple) else results[0]

        return run

    @property
    def current(self) -> _Warpgroup:
        """The warpgroup whose turn it is."""
        assert isinstance(self.turns.current, _Warpgroup)
        return self.turns.current

    def axis_index(self, name):
        return np.int32(self.axes[name]())

    def barrier_wait(self, barrier):
        barriers, index = _barrier(barrier)
        group = self.current.group
        self.pause(lambda: barriers.is_passed(index, group))
        barriers.observed[group, index] = barriers.observed.get((group, index), 0) + 1

    def barrier_arrive(self, barrier):
        self.pause()
        self._flush_shared(self.current)
        barriers, index = _barrier(barrier)
        for one in self._of_cluster(barriers) if barriers.of_all else [barriers]:
            one.arrive(index)

    def copy_gmem_to_smem(self, source, place, barrier, *, collective_axes=None):
        """Copy; with `collective_axes` each CTA of the cluster copies a part, to all of them."""
        self.pause()
        assert source.shape == place.shape
        barriers, index = _barrier(barrier)
        if collective_axes is None:
            self._begin_copy(source.read, place, lambda: barriers.arrive(index))
            return
        size = place.shape[0] // self.cluster
        part = pl.Slice(self.current.block % self.cluster * size, size)
        own = place.part(part)
        for there, others in zip(self.in_cluster(own), self._of_cluster(barriers), strict=True):
            self._begin_copy(source.part(part).read, there, lambda others=others: others.arrive(index, 1))

    def copy_smem_to_gmem(self, source, place):
        self.pause()
        assert source.shape == place.shape
        copy = _ResultCopy(source, place)
        self.current.results.append(copy)

        def go_on():
            if copy.go_on():
                self.copies.insert(0, go_on)

        self.copies.append(go_on)

    def wait_smem_to_gmem(self, but, wait_read_only=False):
        """Wait for all copies of this warpgroup but the last ones."""
        results = self.current.results
        mine = results[: max(len(results) - but, 0)]
        self.pause(lambda: all(copy.values is not None and (wait_read_only or copy.is_written) for copy in mine))

    def async_store_smem(self, values, place, barrier, *, cluster_idx, **_):
        """Store into the memory of another CTA of the cluster, or of this one."""
        self.pause()
        there = self.in_cluster(place)[int(cluster_idx)]
        barriers, index = _barrier(barrier)
        other = self._of_cluster(barriers)[int(cluster_idx)]
        self._begin_copy(lambda: np.asarray(values), there, lambda: other.arrive(index))

    def wgmma(self, accumulator, a, b):
        self.pause()
        self.current.accumulator = accumulator

        def multiply():
            return np.asarray(_read(a), np.float32) @ np.asarray(_read(b), np.float32)

        product = multiply() if self.random.random() < 0.5 else None
        accumulator.pending.append(lambda: multiply() if product is None else product)

    def wgmma_wait(self, but):
        """Wait for the wgmmas into the accumulator that was used last."""
        self.pause()
        assert self.current.accumulator is not None, "a wait for nothing"
        self.current.accumulator.end(but)

    def run_state(self, run):
        def with_state(acc):
            accumulator = Accumulator(self, acc.first)
            run(accumulator)
            self.pause()
            return accumulator[...]

        return with_state

    def load(self, ref, **_):
        self.pause()
        self.flush(self.current)  # one sees what oneself has written (and here others do, too)
        assert ref.is_inside, "outside of an array"
        return self.as_array(ref.read())

    def store(self, ref, values):
        """Store; others may not see it before a signal, or in shared memory before an arrival at a barrier."""
        self.pause()
        assert ref.is_inside, "outside of an array"
        self.current.stores.append((ref, np.array(values)))

    def signal(self, counter, **_):
        self.pause()
        self.flush(self.current)
        assert counter.is_inside, "outside of an array"
        counter.write(int(counter.read().flat[0]) + 1)

    def wait(self, counter, value, **_):
        self.pause(lambda: counter.read().flat[0] >= value)

    def wait_and_take(self, counter, value, **_):
        self.wait(counter, value)
        counter.write(counter.read() - value)

    def clear(self, counter, **_):
        self.pause()
        counter.write(0)

    def sync_cluster(self):
        """Wait for all warpgroups of the cluster; then they see what the others have stored."""
        self.pause()
        self.flush(self.current)
        turn = self.syncs[self.current] = self.syncs[self.current] + 1
        cluster = self.current.block // self.cluster
        self.pause(lambda: all(n >= turn for one, n in self.syncs.items() if one.block // self.cluster == cluster))

    def in_cluster(self, ref):
        """Return this part of an array in the shared memory of each CTA of the cluster."""
        first = self.current.block // self.cluster * self.cluster
        arrays = self._of_cluster(ref.array)
        return [Ref(self, array, ref.window, block=first + rank) for rank, array in enumerate(arrays)]

    def flush(self, warpgroup):
        """Make visible what the warpgroup has written to global memory."""
        for ref, values in warpgroup.stores:
            ref.write(values)
        warpgroup.stores.clear()

    def _flush_shared(self, warpgroup):
        """Make visible what the warpgroup has written to shared memory, as on its arrival at a barrier."""
        stores = warpgroup.stores
        warpgroup.stores = [(ref, values) for ref, values in stores if ref.block is None]
        for ref, values in stores:
            if ref.block is not None:
                ref.write(values)

    def pause(self, can_go_on: Callable[[], bool] = lambda: True):
        """Let others run, until the seed chooses this warpgroup again."""
        self.turns.pause(can_go_on)

    def _of_cluster(self, one):
        """Return this array, or these barriers, of each CTA of the current CTA's cluster."""
        first = self.current.block // self.cluster * self.cluster
        blocks = [_flat(shared) for shared in self.shared[first : first + self.cluster]]
        [number] = [i for i, x in enumerate(blocks[self.current.block - first]) if x is one]
        return [block[number] for block in blocks]

    def _begin_copy(self, read, place, arrive):
        values = read() if self.random.random() < 0.5 else None
        place.write(np.full(place.shape, np.nan))

        def end():
            place.write(read() if values is None else values)
            arrive()

        self.copies.append(end)

    def _garbage(self, x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            return np.full(x.shape, np.nan, x.dtype)
        fill = self.random.randrange(1, min(2**30, int(jnp.iinfo(x.dtype).max)))
        return np.full(x.shape, fill, x.dtype)

    def _allocate(self, kind, block):
        if isinstance(kind, BarrierKind):
            return Barriers(self, kind, block, self.cluster)
        if isinstance(kind, Views):
            return kind.allocate(self, block)
        return Ref(self, self._garbage(kind), block=block)

    def _run(self, num_blocks, num_groups, body):
        """Has all warpgroups run to their ends, by turns. Raises what one of them raises."""
        warpgroups = [
            _Warpgroup(block, group, body) for block, group in itertools.product(range(num_blocks), range(num_groups))
        ]
        self.turns, self.syncs = Turns(), dict.fromkeys(warpgroups, 0)
        self.ended = set()
        speeds = {one: self.random.choice((1.0, 1.0, 0.1, 0.01)) for one in warpgroups}
        share = self.random.choice((0.0, 0.05, 0.3, 0.6))  # of turns that copies get: slow ones, or fast
        is_last_first = self.random.random() < 0.5  # of copies, so that the first one lasts
        try:
            while left := [one for one in warpgroups if not one.has_ended]:
                ready = [one for one in left if one.can_go_on()]
                if self.copies and (not ready or self.random.random() < share):
                    self.copies.pop(-1 if is_last_first else self.random.randrange(len(self.copies)))()
                    continue
                assert ready, "all wait: " + ", ".join(f"block {one.block} warpgroup {one.group}" for one in left)
                [one] = self.random.choices(ready, [speeds[one] for one in ready])
                self.turns.let_run(one)
                if one.has_ended or self.random.random() < 0.1:
                    self.flush(one)
                if one.has_ended and not any(x.block == one.block for x in left if x is not one):
                    self.ended.add(one.block)
            read = [copy for one in warpgroups for copy in one.results if copy.values is not None]
            # Results may still be written, but shared memory no longer exists to be read or copied into.
            writing = [copy for copy in read if not copy.is_written]
            assert len(self.copies) == len(writing), "copies that nobody has waited for"
            for copy in writing:
                copy.go_on()
            for barriers in (x for shared in self.shared for x in shared if isinstance(x, Barriers)):
                barriers.check_observed()
        finally:
            self.turns.stop(warpgroups)
            self.copies.clear()


def _barrier(barrier):
    return (barrier, 0) if isinstance(barrier, Barriers) else barrier


def _flat(shared):
    """Yield arrays and barriers of a CTA, those of views too."""
    if isinstance(shared, list):
        return [one for x in shared for one in _flat(x)]
    return [shared.array if isinstance(shared, Ref) else shared]


def _read(x):
    return x.read() if isinstance(x, Ref) else x
