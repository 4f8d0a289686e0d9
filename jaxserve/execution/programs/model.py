"""StepModel: a model as its programs see it, in shapes: weights, KV cache, slots and peers, spread over a mesh."""

import contextlib
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.execution.batch import Bucket, make_buckets, make_verifying_buckets
from jaxserve.execution.drafting import Drafting
from jaxserve.execution.kv_cache import abstract_kv_cache, block_bytes, slot_bytes
from jaxserve.execution.kv_layout import kv_layout_with
from jaxserve.execution.programs.spec import StepSpec
from jaxserve.execution.slots import Slots, init_slots
from jaxserve.layers import launch
from jaxserve.layers.batch import KVCache
from jaxserve.layers.cache import KV_DTYPES, CacheSizes, hold_in, parts_of
from jaxserve.layers.context import Kernels
from jaxserve.layers.dense_and_experts import DenseAndExperts
from jaxserve.layers.kv_scales import with_kv_scales
from jaxserve.layers.layouts import abstract_params, shard_bytes, with_schemes
from jaxserve.layers.moe import Experts
from jaxserve.layers.params import Params
from jaxserve.layers.peers import abstract_peers
from jaxserve.layers.sharding import mesh_axes
from jaxserve.layers.stages import Stage
from jaxserve.layers.states import StateSpec
from jaxserve.models import get_family, with_context
from jaxserve.speculative import make_drafter, make_proposer

MIN_BYTES_IN_PROGRAMS = 6e9
"""Smallest weights of a device for which a forward pass is launched as two programs, in bytes: fewer are read in the
time that the host needs to launch a program.
"""

ONLY_STAGE = Stage()

type State = Literal["params", "kv_cache", "kept_states", "slots", "peers"]
"""The names of the state that stays on the device from step to step."""


class StepModel:
    """A model and the sizes of its engine, as shapes. No device is used.

    Attributes:
        layout: which layers have block tables and pools in common.
        buckets: the sizes of steps, smallest first.
        verifying_buckets: the sizes of steps that verify drafts, by width, smallest first.
        num_static_scales: number of layers whose keys and values have static scales.
        drafting: how tokens are drafted; None: not at all.
        table_sizes: sizes of the block tables in slots, as arguments of `pack` and `init_slots`.
        kept_states: of each pool of states, those that are kept for the prefix cache; empty if there are none.
        peers: buffers for rows that devices send each other; None if no kernel adds up partial sums.
        span: the layers of the stage.
    """

    def __init__(self, spec: StepSpec, mesh: Mesh | AbstractMesh, stage: Stage = ONLY_STAGE):
        """Look up the model's family and derive all shapes, of weights, KV cache and slots those of one stage, which is
        on this mesh. Raises CheckpointError or ConfigError if the model cannot run there.
        """
        family = get_family(spec.model)
        config = family.config(spec.model)
        self.family = family
        self.dtype = jnp.dtype(spec.dtype)
        self.num_static_scales = sum(scales is not None for scales in spec.kv_scales)
        self.kv_dtype = KV_DTYPES.get(spec.kv_cache_dtype, self.dtype)
        # Weights are declared for the context that the model was made for; from here on it is the one that is served,
        # which decides how some rotations stretch.
        drafter = make_drafter(spec.speculation, spec.model, spec.drafter, context=spec.max_model_len)
        specs = with_kv_scales(family.param_specs(config), spec.kv_scales)
        specs |= {} if drafter is None else {"drafter": drafter.specs()}
        specs = with_schemes(specs, spec.schemes, dtype=self.dtype)
        self.stage = stage
        self.span = stage.span(config.num_layers)
        self.params = abstract_params(self.own(specs, config), dtype=self.dtype, mesh=mesh)
        self.config = with_context(config, spec.max_model_len)
        self.mesh = mesh
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.kernels: Kernels = spec.kernels
        self.traits = spec.traits
        self.block_size = spec.block_size
        self.max_num_seqs = spec.max_num_seqs
        self.vocab_size: int = self.config.vocab_size
        is_limited = 0 <= spec.max_logprobs < self.vocab_size
        self.num_top_logprobs = spec.max_logprobs if is_limited else self.vocab_size
        self.hidden_size: int = self.config.hidden_size
        self.stream_size = max(layer.stream_size for layer in family.layers(self.config))
        for chunk_size in {getattr(layer.mixer, "chunk_size", None) for layer in family.layers(self.config)}:
            if chunk_size is not None and chunk_size % spec.block_size:
                raise ConfigError(
                    f"block_size: {spec.block_size} does not divide the chunks of {chunk_size} tokens in which this "
                    "model attends (attention_chunk_size)"
                )
        kept = hold_in(family.kv_specs(self.config), KV_DTYPES.get(spec.kv_cache_dtype))
        of_drafter = () if drafter is None else hold_in(drafter.cache_specs, KV_DTYPES.get(spec.kv_cache_dtype))
        self.layout, drafter_group = kv_layout_with(kept, of_drafter, max_model_len=spec.max_model_len)
        num_groups = len(self.layout.windows)
        speculation = spec.speculation
        self.max_model_len = spec.max_model_len
        widths = [] if speculation is None else speculation.widths
        # Padding columns have positions behind the sequence.
        max_blocks = math.ceil((spec.max_model_len + max(widths, default=0)) / spec.block_size)
        self.table_sizes = {"num_slots": spec.max_num_seqs, "max_blocks": max_blocks, "num_groups": num_groups}
        self.buckets = make_buckets(
            max_num_batched_tokens=spec.max_num_batched_tokens,
            max_num_seqs=spec.max_num_seqs,
            block_size=spec.block_size,
            num_groups=num_groups,
            max_drafts=max(widths, default=1) - 1,
            has_finer_sizes=spec.traits.has_finer_buckets,
        )
        self.verifying_buckets: list[Bucket] = []
        self.drafting = None
        self.acceptance_rates = () if speculation is None else speculation.acceptance_rates
        if speculation is not None:
            largest = max(rows for rows, num_drafts in speculation.drafts_by_rows if num_drafts)
            # Steps of one token a row run in the sizes of buckets.
            drafting_rows = min([size for bucket in self.buckets if (size := bucket.num_rows) >= largest] or [largest])
            self.drafting = Drafting(
                make_proposer(speculation),
                drafting_rows,
                drafter=drafter,
                group=drafter_group,
                is_coupled=speculation.is_coupled,
            )
            self.verifying_buckets = [
                bucket
                for width in widths
                for bucket in make_verifying_buckets(
                    self.buckets,
                    num_columns=width,
                    min_num_rows=speculation.min_rows(width),
                    max_num_rows=speculation.max_rows(width),
                    block_size=spec.block_size,
                    num_groups=num_groups,
                )
            ]
        pools = {"dtype": self.dtype, "mesh": mesh}
        own_pools = (*self.layout.pools_of(self.span), *of_drafter)
        pool_specs = tuple(pool for pool in own_pools if pool is not None)
        self._state_specs = [part for pool in pool_specs for part in parts_of(pool) if isinstance(part, StateSpec)]
        self.bytes_per_block = block_bytes(pool_specs, block_size=spec.block_size, **pools)
        self._slot_bytes = slot_bytes(pool_specs, num_slots=spec.max_num_seqs, **pools)
        self._kv_cache = functools.partial(
            abstract_kv_cache,
            own_pools,
            pool_of_layer=self.layout.pool_of_layer,
            block_size=spec.block_size,
            num_slots=spec.max_num_seqs,
            expert_loads=self._expert_loads(),
            **pools,
        )
        self.num_kept_states = spec.num_kept_states if self.layout.num_states else 0
        kept_sizes = CacheSizes(0, spec.block_size, self.num_kept_states)
        of_states = [own_pools[pool] for pool in self.layout.pools_of_states if self.num_kept_states]
        self.kept_states = tuple(pool and pool.abstract(kept_sizes, **pools) for pool in of_states)
        self.peers = None
        if self.has_kernels and spec.has_peers:
            all_buckets = self.buckets + self.verifying_buckets
            self.peers = abstract_peers(
                mesh,
                hidden_size=self.hidden_size,
                vocab_size=self.vocab_size,
                dtype=self.dtype,
                max_num_tokens=self.buckets[-1].num_tokens,
                max_num_rows=max(bucket.num_rows * (bucket.num_columns or 1) for bucket in all_buckets),
            )
        self.slots = jax.tree.map(self.replicate, jax.eval_shape(self.init_slots))

    def _expert_loads(self) -> Any:
        """Return the shape of the counters of all layers' experts, which lie as these do; None if there are none."""
        layers = self.family.layers(self.config)
        blocks = [layer.feed_forward for layer in layers]
        sizes = {block.routing.num_experts for block in blocks if isinstance(block, Experts | DenseAndExperts)}
        has_whole_experts = "expert" in self.mesh.axis_names or mesh_axes("experts", self.mesh) is not None
        if not has_whole_experts or len(sizes) != 1:
            return None
        spec = PartitionSpec(None, mesh_axes("experts", self.mesh))
        shape = len(layers), *sizes
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(self.mesh, spec))

    @property
    def has_kernels(self) -> bool:
        """True if the devices run our own kernels."""
        return self.kernels != "xla"

    @property
    def keeps_tokens(self) -> bool:
        """True if there is a proposer that must know the tokens of requests."""
        return self.drafting is not None and self.drafting.drafter is None

    @property
    def may_be_two_programs(self) -> bool:
        """True if a forward pass may be launched as two programs: the model keeps a GPU busy for longer than the host,
        each layer has a pool of its own, and layers pass on one residual stream. A pool of several layers, which both
        programs write, would be copied.
        """
        has_drafter = self.drafting is not None and self.drafting.drafter is not None
        # A drafter takes in what all layers make.
        if not self.has_kernels or has_drafter or self.stage.count > 1 or self.stream_size != self.hidden_size:
            return False
        pools = self.layout.pool_of_layer
        weights = sum(map(shard_bytes, jax.tree.leaves(self.params)))
        return len(pools) >= launch.MIN_LAYERS and len(set(pools)) == len(pools) and weights >= MIN_BYTES_IN_PROGRAMS

    @property
    def state_bytes(self) -> int:
        """Bytes on a device of the slots, of layers' states, those kept for others too, and of what its peers send."""
        return self._slot_bytes + sum(map(shard_bytes, jax.tree.leaves((self.slots, self.kept_states, self.peers))))

    @property
    def request_state_bytes(self) -> int:
        """Bytes of the states that layers keep of a request, on all devices."""
        return self._slot_bytes * self.mesh.size // self.max_num_seqs

    def state(self, name: State, num_blocks: int) -> Any:
        """Return the shapes of one part of the state, for a KV pool of `num_blocks` blocks."""
        if name == "kv_cache":
            return self.kv_cache(num_blocks)
        return {
            "params": self.params,
            "kept_states": self.kept_states,
            "slots": self.slots,
            "peers": self.peers,
        }[name]

    def kv_cache(self, num_blocks: int) -> KVCache:
        """Return the shapes of the KV pools, with `num_blocks` blocks."""
        return self._kv_cache(num_blocks=num_blocks)

    def init_slots(self) -> Slots:
        """Make empty slots. Those of stages that do not draw have no room for what only a draw needs."""
        draws = self.stage.is_last
        return init_slots(
            **self.table_sizes,
            vocab_size=self.vocab_size if draws else 1,
            hidden_size=self.hidden_size if draws else 0,
            proposer=None if self.drafting is None else self.drafting.proposer,
            max_length=self.max_model_len,
            acceptance_rates=self.acceptance_rates,
        )

    def own(self, tree: Params, config: Any = None) -> Params:
        """Return the stage's part of a model's weights."""
        return self.stage.own(tree, is_tied=(config or self.config).tie_word_embeddings)

    def put(self, params: Params) -> Params:
        """Return the stage's weights on its devices; `params` are those of all stages."""
        if self.stage.count == 1:
            return params
        return jax.tree.map(lambda leaf, own: jax.device_put(leaf, own.sharding), self.own(params), self.params)

    def no_drafts(self, num_rows: int) -> np.ndarray:
        """Return what masks say of drafts if there are none, [num_rows, width] int32; nothing without speculation."""
        drafts = self.slots.drafts
        return np.zeros((num_rows, 0 if drafts is None else 2 + drafts.forced.shape[1]), np.int32)

    def replicate(self, x: Any) -> jax.ShapeDtypeStruct:
        """Return the shape of an array that every device has a copy of."""
        return self.array(x.shape, x.dtype)

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the shape of an array that every device has a copy of."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)

    def hidden(self, bucket: Bucket) -> Any:
        """Return the shape of the hidden states that a forward pass leaves."""
        return self.array((bucket.num_tokens, self.hidden_size), self.dtype)

    def unsettled(self, bucket: Bucket) -> tuple[Any, ...]:
        """Return the shapes of what a forward pass leaves of rows' tokens for each layer's states."""
        if not bucket.num_columns:
            return ()
        return tuple(spec.unsettled(bucket.num_rows, bucket.num_columns, mesh=self.mesh) for spec in self._state_specs)

    def convolved_bytes(self, num_tokens: int) -> int:
        """Return the bytes on a device of the inputs of a layer's convolutions, where they are most."""
        of_layers = (spec.unsettled(1, num_tokens, mesh=self.mesh) for spec in self._state_specs)
        return max((sum(map(shard_bytes, jax.tree.leaves(layer.inputs))) for layer in of_layers), default=0)

    @property
    def unsettled_bytes(self) -> int:
        """Bytes on a device that the largest step of drafts needs for these."""
        of_steps = (jax.tree.leaves(self.unsettled(bucket)) for bucket in self.verifying_buckets)
        return max((sum(map(shard_bytes, leaves)) for leaves in of_steps), default=0)

    def packed(self, bucket: Bucket) -> Any:
        """Return the shape of a packed plan."""
        return self.array((bucket.packed_size,), jnp.int32)

    def on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context in which steps are traced."""
        return jax.set_mesh(self.mesh) if isinstance(self.mesh, Mesh) else jax.sharding.use_abstract_mesh(self.mesh)
