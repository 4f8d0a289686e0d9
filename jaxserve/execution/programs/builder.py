"""StepBuilder: all that is needed to lower the programs of a model's steps, and no device. The runner has one, and each
worker.

What is exported is a function of lists of arrays: whoever calls it puts the pytrees of the house together.
"""

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import msgspec
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxserve.execution.batch import Bucket, make_buckets
from jaxserve.execution.kv_cache import abstract_kv_cache, block_bytes
from jaxserve.execution.kv_layout import kv_layout
from jaxserve.execution.programs.parts import Cut, Halves, Lowered, LoweredInTwo, cut_in_two
from jaxserve.execution.programs.shapes import Draw, Embed, Forward, PlainDecode, Program, PromptLogprobs, StepShapes
from jaxserve.execution.slots import Slots, init_slots, pack_admissions
from jaxserve.execution.step import (
    PROMPT_LOGPROBS_CHUNK,
    DrawingRows,
    Drawn,
    Forwarded,
    draw,
    embed,
    forward,
    prompt_logprobs,
    step,
)
from jaxserve.layers import launch
from jaxserve.layers.batch import Kernels, Launch
from jaxserve.layers.params import abstract_params, with_schemes
from jaxserve.layers.paths import StepShape
from jaxserve.layers.peers import abstract_peers
from jaxserve.layers.sharding import mesh_axis
from jaxserve.models import describe_paths, get_family, with_context
from jaxserve.quantization.scheme import Scheme
from jaxserve.sampling.logprobs import Logprobs
from pallas_kernels.peers import can_reach_each_other

logger = logging.getLogger(__name__)

CUSTOM_CALLS = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu", "mosaic_gpu_v2")]
"""What steps call besides what jax promises to keep. It need not be kept: an export is for one version of jax."""

COPIES_OF_LOGITS = 4
COPIES_OF_HIDDEN = 10
COPIES_TO_SORT = 3
"""What steps are expected to hold at a time: copies of logits, and of hidden states or, if those are more, of a chunk's
logits while they are sorted for prompt log probabilities.
"""

CUBLAS_TOKENS = 128
"""From so many tokens on, matrix products are left to cuBLAS, as it does them by itself. XLA makes some of its own and
tries out all, for seconds, but where rows are many it finds nothing better.
"""

MAX_TOKENS_IN_PROGRAMS = 512
"""Of forward passes of prompts that are launched as two programs: larger ones keep the GPU longer than the host."""

MIN_BYTES_IN_PROGRAMS = 6e9
"""Of a device's weights, for the same: fewer are read in the time that the host needs to launch a program."""

_LEAF: Any = 0
"""Stands in for an array where only the structure of a tree matters."""

_ROWS = DrawingRows(slots=_LEAF, draws=_LEAF, num_output_tokens=_LEAF, features=_LEAF)
_LOGPROBS = Logprobs(
    logprob=_LEAF, rank=_LEAF, top_ids=_LEAF, top_logprobs=_LEAF, asked_logprobs=_LEAF, asked_ranks=_LEAF
)


class StepSpec(msgspec.Struct, frozen=True, kw_only=True):
    """From what steps are built, as plain data: the model's config.json, and the sizes of the engine.

    Attributes:
        has_special_steps: of `StepShapes`, with the finer sizes of `make_buckets`; then forward passes of prompts also
            admit requests, and programs that draw leave the tokens in memory of the host.
        has_peers: whether devices that share sums reach each other's memory, as kernels that add them up need it.
        schemes: how weights are stored that are not stored as their values, by path in the tree of weights.
    """

    model: dict[str, Any]
    dtype: str
    kernels: Kernels
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    has_special_steps: bool
    has_peers: bool
    schemes: dict[str, Scheme] = {}


def reaches_peers(mesh: Mesh) -> bool:
    """Whether the devices of a mesh reach each other's memory, if they share sums. Says so if they do not."""
    if mesh_axis("ffn", mesh) is None or can_reach_each_other(list(mesh.devices.flat)):
        return True
    logger.warning("these devices do not reach each other's memory: XLA adds up what they share, which takes longer")
    return False


def build(spec: StepSpec, mesh: Mesh | AbstractMesh) -> "StepBuilder":
    """The builder of these steps. Raises CheckpointError or ConfigError for a model that cannot be had on this mesh."""
    family = get_family(spec.model)
    config = family.Config.from_hf(spec.model)
    dtype = jnp.dtype(spec.dtype)
    return StepBuilder(
        family=family,
        # Weights are declared for the context that the model was made for; from here on it is the one that is served,
        # which decides how some rotations stretch.
        params=abstract_params(
            with_schemes(family.param_specs(config), spec.schemes, dtype=dtype), dtype=dtype, mesh=mesh
        ),
        model_config=with_context(config, spec.max_model_len),
        dtype=dtype,
        mesh=mesh,
        kernels=spec.kernels,
        block_size=spec.block_size,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        has_special_steps=spec.has_special_steps,
        has_peers=spec.has_peers,
    )


class _Declaration(NamedTuple):
    """A program before it is traced."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Trees of shapes."""
    donated: tuple[int, ...]
    """Which of them."""
    results: Any
    """A tree like the one that the function returns."""


class _Exported(msgspec.Struct, frozen=True):
    """A program as it comes from a worker: one function of flat arguments, or two, and how they make up the program."""

    functions: tuple[bytes, ...]
    cut: Cut | None = None


class StepBuilder:
    """The steps of a model: which programs there are, the shapes of their arguments, and what they are lowered to."""

    def __init__(
        self,
        *,
        family: ModuleType,
        model_config: Any,
        params: Any,
        dtype: jnp.dtype,
        mesh: Mesh | AbstractMesh,
        kernels: Kernels,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        has_special_steps: bool,
        has_peers: bool,
    ):
        """`params`: the weights, or their shapes."""
        self.mesh = mesh
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.vocab_size = model_config.vocab_size
        self.layout = kv_layout(family.kv_specs(model_config), max_model_len=max_model_len)
        self.max_blocks = math.ceil(max_model_len / block_size)
        num_groups = len(self.layout.windows)
        self.table_sizes = {"num_slots": max_num_seqs, "max_blocks": self.max_blocks, "num_groups": num_groups}
        self.buckets = make_buckets(
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            num_groups=num_groups,
            has_finer_sizes=has_special_steps,
        )
        self.shapes = StepShapes(self.buckets, has_special_steps=has_special_steps)
        pools = {"block_size": block_size, "dtype": dtype, "mesh": mesh}
        self.bytes_per_block = block_bytes(self.layout.pool_specs, **pools)
        self.kv_cache = functools.partial(
            abstract_kv_cache, self.layout.pool_specs, pool_of_layer=self.layout.pool_of_layer, **pools
        )
        self._params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
        self._hidden_size = model_config.hidden_size
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.peers = None
        if kernels != "xla" and has_peers:
            self.peers = abstract_peers(
                mesh,
                hidden_size=self._hidden_size,
                vocab_size=self.vocab_size,
                dtype=dtype,
                max_num_tokens=self.buckets[-1].num_tokens,
                max_num_rows=max_num_seqs,
            )
        self.slots = jax.tree.map(self.replicate, jax.eval_shape(self.init_slots))
        self._admissions = self.replicate(pack_admissions([], **self.table_sizes))
        self._has_special_steps = has_special_steps
        self.has_tokens_on_host = has_special_steps
        self._model = {"family": family, "config": model_config}
        self._with_layers = {**self._model, "kernels": kernels, "group_of_layer": self.layout.group_of_layer}
        self._kernels: Kernels = kernels
        self._dtype = dtype
        self.has_kernels = kernels != "xla"

    @property
    def state_bytes(self) -> int:
        """What the slots take on a device, and what its peers send it."""
        return sum(map(_bytes_on_a_device, jax.tree.leaves((self.slots, self.peers))))

    @property
    def expected_step_memory(self) -> int:
        """Bytes that steps should take per device besides weights and KV: slots, peers' rows, some copies of the logits
        of all rows and of a chunk of a prompt, and some of the hidden states, or of the chunk's logits if sorting them
        takes more. To be compared with what they do take.
        """
        largest = self.shapes.largest.bucket
        chunk = PROMPT_LOGPROBS_CHUNK * self.vocab_size * 4
        logits = largest.num_rows * self.vocab_size * 4 + chunk
        hidden = largest.num_tokens * self._hidden_size * jnp.dtype(self._dtype).itemsize
        more = max(COPIES_OF_HIDDEN * hidden, COPIES_TO_SORT * chunk)
        return self.state_bytes + COPIES_OF_LOGITS * logits + more

    def describe_paths(self) -> list[str]:
        """Return how the layers of the programs run, and why not faster: lines for people."""
        cache, steps = self.kv_cache(num_blocks=1), []
        for program in self.shapes.programs:
            if isinstance(program, PlainDecode | Forward):
                is_decode_only = isinstance(program, PlainDecode) or program.is_decode_only
                steps.append(
                    StepShape(
                        num_rows=program.bucket.num_tokens,
                        dtype=self._dtype,
                        kernels=self._kernels,
                        is_decode_only=is_decode_only,
                        peers=None if self.peers is None else self.peers.sums,
                    )
                )
        pages = [cache.of_layer(index)[0] for index in range(len(self._params["layers"]))]
        with self.on_mesh():
            return describe_paths(self._model["family"], self._model["config"], self._params["layers"], pages, steps)

    def init_slots(self) -> Slots:
        """Empty slots."""
        return init_slots(**self.table_sizes, vocab_size=self.vocab_size, hidden_size=self._hidden_size)

    def replicate(self, x: Any) -> jax.ShapeDtypeStruct:
        """The shape of an array that every device has a copy of."""
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.replicated)

    def on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which steps are traced."""
        return jax.set_mesh(self.mesh) if isinstance(self.mesh, Mesh) else jax.sharding.use_abstract_mesh(self.mesh)

    def lower(self, program: Program, num_blocks: int) -> Lowered:
        """Trace and lower a program, for a pool of so many blocks: seconds of Python where there are kernels.

        Raises NotImplementedError for what a kernel cannot do.
        """
        declared = self._declare(program, num_blocks)
        if (halves := self._halves(program, declared)) is not None:
            return self._lower_in_two(declared, halves.functions, halves.cut)
        with self.on_mesh():
            return jax.jit(declared.function, donate_argnums=declared.donated).lower(*declared.arguments)

    def compiler_options(self, program: Program) -> dict[str, Any]:
        """XLA's options for a program."""
        match program:
            case PlainDecode(bucket) | Forward(bucket):
                is_left_to_cublas = bucket.num_tokens >= CUBLAS_TOKENS
            case _:  # of which few steps run any with a matrix product
                is_left_to_cublas = True
        if not self.has_kernels or not is_left_to_cublas:
            return {}
        return {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": 0}

    def carries_admissions(self, program: Program) -> bool:
        """Whether a program also admits requests, as far as one upload has room for them. On a CPU one forward pass is
        for steps of all kinds, of which few admit any.
        """
        return self._has_special_steps and isinstance(program, Forward) and not program.is_decode_only

    def export(self, program: Program, num_blocks: int) -> bytes:
        """The same as bytes, for `lower_exported` in another process of the same version."""
        declared = self._declare(program, num_blocks)
        leaves = jax.tree.leaves(declared.arguments)
        if (halves := self._halves(program, declared)) is None:
            tree = jax.tree.structure(declared.arguments)

            def flat(*leaves: jax.Array) -> list[jax.Array]:
                return jax.tree.leaves(declared.function(*jax.tree.unflatten(tree, leaves)))

            return msgspec.msgpack.encode(_Exported((self._export(flat, leaves),)))
        functions = map(self._export, halves.functions, halves.cut.inputs(leaves, self.mesh))
        return msgspec.msgpack.encode(_Exported(tuple(functions), halves.cut))

    def _export(self, function: Callable[..., list[jax.Array]], leaves: Sequence[Any]) -> bytes:
        platform = self.mesh.abstract_mesh.abstract_device.platform
        with self.on_mesh():
            exported = jax.export.export(
                jax.jit(function), platforms=["cuda" if platform == "gpu" else platform], disabled_checks=CUSTOM_CALLS
            )(*leaves)
        return bytes(exported.serialize())

    def lower_exported(self, program: Program, num_blocks: int, exported: bytes) -> Lowered:
        """The same as `lower` from what `export` has returned, in a moment."""
        declared = self._declare(program, num_blocks)
        decoded = msgspec.msgpack.decode(exported, type=_Exported)
        functions = [jax.export.deserialize(bytearray(function)) for function in decoded.functions]
        if decoded.cut is not None:
            return self._lower_in_two(declared, [function.call for function in functions], decoded.cut)
        [flat] = functions

        def call(*arguments: Any) -> Any:
            return jax.tree.unflatten(jax.tree.structure(declared.results), flat.call(*jax.tree.leaves(arguments)))

        with self.on_mesh():
            return jax.jit(call, donate_argnums=declared.donated).lower(*declared.arguments)

    def launch_of(self, program: Forward) -> Launch:
        """In parts, if others wait for it: for steps of prompts, and those that draw by a program of their own."""
        if not self.has_kernels:
            return "at once"
        is_short = not program.is_decode_only and program.bucket.num_tokens <= MAX_TOKENS_IN_PROGRAMS
        return "in programs" if is_short and self._may_be_two_programs else "in parts"

    @property
    def _may_be_two_programs(self) -> bool:
        """Of a model that keeps a GPU longer than the host, whose layers have a pool each: one of several layers, which
        both parts write, would be copied.
        """
        pools = self.layout.pool_of_layer
        weights = sum(_bytes_on_a_device(leaf) for leaf in jax.tree.leaves(self._params))
        return len(pools) >= launch.MIN_LAYERS and len(set(pools)) == len(pools) and weights >= MIN_BYTES_IN_PROGRAMS

    def _halves(self, program: Program, declared: _Declaration) -> Halves | None:
        """Of a program that is two, where the trace of the whole says so."""
        if not (isinstance(program, Forward) and self.launch_of(program) == "in programs"):
            return None
        places = itertools.accumulate((jax.tree.structure(x).num_leaves for x in declared.arguments), initial=0)
        starts = list(places)
        donated = [leaf for index in declared.donated for leaf in range(starts[index], starts[index + 1])]
        with self.on_mesh():
            traced = jax.jit(declared.function).trace(*declared.arguments)
        return cut_in_two(traced.jaxpr, donated=donated)

    def _lower_in_two(self, declared: _Declaration, functions: Sequence[Callable[..., Any]], cut: Cut) -> LoweredInTwo:
        leaves = jax.tree.leaves(declared.arguments)
        with self.on_mesh():
            first, second = (
                jax.jit(function, donate_argnums=donated).lower(*inputs)
                for function, donated, inputs in zip(functions, cut.donated, cut.inputs(leaves, self.mesh), strict=True)
            )
        return LoweredInTwo(first, second, cut, jax.tree.structure(declared.results))

    def arguments(self, program: Program, num_blocks: int) -> tuple[Any, ...]:
        """The shapes of what a program takes, for a pool of so many blocks."""
        return self._declare(program, num_blocks).arguments

    def _declare(self, program: Program, num_blocks: int) -> _Declaration:
        match program:
            case PlainDecode(bucket):
                more = ()
                function = functools.partial(
                    step, **self._with_layers, bucket=bucket, has_tokens_on_host=self.has_tokens_on_host
                )
                outputs = _drawn(has_logprobs=False)
            case Forward(bucket, is_decode_only):
                more = (self._admissions,) if self.carries_admissions(program) else ()
                function = functools.partial(
                    forward,
                    **self._with_layers,
                    bucket=bucket,
                    is_decode_only=is_decode_only,
                    launch=self.launch_of(program),
                )
                outputs = Forwarded(logits=_LEAF, rows=_ROWS, hidden=None if is_decode_only else _LEAF)
            case Draw(num_rows, has_logprobs):
                return _Declaration(
                    functools.partial(
                        draw,
                        kernels=self._kernels,
                        is_plain=False,
                        has_logprobs=has_logprobs,
                        has_tokens_on_host=self.has_tokens_on_host,
                    ),
                    (self.slots, self._array((num_rows, self.vocab_size), jnp.float32), self._drawing_rows(num_rows)),
                    donated=(0,),
                    results=(self.slots, _drawn(has_logprobs=has_logprobs)),
                )
            case PromptLogprobs(bucket):
                return _Declaration(
                    functools.partial(prompt_logprobs, **self._model, bucket=bucket),
                    (self._params, self._hidden(bucket), self._packed(bucket)),
                    donated=(),
                    results=_LOGPROBS,
                )
            case Embed(bucket):
                return _Declaration(
                    functools.partial(embed, bucket=bucket),
                    (self.slots, self._hidden(bucket), self._packed(bucket)),
                    donated=(0,),
                    results=(self.slots, _LEAF),
                )
        kv_cache = self.kv_cache(num_blocks=num_blocks)
        return _Declaration(
            function,
            (self._params, kv_cache, self.slots, self.peers, self._packed(bucket), *more),
            donated=(1, 2),
            results=(kv_cache, self.slots, outputs),
        )

    def _drawing_rows(self, num_rows: int) -> DrawingRows:
        return DrawingRows(
            slots=self._array((num_rows,), jnp.int32),
            draws=self._array((num_rows,), jnp.bool),
            num_output_tokens=self._array((num_rows,), jnp.int32),
            features=self._array((), jnp.int32),
        )

    def _hidden(self, bucket: Bucket) -> Any:
        return self._array((bucket.num_tokens, self._hidden_size), self._dtype)

    def _packed(self, bucket: Bucket) -> Any:
        return self._array((bucket.packed_size,), jnp.int32)

    def _array(self, shape: tuple[int, ...], dtype: Any) -> Any:  # stands in for an array
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)


def _drawn(*, has_logprobs: bool) -> Drawn:
    return Drawn(token_ids=_LEAF, logprobs=_LOGPROBS if has_logprobs else None)


def _bytes_on_a_device(x: jax.ShapeDtypeStruct) -> int:
    assert x.sharding is not None
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
