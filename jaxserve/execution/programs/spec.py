"""Plain data that identifies the programs of a model's steps: it is sent to the processes that lower them, and is part
of the keys of what is kept on disk.
"""

from typing import Any

import msgspec
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from jaxserve.layers.context import Kernels
from jaxserve.quantization.scheme import Scheme
from jaxserve.sampling_params import DEFAULT_MAX_LOGPROBS
from jaxserve.speculation import Speculation


class Traits(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of the device that decide how steps are divided into programs.

    Attributes:
        has_finer_buckets: buckets are closer together where steps are bound by arithmetic, because padding costs time
            there.
        has_lean_programs: rows that need little have programs without the branches that other rows need. On a GPU a
            branch that sorts or loops breaks a program's command buffer even if it is not taken.
        admits_in_forward: forward passes of prompts also write the slots of new requests, which saves a launch.
        leaves_tokens_on_host: programs that sample end with a copy of the tokens to pinned memory of the host.
        tries_out_matmuls: while XLA compiles a program, it runs candidates for its matrix products on the device, which
            takes time and memory there.
        records_first_runs: the first runs of a program record its command buffers, and take longer.
    """

    has_finer_buckets: bool
    has_lean_programs: bool
    admits_in_forward: bool
    leaves_tokens_on_host: bool
    tries_out_matmuls: bool
    records_first_runs: bool


ON_CPU = Traits(
    has_finer_buckets=False,
    has_lean_programs=False,
    admits_in_forward=False,
    leaves_tokens_on_host=False,
    tries_out_matmuls=False,
    records_first_runs=False,
)
"""On a CPU branches and loops that are not taken cost nothing, and neither does a launch."""

ON_GPU = Traits(
    has_finer_buckets=True,
    has_lean_programs=True,
    admits_in_forward=True,
    leaves_tokens_on_host=True,
    tries_out_matmuls=True,
    records_first_runs=True,
)


class StepSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs of building steps: the model's config.json, and the sizes of the engine.

    Attributes:
        has_peers: whether devices that add up partial sums reach each other's memory, as the kernels for that require.
        kv_cache_dtype: the dtype of 8 bits in which keys and values are held, by its name in `layers.cache`; "auto" for
            that of activations.
        max_logprobs: the number of most likely tokens whose log probabilities are computed where a row wants some; -1
            for all tokens.
        schemes: how quantized weights are stored, by path in the tree of weights.
        speculation: how tokens are drafted; None: not at all.
        drafter: the config.json of a drafter that is a checkpoint of its own.
        num_kept_states: how many states of requests are kept for the prefix cache, if layers have states.
    """

    model: dict[str, Any]
    dtype: str
    kernels: Kernels
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    traits: Traits
    has_peers: bool
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    schemes: dict[str, Scheme] = {}
    kv_cache_dtype: str = "auto"
    speculation: Speculation | None = None
    drafter: dict[str, Any] | None = None
    num_kept_states: int = 0


class MeshSpec(msgspec.Struct, frozen=True):
    """A mesh without its devices: axes, all explicit, and the kind of the devices."""

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    device_kind: str
    platform: str
    num_cores: int | None

    @classmethod
    def of(cls, mesh: Mesh) -> "MeshSpec":
        """Describe a mesh of equal devices."""
        device = mesh.abstract_mesh.abstract_device
        return cls(mesh.axis_names, mesh.axis_sizes, device.device_kind, device.platform, device.num_cores)

    def mesh(self) -> AbstractMesh:
        """Return a mesh that steps can be traced for without any device."""
        return AbstractMesh(
            self.axis_sizes,
            self.axis_names,
            axis_types=(AxisType.Explicit,) * len(self.axis_names),
            abstract_device=AbstractDevice(
                device_kind=self.device_kind, platform=self.platform, num_cores=self.num_cores
            ),
        )
