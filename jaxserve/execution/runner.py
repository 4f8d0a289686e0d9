"""Runner: owns params, KVCache, slots and the compiled programs; turns a StepPlan into work on the device."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Float32, Int

from jaxserve.execution.batch import pack, wants_prompt_logprobs
from jaxserve.execution.expert_loads import ExpertLoads
from jaxserve.execution.kv_cache import zeros
from jaxserve.execution.programs.background import BackgroundWarmUp
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.execution.programs.compile import CompiledSteps, WarmUp
from jaxserve.execution.programs.kinds import (
    Admit,
    AdmitExtras,
    AdmitTokens,
    Begin,
    Forward,
    KeepState,
    PlainDecode,
    Program,
    ResumeState,
    RunStage,
)
from jaxserve.execution.programs.lowering import Lowering
from jaxserve.execution.programs.memory import memory_of_step
from jaxserve.execution.programs.model import State
from jaxserve.execution.programs.mosaic import MosaicKernel, kernels_of
from jaxserve.execution.programs.readiness import Readiness
from jaxserve.execution.programs.shapes import PLAIN_DECODE, Step, StepNeeds
from jaxserve.execution.slots import ADMISSION_ROWS, Masks, pack_admissions, pack_masks, pack_tokens
from jaxserve.execution.step import CORRUPTED, NOTHING, Drawn
from jaxserve.layers.peers import allocate_peers
from jaxserve.request import TokenLogprobs
from jaxserve.sampling.features import Feature, features, has_extras
from jaxserve.sampling.logprobs import Logprobs
from jaxserve.sampling.state import pack_extras
from jaxserve.scheduling.plan import Drafted, Row, StepPlan

_LAUNCHING = threading.Lock()
"""Held while a program of several devices is launched. The devices wait for each other in such programs (see
`pallas_kernels.peers`), so the engines of a process take turns and all devices get the programs in one order. A call
returns when every device has been given its program.
"""

NUM_FIRST_RUNS = 3
"""Runs of a program on nothing before requests may use it, where the first ones take longer."""


class HostLogprobs:
    """Logprobs of a step on the host, read entry by entry."""

    def __init__(self, logprobs: Logprobs):
        self._arrays = [np.asarray(array) for array in logprobs]

    def entry(self, index: int, token_id: int, num_top: int, *, asked: Sequence[int] = ()) -> TokenLogprobs:
        """Return the log probabilities at `index`, which belong to `token_id`; `asked` are the request's own."""
        logprob, rank, top_ids, top_logprobs, *of_asked = (array[index] for array in self._arrays)
        asked_logprobs, asked_ranks = (values[: len(asked)].tolist() for values in of_asked)
        return TokenLogprobs(
            token_id,
            float(logprob),
            int(rank),
            top_ids[:num_top].tolist(),
            top_logprobs[:num_top].tolist(),
            list(zip(asked, asked_logprobs, asked_ranks, strict=True)),
        )


class StepOutputs(NamedTuple):
    """What the host reads of a step, one entry per row except for prompt logprobs; the last three are None unless
    requested.
    """

    token_ids: Int[Array, "R columns"]
    """See `Drawn`."""
    num_columns: int
    """Number of tokens that a row may draw; of entries in `logprobs` for each."""
    logprobs: Logprobs | None
    """One entry for each column of each row."""
    prompt_logprobs: Logprobs | None
    """One entry per token of the step: the log probability of the prompt token that follows it."""
    embeddings: Float[Array, "R E"] | None


class PendingStep(NamedTuple):
    """A step that the device is running, or has run. Reading it waits for the step."""

    plan: StepPlan
    outputs: StepOutputs

    def token_ids(self) -> list[list[int]]:
        """Return the sampled tokens of each row; undefined for a corrupted row."""
        token_ids = self._token_ids().tolist()
        if self.num_columns > 1:
            token_ids = [row[: row.index(NOTHING)] if row[-1] == NOTHING else row for row in token_ids]
        return token_ids

    def is_corrupted(self) -> list[bool]:
        """Return for each row whether logits that it drew from contained NaN."""
        return (self._token_ids() == CORRUPTED).any(axis=1).tolist()

    def _token_ids(self) -> np.ndarray:
        return np.asarray(self.outputs.token_ids)[: len(self.plan.rows), : self.num_columns]

    @property
    def num_columns(self) -> int:
        """Number of tokens that a row may draw; of entries in `logprobs` for each."""
        return self.outputs.num_columns

    def drafted(self) -> list[Drafted] | None:
        """Return what became of the drafts of each row, None if no row has verified or proposed any."""
        drafted = np.asarray(self.outputs.token_ids)[: len(self.plan.rows), self.num_columns :]
        if self.num_columns == 1 and not drafted[:, 1:2].any():
            return None
        return [Drafted(verified, proposed[:count]) for verified, count, *proposed in drafted.tolist()]

    def logprobs(self) -> HostLogprobs | None:
        """Return the log probabilities, `num_columns` entries per row, if some row requested them."""
        return _on_host(self.outputs.logprobs)

    def prompt_logprobs(self) -> HostLogprobs | None:
        """Return the prompt's log probabilities, one entry per token of the step, if some row requested them."""
        return _on_host(self.outputs.prompt_logprobs)

    def embeddings(self) -> Float32[np.ndarray, "B E"] | None:
        """Return the embeddings, one vector per row, if some row requested one."""
        return None if self.outputs.embeddings is None else np.asarray(self.outputs.embeddings)


class Runner:
    """The device side of one engine.

    Steps run in the order in which they were dispatched, so a plan may rely on the KV of every plan before it.
    """

    def __init__(self, builder: StepBuilder, params: Any = None, *, lowering: Lowering | None = None):
        """`lowering` lowers what `warm_up` compiles, until `allocate` closes it; without it this process does. Steps
        may be compiled before there are `params`.
        """
        self.builder = builder
        self.model = builder.model
        assert isinstance(builder.mesh, Mesh)
        self.mesh: Mesh = builder.mesh
        self.block_size = builder.model.block_size
        self.layout = builder.model.layout
        self.bytes_per_block = builder.bytes_per_block
        self.num_stages = len(builder.models)
        self.states: list[dict[State, Any]] = [{} for _ in builder.models]
        """The state of each stage."""
        if params is not None:
            self.set_params(params)
        self.steps = CompiledSteps(
            self._lower, compiler_options=lambda program: program.compiler_options(builder.model_of(program))
        )
        self._lowering = lowering
        self._background: BackgroundWarmUp | None = None
        self.readiness: Readiness | None = None
        """Which programs steps may run in; None: in all."""
        self.on_programs: Callable[[], object] = lambda: None
        """Called when programs have been compiled or have failed, by the thread that compiles them."""
        self._first_runs: collections.deque[Program] = collections.deque()
        self._features = np.zeros(self.model.max_num_seqs, np.int32)
        self._may_want_prompt_logprobs = np.zeros(self.model.max_num_seqs, bool)
        self._no_admissions: list[jax.Array] = []
        self._drawn: collections.deque[tuple[set[int], jax.Array]] = collections.deque(maxlen=self.num_stages)
        """With several stages: the slots for which plans in flight draw, and the last tokens of all slots after each,
        on the first stage. The oldest plan is first.
        """
        self._no_tokens = np.zeros(self.model.max_num_seqs, np.int32)
        """Given to the first stage instead, for plans whose tokens the host knows."""
        self._places = [_place(model.replicated) for model in builder.models]
        self._loads = [ExpertLoads() for _ in builder.models]
        self.num_blocks = 0
        self.num_waits = 0
        """How often the start of a program or a wait for the device, which never overlap, has begun or ended: odd while
        it lasts. From any thread.
        """
        self.seconds = {"build": 0.0, "dispatch": 0.0}

    @property
    def state(self) -> dict[State, Any]:
        """The state of the last stage, or the only one."""
        return self.states[-1]

    @property
    def num_compiles(self) -> int:
        """Executables compiled since the runner was made."""
        return self.steps.num_compiles

    @property
    def num_recompiles_after_warmup(self) -> int:
        """Executables that a request had to wait for although warm-up was done: 0 unless there is a bug."""
        return self.steps.num_recompiles_after_warmup

    def expert_loads(self, *, wait: bool) -> np.ndarray | None:
        """Return how many tokens each expert of each layer has had, [L, X], None if they are not counted: those of all
        steps, or without `wait` for those that run, those of an earlier call.
        """
        caches = [state.get("kv_cache") for state in self.states]
        counts = [cache.expert_loads for cache in caches if cache is not None and cache.expert_loads is not None]
        if not counts:
            return None
        read = [loads.read(each, wait=wait) for loads, each in zip(self._loads, counts, strict=True)]
        return np.sum(read, axis=0)

    def step_memory(self) -> int:
        """Return the bytes that steps need per device besides weights and KV, where they need most: slots, peers' rows,
        and what the largest step allocates, whose programs are compiled for this.
        """
        step = self.builder.shapes.largest_step
        programs = step.programs
        with concurrent.futures.ThreadPoolExecutor() as pool:
            compiled: dict[Program, jax.stages.Compiled] = dict(
                zip(programs, pool.map(self.steps.__getitem__, programs), strict=True)
            )
        of_stages = [[program] for program in step.stages] + [step.of_last_stage]
        largest = max(
            memory_of_step({program: compiled[program] for program in programs}, state_bytes=model.state_bytes)
            for model, programs in zip(self.builder.models, of_stages, strict=True)
        )
        return max(largest, self.model.state_bytes + self.model.unsettled_bytes)

    def set_params(self, params: Any) -> None:
        """Set the weights. To be called before `allocate`, if they were not there when the runner was made."""
        for model, state in zip(self.builder.models, self.states, strict=True):
            state["params"] = model.put(params)

    def set_num_blocks(self, num_blocks: int) -> None:
        """Set how many blocks the KV pools will have, for which steps are compiled. To be called before `allocate`."""
        assert "kv_cache" not in self.state
        if num_blocks != self.num_blocks:
            self.num_blocks = num_blocks
            self.steps.clear()

    def check_kernels(self) -> None:
        """Lower two programs that together use all kernels, so that a model that a kernel does not support is reported
        before a request needs it. The number of blocks must be set. Raises NotImplementedError.
        """
        shapes = self.builder.shapes
        decode = shapes.step_for(1, PLAIN_DECODE)
        for program in (*shapes.largest_step.stages, shapes.largest, *decode.stages, decode.forward):
            if program not in self.steps:
                self._lower(program)

    def allocate(self) -> None:
        """Allocate the KV pools, with `num_blocks` blocks, and the slots, and wait for them: a lack of memory shows
        here and not in the first step. To be called once, before the first step.
        """
        self._close_lowering()
        for model, state in zip(self.builder.models, self.states, strict=True):
            with model.on_mesh():
                state |= {
                    "kv_cache": zeros(model.kv_cache(self.num_blocks)),
                    "kept_states": zeros(model.kept_states),
                    # Inside jit, so that two copies of the slots never exist at the same time.
                    "slots": jax.jit(model.init_slots, out_shardings=model.replicated)(),
                    "peers": None if model.peers is None else allocate_peers(model.peers),
                }
                nobody = pack_admissions([], **model.table_sizes)
                self._no_admissions.append(jax.device_put(nobody, model.replicated))
            jax.block_until_ready((state["kv_cache"], state["slots"]))

    def warm_up(self, *, only_first: bool = False, progress: bool) -> WarmUp:
        """Compile every program that a plan can ask for, or only those that the engine needs before it takes requests;
        the number of blocks must be set.

        To be called before `allocate`: on a GPU, XLA tries out matrix products while it compiles, and needs memory for
        that.
        """
        return self.steps.warm_up(
            self.builder.first_programs() if only_first else self.builder.shapes.programs,
            num_lowered_elsewhere=0 if self._lowering is None else self._lowering.num_workers,
            kernels_of=functools.partial(self._kernels_of, self._lowering),
            mesh=self.mesh,
            progress=progress,
        )

    def warm_up_rest(self, lowering: Lowering, lowering_here: Lowering, *, on_end: Callable[[], object]) -> None:
        """Compile the programs that are missing while steps run in those that are there. `lowering` is closed, and
        `on_end` is called by another thread, when all is compiled; `lowering_here` has no workers.
        """
        ready = {program for program, _ in self.steps.items()}
        readiness = self.readiness = Readiness(self.builder.shapes, ready)

        def give_up(program: Program) -> None:
            readiness.fail(program)
            self.on_programs()

        def end() -> None:
            on_end()
            self.on_programs()

        phases = [
            phase._replace(programs=[program for program in phase.programs if program not in ready])
            for phase in self.builder.order()
        ]
        self._background = BackgroundWarmUp(
            self.steps,
            phases,
            num_blocks=self.num_blocks,
            lowering=lowering,
            lowering_here=lowering_here,
            kernels_of=functools.partial(self._kernels_of, lowering),
            mesh=self.mesh,
            on_compiled=self._take_compiled,
            on_failed=give_up,
            on_end=end,
        )

    @property
    def is_warming_up(self) -> bool:
        """True if some programs are not there yet."""
        return self.readiness is not None

    def want(self, programs: Sequence[Program]) -> None:
        """Compile programs at once, for which a request waits."""
        if self._background is not None:
            self._background.want(programs)

    def wait_for_background(self) -> None:
        """Wait until nothing is compiled in the background."""
        if self._background is not None:
            self._background.wait()

    @property
    def can_advance_warm_up(self) -> bool:
        """True if `advance_warm_up` has something to do."""
        return bool(self._first_runs) or (self.readiness is not None and self._is_all_compiled)

    @property
    def _is_all_compiled(self) -> bool:
        return self._background is not None and self._background.is_done

    def advance_warm_up(self) -> None:
        """Let steps use the programs that have been compiled meanwhile. To be called between two steps, in the thread
        that dispatches them; each call runs one program with empty arguments, if the first runs of programs take
        longer.
        """
        if self.readiness is None:
            return
        if self._first_runs:
            program = self._first_runs.popleft()
            self.run_empty(program)
            if program not in self._first_runs:
                self.readiness.add(program)
        elif self._is_all_compiled:
            self.readiness = None

    def run_empty_steps(self) -> None:
        """Run all that is compiled, after `allocate`, on nothing: KV and slots stay as they are.

        On a GPU the first runs of a program record its command buffers, which no request should wait for.
        """
        for _ in range(NUM_FIRST_RUNS):
            for program, _ in self.steps.items():
                jax.block_until_ready(self.run_empty(program))

    def run_empty(self, program: Program) -> Any:
        """Start a program on nothing, between two steps; returns its results."""
        return self._run(program, *program.nothing(self.builder.model_of(program)))

    def dispatch(self, plan: StepPlan, *, masks: Callable[[int], Masks] | None = None) -> PendingStep:
        """Start a step; returns before the device has finished it.

        `masks` gives the tokens that slots may draw from, in each of a number of columns. It is called while the device
        runs the forward pass, which does not depend on them, and may wait for the tokens of the step before.
        """
        start = time.perf_counter()
        for row in plan.admitted:
            self._features[row.slot] = features(row.request.asked)
            self._may_want_prompt_logprobs[row.slot] = row.request.asked.params.prompt_logprobs is not None
        slots = [row.slot for row in plan.rows]
        needed = int(np.bitwise_or.reduce(self._features[slots]))
        has_prompt_logprobs = bool(self._may_want_prompt_logprobs[slots].any()) and wants_prompt_logprobs(plan)
        step = self.step_for(plan, needed, has_prompt_logprobs=has_prompt_logprobs)
        self._admit(plan.admitted, step)
        packed = pack(plan, step.forward.bucket, **self.model.table_sizes, features=needed)
        for copy in plan.resumed:
            self._run_on_each_stage(ResumeState, np.asarray(copy, np.int32))
        for copy in plan.passed:
            self._run_on_each_stage(KeepState, np.asarray(copy, np.int32))
        built = time.perf_counter()
        x = self._tokens_to_continue(plan) if step.stages else None
        for program, following in zip(step.stages, self._places[1:], strict=True):
            x = self._run(program, packed, x, *self._admissions(plan.admitted, program))
            x = jax.device_put(x, following)
        forwarded = self._run(step.forward, packed, x, *self._admissions(plan.admitted, step.forward))
        if step.finish is not None:
            forwarded = self._run(step.finish, forwarded)
        prompt_logprobs = step.prompt_logprobs and self._run(step.prompt_logprobs, forwarded.hidden, packed)
        embeddings = step.embed and self._run(step.embed, forwarded.hidden, packed)
        launched = time.perf_counter()
        num_columns = step.forward.bucket.num_columns or 1
        if masks is not None:
            assert step.draw is not None, "a mask is no part of plain rows"
            self._write_masks(masks(num_columns))
        masked = time.perf_counter()
        drawn: Drawn = forwarded if step.draw is None else self._run(step.draw, forwarded.logits, forwarded.rows)
        if step.settle is not None:
            self._run(step.settle, forwarded.rows, forwarded.unsettled)
        for copy in plan.kept:
            self._run_on_each_stage(KeepState, np.asarray(copy, np.int32))
        if step.stages and (sampling := {row.slot for row in plan.rows if row.samples}):
            self._drawn.append((sampling, jax.device_put(self.state["slots"].last_tokens, self._places[0])))
        if not self.model.traits.leaves_tokens_on_host:  # else the program copies them
            drawn.token_ids.copy_to_host_async()
        self.seconds["build"] += built - start
        self.seconds["dispatch"] += launched - built + time.perf_counter() - masked
        outputs = StepOutputs(
            drawn.token_ids,
            num_columns,
            drawn.logprobs if needed & Feature.LOGPROBS else None,
            prompt_logprobs,
            embeddings,
        )
        return PendingStep(plan, outputs)

    def set_acceptance(self, rates: Sequence[float]) -> None:
        """Set the fractions of steps in which drafts are accepted by chance, of an engine that was started for that
        (`Speculation`). To be called while no step runs.
        """
        slots = self.state["slots"]
        given = jax.device_put(np.array(rates, np.float32), self.model.replicated)
        self.state["slots"] = dataclasses.replace(
            slots, drafts=dataclasses.replace(slots.drafts, acceptance_rates=given)
        )

    def step_for(self, plan: StepPlan, needed: int, *, has_prompt_logprobs: bool) -> Step:
        """Return the smallest step that holds the plan and supports what its rows need: `needed` are bits of
        `Feature`.
        """
        return self.builder.shapes.step_for(
            max(plan.num_tokens, min(plan.padded_tokens, self.model.buckets[-1].num_tokens)),
            StepNeeds.of(
                needed,
                has_prompt_logprobs=has_prompt_logprobs,
                is_decode_only=plan.num_decode_rows == len(plan.rows),
            ),
            num_columns=1 + max(row.num_drafts for row in plan.rows) if self.model.drafting is not None else 0,
            is_ready=self._is_ready,
        )

    def _is_ready(self, program: Program) -> bool:
        return self.readiness is None or self.readiness.is_ready(program)

    def _take_compiled(self, program: Program) -> None:
        if self.model.traits.records_first_runs:
            self._first_runs.extend([program] * NUM_FIRST_RUNS)
        elif (readiness := self.readiness) is not None:  # another thread may set it to None meanwhile
            readiness.add(program)
        self.on_programs()

    def _run(self, program: Program, *arguments: Any) -> Any:
        """Start a program with the state and these arguments, update the state, and return the other results."""
        executable = self.steps[program]
        model, state = self.builder.model_of(program), self.states[program.stage]
        self.num_waits += 1  # a call hangs where the device takes no more programs
        try:
            with _LAUNCHING if model.mesh.size > 1 else contextlib.nullcontext():
                taken = [program.part(model, name, state[name]) for name in program.takes]
                *given, made = executable(*taken, *arguments)
        finally:
            self.num_waits += 1
        for name, part in zip(program.gives, given, strict=True):
            state[name] = program.put(name, state[name], part)
        return made

    def _run_on_each_stage(self, kind: type[Admit | KeepState | ResumeState], packed: np.ndarray) -> None:
        for index in (*range(self.num_stages - 1), -1):
            self._run(kind(index), packed)

    def _tokens_to_continue(self, plan: StepPlan) -> jax.Array | np.ndarray:
        """Return the last tokens from which rows of the plan continue and that the host does not know, on the first
        stage, which waits for the plan in flight that draws them, and for no later one.
        """
        slots = {row.slot for row in plan.rows if row.start >= len(row.request.token_ids)}
        if not slots:
            return self._no_tokens
        return next(tokens for drawn, tokens in reversed(self._drawn) if not slots.isdisjoint(drawn))

    def close(self) -> None:
        """Free the device memory and the programs now instead of when the last reference goes."""
        self._close_lowering()
        if self._background is not None:
            self._background.close()
        self.steps.clear()
        for leaf in jax.tree.leaves((self.states, self._no_admissions)):
            leaf.delete()

    def _close_lowering(self) -> None:
        if self._lowering is not None:
            self._lowering.close()
            self._lowering = None

    def _admissions(self, rows: Sequence[Row], forward: PlainDecode | Forward | RunStage | Begin) -> tuple[Any, ...]:
        """Return the arguments by which a forward pass writes the slots of new requests, if it does."""
        if not forward.carries_admissions(self.builder.model_of(forward)):
            return ()
        if not rows:  # the block tables of eight rows may take megabytes
            return (self._no_admissions[forward.stage],)
        return (pack_admissions(rows[:ADMISSION_ROWS], **self.model.table_sizes),)

    def _admit(self, rows: Sequence[Row], step: Step) -> None:
        """Write the slots of new requests, except for what the forward pass writes."""
        carried = step.forward.carries_admissions(self.model)
        rest = rows[ADMISSION_ROWS:] if carried else rows
        for some in itertools.batched(rest, ADMISSION_ROWS):
            self._run_on_each_stage(Admit, pack_admissions(some, **self.model.table_sizes))
        if self.model.keeps_tokens:
            for packed in pack_tokens(rows, num_slots=self.model.max_num_seqs):
                self._run(AdmitTokens(), packed)
        for request, slot, *_ in rows:
            if has_extras(request.asked):
                extras = pack_extras(
                    request.asked, request.token_ids, request.num_prompt_tokens, vocab_size=self.model.vocab_size
                )
                self._run(AdmitExtras(), np.int32(slot), extras)

    def _write_masks(self, masks: Masks) -> None:
        size, num_columns, _ = masks.words.shape
        program = self.builder.shapes.masks_for(size, num_columns=num_columns, is_ready=self._is_ready)
        self._run(program, pack_masks(masks, num_rows=program.num_rows, num_slots=self.model.max_num_seqs))

    def _lower(self, program: Program) -> jax.stages.Lowered:
        return (self._lowering or self.builder).lower(program, self.num_blocks)

    def _kernels_of(self, lowering: Lowering | None, lowered: jax.stages.Lowered) -> Set[MosaicKernel]:
        """Return the kernels to compile before a program; none if an earlier start has lowered the programs, since it
        has compiled them too.
        """
        if not self.model.has_kernels or (lowering is not None and lowering.were_compiled):
            return frozenset()
        return kernels_of(lowered)


def _place(sharding: NamedSharding) -> Any:
    """Return what `device_put` is to be given for arrays that lie as `sharding` says: the device, if it is one, which
    costs the host less than a sharding.
    """
    device, *others = sharding.device_set
    return sharding if others else device


def _on_host(logprobs: Logprobs | None) -> HostLogprobs | None:
    return None if logprobs is None else HostLogprobs(logprobs)
