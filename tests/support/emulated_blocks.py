"""Run kernels of `ThreadOps` in NumPy, with clusters of CTAs, which Pallas's interpreter for GPUs lacks.

The body that runs on a GPU runs here, once per warpgroup. Only one warpgroup runs at a time, up to the next barrier of
its CTA or cluster; a seed decides which is next. In any order these are found:

- an access that no barrier orders after another thread's write, also in the shared memory of other CTAs, which must be
  known to have begun;
- a read of what nobody has written, a second write to a word of a result, a word of a result without a write;
- an index out of bounds, two threads that write to one address at the same time;
- a barrier that some never reach, and arriving at the cluster's barrier twice without a wait.

A write that no barrier orders after a read is found only if it makes a result wrong. Not emulated: MLIR, threads of a
warpgroup that diverge, and the end of shared memory with its CTA.
"""

import random
import types
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from numpy_lax import fori_loop
from turns import Player, Turns

from pallas_kernels.expert_routing.thread_ops import LANES, THREADS, ThreadOps

# A word's stamp: who wrote it last, and how many barriers the writer had passed.
_BLOCK, _THREAD, _WARP_SYNCS, _BLOCK_SYNCS, _ARRIVALS = range(5)
_NOBODY, _HOST = -1, -2  # in place of a thread


def emulate(monkeypatch, sm90_module, kernel_module, *, seed=0):
    """Until the test ends, run the kernels that `sm90_module` starts with bodies of `kernel_module` here.

    To be called within `jax.disable_jit`. Raises AssertionError for what is found.
    """
    emulator = _Emulator(seed)
    lax = {"axis_index": emulator.axis_index, "fori_loop": fori_loop, "bitcast_convert_type": np.ndarray.view}
    lax["div"] = np.floor_divide  # of what is never negative
    monkeypatch.setattr(kernel_module, "lax", types.SimpleNamespace(**lax))
    monkeypatch.setattr(kernel_module, "jnp", np)
    monkeypatch.setattr(plgpu, "load", lambda ref, layout: ref[...])
    monkeypatch.setattr(plgpu, "kernel", emulator.kernel)
    monkeypatch.setattr(sm90_module, "COMPILED", emulator.ops)


class _Warpgroup(Player):
    """A warpgroup, with the barriers that it has passed."""

    def __init__(self, body: Callable[[int], None], *, block: int, group: int, num_groups: int):
        super().__init__()
        self.body, self.block, self.group = body, block, group
        self.threads = (block * num_groups + group) * THREADS + np.arange(THREADS)
        self.warp_syncs = self.block_syncs = self.arrivals = self.waits = 0

    def run(self):
        with np.errstate(all="ignore"):
            self.body(self.block)

    def stamps(self, threads):
        """Return the stamps of words that these threads write now."""
        stamps = np.empty((len(threads), 5), np.int32)
        stamps[:] = self.block, _NOBODY, self.warp_syncs, self.block_syncs, self.arrivals
        stamps[:, _THREAD] = threads
        return stamps

    def sees(self, threads, stamps):
        """Return whether barriers order these threads after the writes."""
        block, thread, warp_syncs, block_syncs, arrivals = (stamps[..., i] for i in range(5))
        return (
            (thread == threads)
            | ((thread // LANES == threads // LANES) & (warp_syncs < self.warp_syncs))
            | ((block == self.block) & (block_syncs < self.block_syncs))
            | (arrivals < self.waits)
        )


class _Ref:
    """An array in global memory or in the shared memory of a CTA, or a part of one."""

    def __init__(self, emulator: "_Emulator", values, stamps, *, is_result=False):
        self.emulator, self.values, self.stamps, self.is_result = emulator, values, stamps, is_result
        self.of_blocks: list[_Ref] = []
        """In shared memory: the same array of each CTA of the cluster."""

    @property
    def shape(self):
        return self.values.shape

    @property
    def at(self):
        return _Parts(self)

    def __getitem__(self, index):
        """Each thread reads one word, or all the same."""
        stamps = self.stamps[index]
        assert (stamps[..., _THREAD] != _NOBODY).all(), "a read of what nobody has written"
        self._check("reads", self.emulator.current.threads, stamps)
        return self.values[index].copy()

    def __setitem__(self, index, value):
        self.write(index, value, self.emulator.current.threads)

    def write(self, index, value, threads):
        """Each of the threads writes one word."""
        stamps = self.stamps[index]
        assert not self.is_result or (stamps[..., _THREAD] == _NOBODY).all(), "a second write to a word of a result"
        self._check("writes", threads, stamps)
        self.values[index] = value
        self.stamps[index] = self.emulator.current.stamps(threads)

    def _check(self, verb, threads, stamps):
        is_seen = self.emulator.current.sees(threads, stamps)
        if not is_seen.all():
            thread, writer = (x[~is_seen][0] for x in np.broadcast_arrays(threads, stamps[..., _THREAD]))
            what = "in a block that may not have begun" if writer == _NOBODY else f"what thread {writer} may be writing"
            raise AssertionError(f"thread {thread} {verb} {what}")


class _Parts:
    """Parts of an array, chosen by indices and `pl.ds`."""

    def __init__(self, ref: _Ref):
        self.ref = ref

    def __getitem__(self, index):
        indices = index if isinstance(index, tuple) else (index,)
        index = tuple(slice(i.start, i.start + i.size) if isinstance(i, pl.Slice) else i for i in indices)
        ref = self.ref
        return _Ref(ref.emulator, ref.values[index], ref.stamps[index], is_result=ref.is_result)


class _Emulator:
    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.cluster: list[_Warpgroup] = []
        self.turns = Turns()
        self.ops = ThreadOps(
            thread=lambda: np.arange(THREADS, dtype=np.int32),
            gather=_gather,
            scatter=self._scatter,
            clear=self._clear,
            scatter_to_parts=self._scatter_to_parts,
            warp_max=_over_warp(np.max),
            warp_min=_over_warp(np.min),
            warp_sum=_over_warp(np.sum),
            running_sum=lambda x: np.cumsum(x.reshape(-1, LANES), axis=1, dtype=np.int32).reshape(-1),
            sync_warp=self._sync_warp,
            sync_block=self._sync_block,
            arrive_cluster=self._arrive_cluster,
            wait_cluster=self._wait_cluster,
        )

    def kernel(self, body, *, out_type, num_threads, thread_name, grid=(), cluster=(), scratch_types=(), **_):
        """Replaces `plgpu.kernel`; CTAs are along one axis, of the grid or of the cluster."""
        [num_blocks] = grid + cluster
        clusters = [range(num_blocks)] if cluster else [range(block, block + 1) for block in range(num_blocks)]
        self.thread_name = thread_name

        def run(*inputs):
            inputs = [self._memory(np.array(x), _HOST) for x in inputs]
            results = [self._memory(np.zeros(x.shape, x.dtype), _NOBODY, is_result=True) for x in out_type]
            for blocks in clusters:
                scratch = self._shared(scratch_types, blocks)
                self._run(blocks, num_threads, lambda block, shared=scratch: body(*inputs, *results, *shared[block]))
            for result in results:
                assert (result.stamps[..., _THREAD] != _NOBODY).all(), "a word of a result without a write"
            return tuple(jnp.asarray(result.values) for result in results)

        return run

    @property
    def current(self) -> _Warpgroup:
        """The warpgroup whose turn it is."""
        assert isinstance(self.turns.current, _Warpgroup)
        return self.turns.current

    def axis_index(self, name):
        return np.int32(self.current.group if name == self.thread_name else self.current.block)

    def _memory(self, values, thread, *, block=-1, arrivals=-1, is_result=False):
        stamps = np.empty((*values.shape, 5), np.int32)
        stamps[...] = block, thread, -1, -1, arrivals
        return _Ref(self, values, stamps, is_result=is_result)

    def _shared(self, scratch_types, blocks):
        """Return each CTA's shared memory, which others see once it has arrived at a barrier of the cluster."""
        shared = {
            block: [self._memory(np.zeros(x.shape, x.dtype), _NOBODY, block=block, arrivals=0) for x in scratch_types]
            for block in blocks
        }
        for refs in zip(*shared.values(), strict=True):
            for ref in refs:
                ref.of_blocks = list(refs)
        return shared

    def _run(self, blocks, num_groups, body):
        """Has the warpgroups of a cluster run to their ends, by turns. Raises what one of them raises."""
        self.cluster = [
            _Warpgroup(body, block=block, group=group, num_groups=num_groups)
            for block in blocks
            for group in range(num_groups)
        ]
        self.turns = Turns()
        try:
            while alive := [x for x in self.cluster if not x.has_ended]:
                ready = [x for x in alive if x.can_go_on()]
                assert ready, f"a barrier that some never reach: {len(alive)} of {len(self.cluster)} warpgroups wait"
                self.turns.let_run(self.random.choice(ready))
        finally:
            self.turns.stop(self.cluster)

    def _sync_warp(self):
        self.current.warp_syncs += 1

    def _sync_block(self, _):
        self.current.block_syncs += 1
        block, count = self.current.block, self.current.block_syncs
        self.turns.pause(lambda: all(x.block_syncs >= count for x in self.cluster if x.block == block))

    def _arrive_cluster(self):
        assert self.current.arrivals == self.current.waits, "arrives at the cluster's barrier twice without a wait"
        self.current.arrivals += 1

    def _wait_cluster(self):
        assert self.current.arrivals == self.current.waits + 1, "waits for the cluster without having arrived"
        count = self.current.arrivals
        self.turns.pause(lambda: all(x.arrivals >= count for x in self.cluster))
        self.current.waits += 1

    def _scatter(self, ref, index, value, mask):
        assert index.shape == value.shape == mask.shape == (THREADS,)
        _check_within(index, ref)
        index = index[mask]
        assert len(np.unique(index)) == len(index), "two threads write to one place together"
        ref.write(index, value[mask], self.current.threads[mask])

    def _scatter_to_parts(self, ref, index, value, num_parts):
        assert len(ref.of_blocks) == num_parts
        for there in ref.of_blocks:
            self._scatter(there, index, value, index >= 0)

    def _clear(self, ref):
        """Each warp clears a quarter."""
        quarter = ref.shape[0] // (THREADS // LANES)
        word = np.arange(ref.shape[0])
        ref.write(word, 0, self.current.threads[word // quarter * LANES + word % quarter % LANES])


def _check_within(index, ref):
    assert index.dtype == np.int32
    assert ((index >= 0) & (index < ref.shape[0])).all(), "an index outside its array"


def _gather(ref, index):
    _check_within(index, ref)
    return ref[index]


def _over_warp(combine):
    def run(x):
        warps = x.reshape(-1, LANES)
        return np.broadcast_to(combine(warps, axis=1, keepdims=True), warps.shape).reshape(-1)

    return run
