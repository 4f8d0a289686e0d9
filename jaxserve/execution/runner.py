"""Runner: owns params, KVCache, slots and the compiled steps; turns a StepPlan into work on the device."""

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float32, Int

from jaxserve.execution.batch import Bucket, make_buckets, pack
from jaxserve.execution.compile import CompiledSteps
from jaxserve.execution.kv_cache import abstract_kv_cache, block_bytes, init_kv_cache
from jaxserve.execution.kv_layout import kv_layout
from jaxserve.execution.slots import (
    ADMISSION_ROWS,
    Masks,
    Slots,
    admit,
    allow,
    init_slots,
    pack_admissions,
    pack_masks,
)
from jaxserve.execution.step import StepOutputs, step
from jaxserve.layers.batch import Kernels, KVCache
from jaxserve.request import TokenLogprobs
from jaxserve.sampling.features import Feature, features, has_extras
from jaxserve.sampling.logprobs import Logprobs
from jaxserve.sampling.state import Extras, admit_extras, pack_extras
from jaxserve.scheduling.plan import StepPlan


class StepKey(NamedTuple):
    """What distinguishes one compiled step from another."""

    bucket: Bucket
    is_plain: bool
    is_decode_only: bool


class HostLogprobs:
    """Logprobs of a step on the host, read entry by entry."""

    def __init__(self, logprobs: Logprobs):
        self._arrays = [np.asarray(array) for array in logprobs]

    def entry(self, index: int, token_id: int, num_top: int) -> TokenLogprobs:
        """The log probabilities at `index`, which belong to `token_id`."""
        logprob, rank, top_ids, top_logprobs = (array[index] for array in self._arrays)
        return TokenLogprobs(
            token_id, float(logprob), int(rank), top_ids[:num_top].tolist(), top_logprobs[:num_top].tolist()
        )


class PendingStep(NamedTuple):
    """A step that the device is running, or has run. Reading it waits for the step."""

    plan: StepPlan
    outputs: StepOutputs
    has_logprobs: bool
    has_prompt_logprobs: bool
    has_embeddings: bool

    def token_ids(self) -> list[int]:
        """The drawn token of each row."""
        return np.asarray(self.outputs.token_ids)[: len(self.plan.rows)].tolist()

    def is_corrupted(self) -> list[bool]:
        """Which rows had logits that are not numbers."""
        return np.asarray(self.outputs.is_corrupted)[: len(self.plan.rows)].tolist()

    def logprobs(self) -> HostLogprobs | None:
        """One entry a row, if some row asked for them."""
        return _on_host(self.outputs.logprobs) if self.has_logprobs else None

    def prompt_logprobs(self) -> HostLogprobs | None:
        """One entry a token of the step, if some row asked for them."""
        return _on_host(self.outputs.prompt_logprobs) if self.has_prompt_logprobs else None

    def embeddings(self) -> Float32[np.ndarray, "B E"] | None:
        """One vector a row, if some row asked for one."""
        return np.asarray(self.outputs.embeddings) if self.has_embeddings else None


class Runner:
    """The device side of one engine.

    Steps run in the order in which they were dispatched, so a plan may rely on the KV of every plan before it.
    """

    def __init__(
        self,
        *,
        family: ModuleType,
        model_config: Any,
        params: Any,
        dtype: jnp.dtype,
        mesh: Mesh,
        kernels: Kernels,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        has_special_steps: bool,
    ):
        """`has_special_steps`: compile each shape for steps in which rows are plain (`Feature.PLAIN`), and for those in
        which all have one token, too. On a GPU branches would break the step's graph, and a kernel that finds nothing
        to do still has to be launched; on a CPU branches and loops not taken cost nothing.
        """
        self.mesh = mesh
        self._has_special_steps = has_special_steps
        self.params = params
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_blocks = math.ceil(max_model_len / block_size)
        self.layout = kv_layout(family.kv_specs(model_config), max_model_len=max_model_len)
        self.num_groups = len(self.layout.windows)
        self.buckets = make_buckets(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            num_groups=self.num_groups,
        )
        pools = {"block_size": block_size, "dtype": dtype, "mesh": mesh}
        self.bytes_per_block = block_bytes(self.layout.pool_specs, **pools)
        self._abstract_kv_cache = functools.partial(
            abstract_kv_cache, self.layout.pool_specs, pool_of_layer=self.layout.pool_of_layer, **pools
        )
        self._table_sizes = {"num_slots": max_num_seqs, "max_blocks": self.max_blocks, "num_groups": self.num_groups}
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._vocab_size = model_config.vocab_size
        self._hidden_size = model_config.hidden_size
        self._features = np.zeros(max_num_seqs, np.int32)
        self._step = functools.partial(
            step, family=family, config=model_config, kernels=kernels, group_of_layer=self.layout.group_of_layer
        )
        self._abstract_params = jax.tree.map(abstract_like, params)
        self._abstract_slots = jax.tree.map(self._replicate, jax.eval_shape(self._init_slots))
        self._mask_sizes = [size for size in (1, 8, 64) if size < max_num_seqs] + [max_num_seqs]
        self.steps = CompiledSteps(self._lower_step)
        self._admissions = CompiledSteps(self._lower_admission)
        self._kv_cache: KVCache | None = None
        self._slots: Slots | None = None
        self.num_blocks = 0
        self.seconds = {"build": 0.0, "dispatch": 0.0}

    @property
    def num_compiles(self) -> int:
        """Executables compiled since the runner was made."""
        return self.steps.num_compiles + self._admissions.num_compiles

    @property
    def num_recompiles_after_warmup(self) -> int:
        """Executables that a request had to wait for although warm-up was done: 0 unless there is a bug."""
        return self.steps.num_recompiles_after_warmup + self._admissions.num_recompiles_after_warmup

    def measure_step_memory(self) -> int:
        """Bytes that steps take per device besides weights and KV: slots, and what the largest of them makes.

        Compiles it, against a small KV pool.
        """
        assert self._kv_cache is None
        self.num_blocks = self.max_blocks
        largest = StepKey(self.buckets[-1], is_plain=False, is_decode_only=False)
        memory = self._lower_step(largest).compile().memory_analysis()
        assert memory is not None
        slots = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self._abstract_slots))
        return slots + memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes

    def check_kernels(self) -> None:
        """Lower two steps that have all kernels between them, so that what these cannot do shows before a request needs
        it. `num_blocks` must be set. Raises NotImplementedError.
        """
        self._lower_step(StepKey(self.buckets[-1], is_plain=False, is_decode_only=False))
        self._lower_step(StepKey(self.buckets[0], is_plain=True, is_decode_only=self._has_special_steps))

    def allocate(self) -> None:
        """Make the KV pools, of `num_blocks`, and the slots. Before the first step, once."""
        with jax.set_mesh(self.mesh):
            self._kv_cache = init_kv_cache(self._abstract_kv_cache(num_blocks=self.num_blocks))
            self._slots = jax.jit(self._init_slots, out_shardings=self._replicated)()  # never two of them at once

    def warm_up(self, *, progress: bool) -> float:
        """Compile every step that a plan can ask for; `num_blocks` must be set. Returns seconds.

        Before `allocate`: on a GPU, XLA tries out matrix products while it compiles, and needs memory for that.
        """
        seconds = self._admissions.warm_up(["scalars", "extras", *self._mask_sizes], progress=False)
        return seconds + self.steps.warm_up(self.variants, progress=progress)

    @property
    def variants(self) -> list[StepKey]:
        """Every step that a plan can ask for, the longest to compile first."""
        kinds = (False, True) if self._has_special_steps else (False,)
        return [
            StepKey(bucket, is_plain, is_decode_only)
            for bucket in reversed(self.buckets)
            for is_decode_only in kinds
            for is_plain in kinds
            if bucket.num_rows == bucket.num_tokens or not is_decode_only
        ]

    def dispatch(self, plan: StepPlan, *, masks: Callable[[], Masks] | None = None) -> PendingStep:
        """Start a step; returns before the device has finished it.

        `masks` gives the tokens that slots may draw from. It is called when all else is ready, since it waits for the
        tokens of the step before.
        """
        start = time.perf_counter()
        if plan.admitted:
            self._admit(plan)
        slots = [row.slot for row in plan.rows]
        needed = int(np.bitwise_or.reduce(self._features[slots]))
        bucket = self.bucket_for(plan)
        packed = pack(plan, bucket, **self._table_sizes, features=needed)
        has_prompt_logprobs = bool(packed[bucket.fields["header"][0] + 3])
        key = StepKey(
            bucket,
            is_plain=self._has_special_steps and not needed & ~Feature.PLAIN and not has_prompt_logprobs,
            is_decode_only=(
                self._has_special_steps
                and bucket.num_rows == bucket.num_tokens
                and plan.num_decode_rows == len(plan.rows)
            ),
        )
        executable = self.steps[key]
        self.seconds["build"] += time.perf_counter() - start
        if masks is not None:
            self._write_masks(masks())
        built = time.perf_counter()
        self._kv_cache, self._slots, outputs = executable(self.params, self._kv_cache, self._slots, packed)
        outputs.token_ids.copy_to_host_async()
        outputs.is_corrupted.copy_to_host_async()
        self.seconds["dispatch"] += time.perf_counter() - built
        return PendingStep(
            plan,
            outputs,
            has_logprobs=bool(needed & Feature.LOGPROBS),
            has_prompt_logprobs=has_prompt_logprobs,
            has_embeddings=bool(needed & Feature.POOLING),
        )

    def bucket_for(self, plan: StepPlan) -> Bucket:
        """The smallest bucket that holds the plan."""
        limit = self.buckets[-1].num_tokens
        num_tokens = max(plan.num_tokens, min(plan.padded_tokens, limit))
        return next(bucket for bucket in self.buckets if bucket.num_tokens >= num_tokens)

    def close(self) -> None:
        """Free the device memory now instead of when the last reference goes."""
        for leaf in jax.tree.leaves((self.params, self._kv_cache, self._slots)):
            leaf.delete()

    def _admit(self, plan: StepPlan) -> None:
        for requests in itertools.batched(plan.admitted, ADMISSION_ROWS):
            packed = pack_admissions(list(requests), **self._table_sizes)
            self._slots = self._admissions["scalars"](self._slots, packed)
        for request in plan.admitted:
            self._features[request.slot] = features(request.request)
            if has_extras(request.request):
                extras = pack_extras(
                    request.request, request.token_ids, request.num_prompt_tokens, vocab_size=self._vocab_size
                )
                self._slots = self._admissions["extras"](self._slots, np.int32(request.slot), extras)

    def _write_masks(self, masks: Masks) -> None:
        num_rows = next(size for size in self._mask_sizes if size >= len(masks.slots))
        packed = pack_masks(masks, num_rows=num_rows, num_slots=self.max_num_seqs)
        self._slots = self._admissions[num_rows](self._slots, packed)

    def _init_slots(self) -> Slots:
        return init_slots(**self._table_sizes, vocab_size=self._vocab_size, hidden_size=self._hidden_size)

    def _replicate(self, x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._replicated)

    def _lower_step(self, key: StepKey) -> jax.stages.Lowered:
        function = functools.partial(self._step, **key._asdict())
        packed = self._replicate(np.zeros(key.bucket.packed_size, np.int32))
        with jax.set_mesh(self.mesh):
            return jax.jit(function, donate_argnums=(1, 2)).lower(
                self._abstract_params,
                self._abstract_kv_cache(num_blocks=self.num_blocks),
                self._abstract_slots,
                packed,
            )

    def _lower_admission(self, key: str | int) -> jax.stages.Lowered:
        """What is written into slots: "scalars" or "extras" of new requests, or so many rows of masks."""
        with jax.set_mesh(self.mesh):
            if isinstance(key, int):
                packed = np.zeros((key, 1 + math.ceil(self._vocab_size / 32)), np.uint32)
                return jax.jit(allow, donate_argnums=0).lower(self._abstract_slots, self._replicate(packed))
            if key == "scalars":
                packed = pack_admissions([], **self._table_sizes)
                return jax.jit(admit, donate_argnums=0).lower(self._abstract_slots, self._replicate(packed))
            extras = jax.tree.map(
                lambda held: self._replicate(jax.ShapeDtypeStruct(held.shape[1:], held.dtype)),
                self._abstract_slots.sampling.extras,
            )
            slot = self._replicate(np.int32(0))
            return jax.jit(_admit_extras, donate_argnums=0).lower(self._abstract_slots, slot, extras)


def _admit_extras(slots: Slots, slot: Int[Array, ""], extras: Extras) -> Slots:
    return dataclasses.replace(slots, sampling=admit_extras(slots.sampling, slot, extras))


def _on_host(logprobs: Logprobs | None) -> HostLogprobs:
    assert logprobs is not None, "a plain step has no logprobs"
    return HostLogprobs(logprobs)


def abstract_like(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
