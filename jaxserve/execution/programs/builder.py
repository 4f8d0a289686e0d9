"""StepBuilder lowers the programs of a model's steps, without any device. The runner has one, and so has each worker.

What is exported is a function of flat lists of arrays; its caller assembles the pytrees.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxserve.errors import ConfigError
from jaxserve.execution.batch import Bucket
from jaxserve.execution.programs.kinds import Begin, Finish, Forward, PlainDecode, Program, RunStage
from jaxserve.execution.programs.model import StepModel
from jaxserve.execution.programs.path_table import ProgramPaths, describe, program_paths
from jaxserve.execution.programs.shapes import Phase, StepShapes
from jaxserve.execution.programs.spec import StepSpec
from jaxserve.execution.step import PROMPT_LOGPROBS_CHUNK
from jaxserve.layers.cache import source_of
from jaxserve.layers.decoder import layer_shapes
from jaxserve.layers.paths import LayerShape
from jaxserve.layers.stages import Stage, check_stages, stage_meshes

CUSTOM_CALLS = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu", "mosaic_gpu_v2")]
"""The custom calls of steps for which jax guarantees no compatibility. None is needed: an export is for one version of
jax.
"""

COPIES_OF_LOGITS = 4
COPIES_OF_HIDDEN = 10
COPIES_OF_STREAMS = 3
COPIES_OF_CONVOLVED = 2
COPIES_OF_WIDEST = 2
COPIES_TO_SORT = 3
"""What steps are expected to hold at a time: copies of the logits, and of the hidden states or, if that is more, of one
chunk's logits while they are sorted for prompt log probabilities. Without kernels there are also copies of the widest
activations of a layer: XLA's matmuls do not include the activation function after them. Of residual streams beside the
first there are those before a layer, those that it predicts, and those after it. Of a layer's convolutions there are
inputs and outputs.
"""


class _Declaration(NamedTuple):
    """A program before it is traced."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Trees of shapes."""
    donated: tuple[int, ...]
    """Indices of the arguments that the program replaces."""
    results: Any
    """A tree like the one that the function returns."""


class StepBuilder:
    """The steps of a model: which programs there are, and how they are lowered."""

    def __init__(self, spec: StepSpec, mesh: Mesh | AbstractMesh):
        """Create the model and the shapes of its steps. Raises CheckpointError or ConfigError if the model cannot run
        on this mesh.
        """
        self.spec = spec
        self.mesh = mesh
        meshes = stage_meshes(mesh)
        if len(meshes) > 1 and spec.speculation is not None:
            raise ConfigError(
                "speculative_config: stages of a pipeline verify no drafts, leave it or pipeline_parallel_size out"
            )
        self.models = [StepModel(spec, part, Stage(index, len(meshes))) for index, part in enumerate(meshes)]
        """One of each stage."""
        self.model = self.models[-1]
        check_stages(len(meshes), num_layers=self.model.config.num_layers)
        layers = self.model.family.layers(self.model.config) if len(meshes) > 1 else ()
        if any(layer.layer_input is not None or source_of(layer.mixer.cache_spec) is not None for layer in layers):
            raise ConfigError(
                "pipeline_parallel_size: layers of this model read the first stage's embeddings or other layers' keys "
                "and values, use tensor_parallel_size"
            )
        self.shapes = StepShapes(
            self.model.buckets,
            has_lean_programs=spec.traits.has_lean_programs,
            may_be_two_programs=self.model.may_be_two_programs,
            verifying=self.model.verifying_buckets,
            keeps_tokens=self.model.keeps_tokens,
            num_stages=len(self.models),
            has_states=self.model.layout.num_states > 0,
            keeps_states=self.model.num_kept_states > 0,
        )
        self._paths: dict[tuple[int, Bucket, bool], ProgramPaths] = {}

    @property
    def expected_step_memory(self) -> int:
        """Bytes that steps are expected to need per device besides weights and KV, on the devices of the stage that
        needs most: slots, peers' rows, some copies of the logits of all rows and of a chunk of a prompt, and some of
        the hidden states and of a layer's convolutions, or of the chunk's logits if sorting them needs more, or what
        drafts leave for layers' states. It is compared with what they do need.
        """
        return max(map(self._expected_memory, self.models))

    def _expected_memory(self, model: StepModel) -> int:
        largest = self.shapes.largest.bucket
        chunk = PROMPT_LOGPROBS_CHUNK * model.vocab_size * 4 if model.stage.is_last else 0
        num_logits = max([largest.num_rows, *(bucket.num_tokens for bucket in model.verifying_buckets)])
        logits = num_logits * model.vocab_size * 4 + chunk if model.stage.is_last else 0
        hidden = largest.num_tokens * model.hidden_size * jnp.dtype(model.dtype).itemsize
        activations = (
            COPIES_OF_HIDDEN * hidden + COPIES_OF_STREAMS * (model.stream_size // model.hidden_size - 1) * hidden
        )
        activations += COPIES_OF_CONVOLVED * model.convolved_bytes(largest.num_tokens)
        if not model.has_kernels:
            widest = max(max(leaf.shape) for leaf in jax.tree.leaves(model.params["layers"]))
            activations += COPIES_OF_WIDEST * widest * hidden // model.hidden_size
        more = max(activations, COPIES_TO_SORT * chunk, model.unsettled_bytes)
        return model.state_bytes + COPIES_OF_LOGITS * logits + more

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block of the KV cache on all devices of all stages together."""
        return sum(model.bytes_per_block for model in self.models)

    def model_of(self, program: Program) -> StepModel:
        """Return the model of the stage that runs a program."""
        return self.models[program.stage]

    def order(self) -> list[Phase]:
        """Return what is compiled, for what, in which order."""
        return self.shapes.order(self.is_tuned)

    def first_programs(self) -> list[Program]:
        """Return the programs that the engine is started with, those that take longest to compile first."""
        order = {program: index for index, program in enumerate(self.shapes.programs)}
        first = (program for phase in self.order() if phase.is_first for program in phase.programs)
        return sorted(first, key=lambda program: order.get(program, 0))

    def describe_paths(self) -> list[str]:
        """Return which kernels run in the programs, and why no faster ones do: lines for people."""
        return describe(self._program_paths())

    def check_kernels(self) -> None:
        """Raise NotImplementedError if there is no kernel for a part that needs one.

        Whether there is one depends on dtypes and on the sizes of heads, not on the tokens of a step: the largest step
        tells it for all.
        """
        step = self.shapes.largest_step
        for program in (*step.stages, step.forward) if self.model.has_kernels else ():
            if (why_not := self._paths_of(program).why_not) is not None:
                raise NotImplementedError(why_not)

    def _program_paths(self) -> Iterator[ProgramPaths]:
        for program in self.shapes.programs:
            if isinstance(program, PlainDecode | Forward | RunStage | Begin) and not program.bucket.num_columns:
                yield self._paths_of(program)

    def is_tuned(self, program: Program) -> bool:
        """Return true if XLA tries out matrix products while it compiles the program: unless kernels compute all."""
        if not program.is_tuned(self.model_of(program)):
            return False
        if not self.model.has_kernels or not isinstance(program, PlainDecode | Forward | RunStage | Begin | Finish):
            return True
        return self._paths_of(program).multiplies_by_xla

    def _paths_of(self, program: PlainDecode | Forward | RunStage | Begin | Finish) -> ProgramPaths:
        is_decode_only = isinstance(program, PlainDecode | Forward | RunStage) and program.is_decode_only
        key = program.stage, program.bucket, is_decode_only
        if key not in self._paths:
            model, layers = self.model_of(program), self._layers[program.stage]
            self._paths[key] = program_paths(model, layers, program.bucket, is_decode_only=is_decode_only)
        return self._paths[key]

    @functools.cached_property
    def _layers(self) -> list[list[LayerShape]]:
        layers = self.model.family.layers(self.model.config)
        return [layer_shapes(layers, model.params, model.kv_cache(1), model.span) for model in self.models]

    def lower(self, program: Program, num_blocks: int) -> jax.stages.Lowered:
        """Trace and lower a program, for a pool of `num_blocks` blocks; takes seconds of Python if there are kernels.

        Raises NotImplementedError for what a kernel does not support.
        """
        with self.model_of(program).on_mesh():
            return self.trace(program, num_blocks).lower()

    def trace(self, program: Program, num_blocks: int) -> jax.stages.Traced:
        """Trace a program: the first half of `lower`."""
        declared = self._declare(program, num_blocks)
        with self.model_of(program).on_mesh():
            return jax.jit(declared.function, donate_argnums=declared.donated).trace(*declared.arguments)

    def export(self, program: Program, num_blocks: int) -> bytes:
        """Return the lowered program as bytes, for `lower_exported` in another process of the same version."""
        declared = self._declare(program, num_blocks)
        tree = jax.tree.structure(declared.arguments)

        def flat(*leaves: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(declared.function(*jax.tree.unflatten(tree, leaves)))

        platform = self.model.mesh.abstract_mesh.abstract_device.platform
        with self.model_of(program).on_mesh():
            exported = jax.export.export(
                jax.jit(flat), platforms=["cuda" if platform == "gpu" else platform], disabled_checks=CUSTOM_CALLS
            )(*jax.tree.leaves(declared.arguments))
        return bytes(exported.serialize())

    def lower_exported(self, program: Program, num_blocks: int, exported: bytes) -> jax.stages.Lowered:
        """Return what `lower` would, from what `export` has returned, in a moment."""
        declared = self._declare(program, num_blocks)
        flat = jax.export.deserialize(bytearray(exported))

        def call(*arguments: Any) -> Any:
            return jax.tree.unflatten(jax.tree.structure(declared.results), flat.call(*jax.tree.leaves(arguments)))

        with self.model_of(program).on_mesh():
            return jax.jit(call, donate_argnums=declared.donated).lower(*declared.arguments)

    def trees(self, program: Program, num_blocks: int) -> tuple[Any, Any]:
        """Return the structures of a program's arguments, with no keyword ones, and of its results."""
        declared = self._declare(program, num_blocks)
        return jax.tree.structure((declared.arguments, {})), jax.tree.structure(declared.results)

    def _declare(self, program: Program, num_blocks: int) -> _Declaration:
        model = self.model_of(program)
        state = {name: program.part(model, name, model.state(name, num_blocks)) for name in program.takes}
        return _Declaration(
            program.function(model),
            (*state.values(), *program.arguments(model)),
            donated=tuple(program.takes.index(name) for name in program.gives),
            results=(*(state[name] for name in program.gives), program.made(self.model)),
        )
