"""Benchmark of `expert_routing`: decode steps and a prefill of models with experts, from logits to tiles."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels.expert_routing.op import expert_routing
from pallas_kernels.expert_routing.routing import Routing
from pallas_kernels.timing import Row, compare, num_rotations, on_gpu, ours

_MODELS = {
    "Qwen3 30B A3B": Routing(num_experts=128, num_experts_per_token=8, is_normalized=True),
    "DeepSeek V3": Routing(
        num_experts=256,
        num_experts_per_token=8,
        scores="sigmoid",
        is_normalized=True,
        num_groups=8,
        num_chosen_groups=4,
        group_score="best_two",
    ),
    "Qwen3 Next 80B A3B": Routing(num_experts=512, num_experts_per_token=10, is_normalized=True),
}


def expert_routing_rows() -> Iterator[Row]:
    """Yield a row for each model, number of tokens and implementation. The inputs are too small to have a lower
    bound.
    """
    for name, routing in _MODELS.items():
        for num_tokens in (1, 16, 64, 256, 8192) if on_gpu() else (1, 64):
            shape = (num_tokens, routing.num_experts)
            keys = [jax.random.key(seed) for seed in range(num_rotations(4 * num_tokens * routing.num_experts))]
            inputs = [(jax.random.normal(key, shape), jnp.int32(num_tokens)) for key in keys]
            yield from compare(f"{num_tokens} tokens, {name}", ours(expert_routing, routing=routing), inputs)
