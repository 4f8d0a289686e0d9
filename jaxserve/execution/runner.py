"""Runner: owns params, KVCache, slots and the compiled steps; turns a StepPlan into work on the device."""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Float32, Int

from jaxserve.execution.batch import pack, pack_nothing, wants_prompt_logprobs
from jaxserve.execution.builder import StepBuilder
from jaxserve.execution.compile import CompiledSteps
from jaxserve.execution.kv_cache import init_kv_cache
from jaxserve.execution.lowering import Lowering
from jaxserve.execution.shapes import StepKey
from jaxserve.execution.slots import ADMISSION_ROWS, Masks, Slots, admit, allow, pack_admissions, pack_masks
from jaxserve.execution.step import StepOutputs
from jaxserve.layers.batch import KVCache
from jaxserve.request import TokenLogprobs
from jaxserve.sampling.features import Feature, features, has_extras
from jaxserve.sampling.logprobs import Logprobs
from jaxserve.sampling.state import Extras, admit_extras, pack_extras
from jaxserve.scheduling.plan import StepPlan


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

    def __init__(self, builder: StepBuilder, params: Any, *, lowering: Lowering | None = None):
        """`lowering` lowers the steps that `warm_up` compiles, and is closed by it; without it this process does."""
        self.builder = builder
        self.params = params
        self.mesh = builder.mesh
        self.block_size = builder.block_size
        self.layout = builder.layout
        self.bytes_per_block = builder.bytes_per_block
        self._lowering = lowering
        self._features = np.zeros(builder.max_num_seqs, np.int32)
        self._may_want_prompt_logprobs = np.zeros(builder.max_num_seqs, bool)
        self._mask_sizes = [size for size in (1, 8, 64) if size < builder.max_num_seqs] + [builder.max_num_seqs]
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
        memory = self._lower(self.builder.shapes.largest, self.builder.max_blocks).compile().memory_analysis()
        assert memory is not None
        slots = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.builder.slots))
        return slots + memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes

    def check_kernels(self) -> None:
        """Lower two steps that have all kernels between them, so that what these cannot do shows before a request needs
        it. `num_blocks` must be set. Raises NotImplementedError.
        """
        keys = self.builder.shapes.keys
        self._lower_step(keys[0])
        self._lower_step(keys[-1])

    def allocate(self) -> None:
        """Make the KV pools, of `num_blocks`, and the slots. Before the first step, once."""
        with self.builder.on_mesh():
            self._kv_cache = init_kv_cache(self.builder.kv_cache(num_blocks=self.num_blocks))
            # By jit: never two of them at once.
            self._slots = jax.jit(self.builder.init_slots, out_shardings=self.builder.replicated)()

    def warm_up(self, *, progress: bool) -> float:
        """Compile every step that a plan can ask for; `num_blocks` must be set. Returns seconds.

        Before `allocate`: on a GPU, XLA tries out matrix products while it compiles, and needs memory for that.
        """
        seconds = self._admissions.warm_up(self._admission_keys, progress=False)
        num_lowered_elsewhere = 0 if self._lowering is None else self._lowering.num_workers
        try:
            seconds += self.steps.warm_up(
                self.builder.shapes.keys, num_lowered_elsewhere=num_lowered_elsewhere, progress=progress
            )
        finally:
            self._close_lowering()
        return seconds

    def run_empty_steps(self, *, times: int = 3) -> None:
        """Run all that is compiled, after `allocate`, on nothing: KV and slots stay as they are.

        On a GPU the first runs of a program record its command buffers, which no request should wait for.
        """
        for _ in range(times):
            for key, executable in self._admissions.items():
                self._slots = executable(self._slots, *self._empty_admission(key))
            for key, executable in self.steps.items():
                packed = pack_nothing(key.bucket, **self.builder.table_sizes)
                self._kv_cache, self._slots, outputs = executable(self.params, self._kv_cache, self._slots, packed)
                jax.block_until_ready(outputs)

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
        has_prompt_logprobs = bool(self._may_want_prompt_logprobs[slots].any()) and wants_prompt_logprobs(plan)
        key = self.key_for(plan, needed, has_prompt_logprobs=has_prompt_logprobs)
        packed = pack(plan, key.bucket, **self.builder.table_sizes, features=needed)
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

    def key_for(self, plan: StepPlan, needed: int, *, has_prompt_logprobs: bool) -> StepKey:
        """The smallest step that holds the plan and does what its rows need: `needed` are bits of `Feature`."""
        return self.builder.shapes.key_for(
            max(plan.num_tokens, min(plan.padded_tokens, self.builder.buckets[-1].num_tokens)),
            is_plain=not needed & ~Feature.PLAIN,
            is_decode_only=plan.num_decode_rows == len(plan.rows),
            has_logprobs=has_prompt_logprobs or bool(needed & Feature.LOGPROBS),
        )

    def close(self) -> None:
        """Free the device memory now instead of when the last reference goes."""
        self._close_lowering()
        for leaf in jax.tree.leaves((self.params, self._kv_cache, self._slots)):
            leaf.delete()

    def _close_lowering(self) -> None:
        if self._lowering is not None:
            self._lowering.close()
            self._lowering = None

    def _admit(self, plan: StepPlan) -> None:
        for requests in itertools.batched(plan.admitted, ADMISSION_ROWS):
            packed = pack_admissions(list(requests), **self.builder.table_sizes)
            self._slots = self._admissions["scalars"](self._slots, packed)
        for request in plan.admitted:
            self._features[request.slot] = features(request.request)
            self._may_want_prompt_logprobs[request.slot] = request.request.params.prompt_logprobs is not None
            if has_extras(request.request):
                extras = pack_extras(
                    request.request, request.token_ids, request.num_prompt_tokens, vocab_size=self.builder.vocab_size
                )
                self._slots = self._admissions["extras"](self._slots, np.int32(request.slot), extras)

    def _write_masks(self, masks: Masks) -> None:
        num_rows = next(size for size in self._mask_sizes if size >= len(masks.slots))
        packed = pack_masks(masks, num_rows=num_rows, num_slots=self.builder.max_num_seqs)
        self._slots = self._admissions[num_rows](self._slots, packed)

    @property
    def _admission_keys(self) -> list[str | int]:
        """What is written into slots: "scalars" or "extras" of new requests, or so many rows of masks."""
        return ["scalars", "extras", *self._mask_sizes]

    def _lower_step(self, key: StepKey) -> jax.stages.Lowered:
        return self._lower(key, self.num_blocks)

    def _lower(self, key: StepKey, num_blocks: int) -> jax.stages.Lowered:
        return (self._lowering or self.builder).lower(key, num_blocks)

    def _lower_admission(self, key: str | int) -> jax.stages.Lowered:
        function = {"scalars": admit, "extras": _admit_extras}[key] if isinstance(key, str) else allow
        with self.builder.on_mesh():
            return jax.jit(function, donate_argnums=0).lower(
                self.builder.slots, *jax.tree.map(self.builder.replicate, self._empty_admission(key))
            )

    def _empty_admission(self, key: str | int) -> tuple[Any, ...]:
        """What an admission writes besides, if it writes nothing: all of it goes to a slot that does not exist."""
        num_slots = self.builder.max_num_seqs
        if isinstance(key, int):
            masks = Masks(np.zeros(0, np.int32), np.zeros((0, math.ceil(self.builder.vocab_size / 32)), np.uint32))
            return (pack_masks(masks, num_rows=key, num_slots=num_slots),)
        if key == "scalars":
            return (pack_admissions([], **self.builder.table_sizes),)
        held = self.builder.slots.sampling.extras
        return np.int32(num_slots), jax.tree.map(lambda x: np.zeros(x.shape[1:], x.dtype), held)


def _admit_extras(slots: Slots, slot: Int[Array, ""], extras: Extras) -> Slots:
    return dataclasses.replace(slots, sampling=admit_extras(slots.sampling, slot, extras))


def _on_host(logprobs: Logprobs | None) -> HostLogprobs:
    assert logprobs is not None, "this step has no logprobs"
    return HostLogprobs(logprobs)
