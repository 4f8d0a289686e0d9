"""Report a start: to the log, and to the front end as an EngineInfo."""

import logging
import time

import jax
import numpy as np

from jaxserve.engine.client import EngineInfo, KVKind
from jaxserve.engine.embedding import matryoshka_dimensions
from jaxserve.engine.serving_plan import ServingPlan
from jaxserve.execution.kv_cache import block_bytes
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.execution.programs.compile import WarmUp
from jaxserve.execution.programs.lowering import Lowering
from jaxserve.execution.runner import Runner
from jaxserve.layers.layouts import num_bytes, read_whole
from jaxserve.layers.params import Params
from jaxserve.layers.sharding import DATA, MESH_AXES_OF
from jaxserve.loading.classifier import is_classifier
from jaxserve.loading.reranking import read_reranker
from jaxserve.scheduling.block_needs import BlockNeeds

logger = logging.getLogger(__name__)


class Laps:
    """Seconds of each phase of the start."""

    def __init__(self) -> None:
        self._began = self._last = time.perf_counter()
        self._phases: list[str] = []

    def lap(self, phase: str) -> None:
        """End a phase."""
        last, self._last = self._last, time.perf_counter()
        self._phases.append(f"{phase} {self._last - last:.1f} s")

    def __str__(self) -> str:
        return f"{time.perf_counter() - self._began:.1f} s: {', '.join(self._phases)}"


def log_start(runner: Runner, *, platform: str, laps: Laps) -> None:
    """Log what has been compiled, how long each phase took, and what the KV cache consists of."""
    model = runner.model
    logger.info(f"{runner.num_compiles} programs compiled, kernels: {model.kernels} on {platform}; ready after {laps}")
    kinds = (
        f"{kind.num_layers} layers with {'full attention' if kind.window is None else f'a window of {kind.window}'}: "
        f"{kind.bytes_per_token:,} bytes a token"
        for kind in kv_kinds(runner.builder)
    )
    logger.info(f"KV cache: {runner.num_blocks:,} blocks of {model.block_size} positions; {', '.join(kinds)}")
    if model.kv_dtype != model.dtype:
        num_static = model.num_static_scales
        static = f", in {num_static} layers with the checkpoint's static scales" if num_static else ""
        logger.info(f"keys and values are held in {model.kv_dtype}, with a scale for each token and head{static}")
    if model.layout.num_states:
        cached = f"prefixes at {model.num_kept_states} places" if model.num_kept_states else "no prefixes"
        logger.info(f"{model.layout.num_states} layers keep a state per request: {cached} are cached")


def log_warm_up(warm_up: WarmUp, lowering: Lowering, *, has_kernels: bool) -> None:
    """Log how long programs took to lower and compile."""
    kernels = f", the kernels after {warm_up.kernels_after:.1f} s" if has_kernels else ""
    logger.info(
        f"programs compiled after {warm_up.compiled_after:.1f} s: lowered after {warm_up.lowered_after:.1f} s "
        f"({lowering.num_found} were cached){kernels}"
    )


def make_info(plan: ServingPlan, *, num_blocks: int, needs: BlockNeeds) -> EngineInfo:
    """Return the sizes of an engine, with which the front end validates requests."""
    checkpoint, specs, model = plan.checkpoint, plan.specs, plan.builder.model
    weight_bytes, expert_bytes = bytes_read(specs, dtype=model.dtype, num_copies=model.mesh.shape.get(DATA, 1))
    routing = checkpoint.model_config.routing if expert_bytes else None
    return EngineInfo(
        model=checkpoint.path,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        embedding_dimensions=matryoshka_dimensions(checkpoint.fields),
        max_model_len=checkpoint.max_model_len,
        block_size=model.block_size,
        num_blocks=num_blocks,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=model.buckets[-1].num_tokens,
        max_logprobs=plan.builder.spec.max_logprobs,
        eos_token_ids=checkpoint.eos,
        weight_bytes=weight_bytes,
        expert_bytes=expert_bytes,
        expert_fraction=0.0 if routing is None else routing.num_experts_per_token / routing.num_experts,
        kv_kinds=kv_kinds(plan.builder),
        state_bytes=sum(each.request_state_bytes for each in plan.builder.models),
        kv_dtype=str(model.kv_dtype),
        enable_prefix_caching=plan.enable_prefix_caching and (not model.layout.num_states or model.num_kept_states > 0),
        reranker=read_reranker(checkpoint.path, checkpoint.fields),
        can_generate=not is_classifier(checkpoint.fields),
        device=plan.devices.description,
        total_weight_bytes=num_bytes(specs, dtype=model.dtype),
        kv_cache_bytes=num_blocks * plan.builder.bytes_per_block,
        num_full_requests=needs.num_requests(num_blocks, num_tokens=checkpoint.max_model_len),
        gpu_memory_utilization=plan.gpu_memory_utilization,
    )


def kv_kinds(builder: StepBuilder) -> tuple[KVKind, ...]:
    """Return what a token takes in the blocks of each kind of layer, including the unused pools of a partly filled KV
    group.
    """
    model = builder.model
    windows, per_group = model.layout.windows, builder.bytes_per_block // model.block_size
    return tuple(
        KVKind(
            window=window,
            num_layers=num_layers,
            bytes_per_token=windows.count(window) * per_group,
            read_per_token=sum(per_group - _unread(builder, group) for group, of in enumerate(windows) if of == window),
        )
        for window, num_layers in model.layout.layers_by_window.items()
    )


def _unread(builder: StepBuilder, group: int) -> int:
    """Return the bytes of a token in the pools that no layer of a KV group uses, though its blocks have room there."""
    unread = 0
    for model in builder.models:
        layout = model.layout
        used = {layout.pool_of_layer[layer] for layer in model.span if layout.group_of_layer[layer] == group}
        others = [spec for pool, spec in enumerate(layout.pools_of(model.span)) if spec and pool not in used]
        sizes = {"block_size": model.block_size, "dtype": model.dtype, "mesh": model.mesh}
        unread += block_bytes(others, **sizes) // model.block_size
    return unread


def bytes_read(specs: Params, *, dtype: np.dtype, num_copies: int = 1) -> tuple[int, int]:
    """Return the bytes of weights that every step reads, and of experts, of which it reads those that the router
    chooses. `num_copies` is the number of devices along the axis "data", each of which reads a copy of what that does
    not split.
    """
    used: Params = {str(i): spec for i, spec in enumerate(jax.tree.leaves(read_whole(specs)))}
    experts = {name: spec for name, spec in used.items() if "experts" in spec.axes}
    whole = {
        name: spec for name, spec in used.items() if not any(DATA in MESH_AXES_OF.get(axis, ()) for axis in spec.axes)
    }
    copied = (num_copies - 1) * num_bytes(whole, dtype=dtype)
    expert_bytes = num_bytes(experts, dtype=dtype)
    return num_bytes(used, dtype=dtype) - expert_bytes + copied, expert_bytes
