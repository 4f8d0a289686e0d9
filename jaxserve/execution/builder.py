"""StepBuilder: all that is needed to lower the steps of a model, and no device. The runner has one, and each worker.

What is exported is a function of lists of arrays: whoever calls it puts the pytrees of the house together.
"""

import contextlib
import dataclasses
import functools
import math
from types import ModuleType
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxserve.execution.batch import make_buckets
from jaxserve.execution.kv_cache import abstract_kv_cache, block_bytes
from jaxserve.execution.kv_layout import kv_layout
from jaxserve.execution.shapes import StepKey, StepShapes
from jaxserve.execution.slots import Slots, init_slots
from jaxserve.execution.step import StepOutputs, step
from jaxserve.layers.batch import Kernels
from jaxserve.layers.params import abstract_params
from jaxserve.models import get_family, with_context
from jaxserve.sampling.logprobs import Logprobs

CUSTOM_CALLS = [jax.export.DisabledSafetyCheck.custom_call(name) for name in ("mosaic_gpu", "mosaic_gpu_v2")]
"""What steps call besides what jax promises to keep. It need not be kept: an export is for one version of jax."""


class StepSpec(msgspec.Struct, frozen=True, kw_only=True):
    """From what steps are built, as plain data: the model's config.json, and the sizes of the engine.

    Attributes:
        has_special_steps: of `StepShapes`.
    """

    model: dict[str, Any]
    dtype: str
    kernels: Kernels
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    has_special_steps: bool


def build(spec: StepSpec, mesh: Mesh | AbstractMesh) -> "StepBuilder":
    """The builder of these steps. Raises CheckpointError or ConfigError for a model that cannot be had on this mesh."""
    family = get_family(spec.model)
    config = family.Config.from_hf(spec.model)
    dtype = jnp.dtype(spec.dtype)
    return StepBuilder(
        family=family,
        # Weights are declared for the context that the model was made for; from here on it is the one that is served,
        # which decides how some rotations stretch.
        params=abstract_params(family.param_specs(config), dtype=dtype, mesh=mesh),
        model_config=with_context(config, spec.max_model_len),
        dtype=dtype,
        mesh=mesh,
        kernels=spec.kernels,
        block_size=spec.block_size,
        max_model_len=spec.max_model_len,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        has_special_steps=spec.has_special_steps,
    )


class StepBuilder:
    """The steps of a model: which there are, the shapes of their arguments, and their lowered programs."""

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
        self.slots = jax.tree.map(self.replicate, jax.eval_shape(self.init_slots))
        self._step = functools.partial(
            step, family=family, config=model_config, kernels=kernels, group_of_layer=self.layout.group_of_layer
        )

    def init_slots(self) -> Slots:
        """Empty slots."""
        return init_slots(**self.table_sizes, vocab_size=self.vocab_size, hidden_size=self._hidden_size)

    def replicate(self, x: Any) -> jax.ShapeDtypeStruct:
        """The shape of an array that every device has a copy of."""
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self.replicated)

    def on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which steps are traced."""
        return jax.set_mesh(self.mesh) if isinstance(self.mesh, Mesh) else jax.sharding.use_abstract_mesh(self.mesh)

    def lower(self, key: StepKey, num_blocks: int) -> jax.stages.Lowered:
        """Trace and lower a step, for a pool of so many blocks, which takes seconds of Python where there are kernels.

        Raises NotImplementedError for what a kernel cannot do.
        """
        with self.on_mesh():
            return jax.jit(functools.partial(self._step, **key._asdict()), donate_argnums=(1, 2)).lower(
                *self._arguments(key, num_blocks)
            )

    def export(self, key: StepKey, num_blocks: int) -> bytes:
        """The same as bytes, for `lower_exported` in another process of the same version."""
        arguments = self._arguments(key, num_blocks)
        trees = [jax.tree.structure(argument) for argument in arguments]

        def flat(*leaves: list[jax.Array]) -> Any:
            trees_of_leaves = (jax.tree.unflatten(tree, list_) for tree, list_ in zip(trees, leaves, strict=True))
            kv_cache, slots, outputs = self._step(*trees_of_leaves, **key._asdict())
            return jax.tree.leaves(kv_cache), jax.tree.leaves(slots), _as_plain(outputs)

        platform = self.mesh.abstract_mesh.abstract_device.platform
        with self.on_mesh():
            exported = jax.export.export(
                jax.jit(flat), platforms=["cuda" if platform == "gpu" else platform], disabled_checks=CUSTOM_CALLS
            )(*map(jax.tree.leaves, arguments))
        return bytes(exported.serialize())

    def lower_exported(self, key: StepKey, num_blocks: int, exported: bytes) -> jax.stages.Lowered:
        """The same as `lower` from what `export` has returned, in a moment."""
        arguments = self._arguments(key, num_blocks)
        function = jax.export.deserialize(bytearray(exported))

        def step(*trees: Any) -> Any:
            kv_cache, slots, outputs = function.call(*map(jax.tree.leaves, trees))
            _, kv_tree, slots_tree, _ = map(jax.tree.structure, trees)
            return jax.tree.unflatten(kv_tree, kv_cache), jax.tree.unflatten(slots_tree, slots), _from_plain(outputs)

        with self.on_mesh():
            return jax.jit(step, donate_argnums=(1, 2)).lower(*arguments)

    def _arguments(self, key: StepKey, num_blocks: int) -> tuple[Any, ...]:
        packed = self.replicate(np.zeros(key.bucket.packed_size, np.int32))
        return self._params, self.kv_cache(num_blocks=num_blocks), self.slots, packed


def _as_plain(outputs: StepOutputs) -> dict[str, Any]:
    """Of dicts, tuples and None only, which jax can export."""
    fields = {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}
    return {name: tuple(value) if isinstance(value, Logprobs) else value for name, value in fields.items()}


def _from_plain(fields: dict[str, Any]) -> StepOutputs:
    trees: dict[str, Any] = {
        name: Logprobs(*value) if isinstance(value, tuple) else value for name, value in fields.items()
    }
    return StepOutputs(**trees)
