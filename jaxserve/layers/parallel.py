"""Attention and a block with a state side by side, as in Falcon-H1 (Zuo et al. 2025, arXiv:2507.22448)."""

import dataclasses
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxserve.layers.activations import scaled
from jaxserve.layers.attention import Attention
from jaxserve.layers.batch import LayerStep
from jaxserve.layers.cache import SeveralSpecs
from jaxserve.layers.linear import Consumer, no_reader
from jaxserve.layers.mamba import Mamba2
from jaxserve.layers.names import LLAMA_NAMES, Names
from jaxserve.layers.params import Params
from jaxserve.layers.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parallel:
    """Two blocks that read the same input; the sum of their outputs is the update.

    Attributes:
        recurrent_name: the second block's module in the checkpoint, beside that of the attention.
        input_scales, output_scales: factors of what each block reads and makes, of the attention first.
    """

    reader = no_reader  # several weights are multiplied by the block's input

    attention: Attention
    recurrent: Mamba2
    recurrent_name: str
    input_scales: tuple[float, float]
    output_scales: tuple[float, float]

    @property
    def rope(self) -> Rope | None:
        """How positions rotate queries and keys."""
        return self.attention.rope

    @property
    def cache_spec(self) -> SeveralSpecs:
        """What the layer keeps: both."""
        return SeveralSpecs((self.attention.cache_spec, self.recurrent.cache_spec))

    @property
    def why_not_fused(self) -> str:
        """Why no kernel of a whole layer has this block."""
        return self.recurrent.why_not_fused

    def specs(self, prefix: str, hidden_size: int, names: Names = LLAMA_NAMES) -> Params:
        """Declare the weights: those of the attention, and the other's under its name. `prefix` names the layer."""
        recurrent = self.recurrent.specs(f"{prefix}.{self.recurrent_name}", hidden_size, names)
        attention = self.attention.specs(f"{prefix}.{names.attention}", hidden_size, names)
        return attention | {self.recurrent_name: recurrent}

    def run(
        self,
        params: Params,
        x: Float[Array, "T E"],
        step: LayerStep,
        *,
        consumer: Consumer,  # noqa: ARG002
    ) -> tuple[Array, tuple[Any, ...]]:
        """Compute both blocks; return the update and the caches after this step."""
        blocks = (self.attention, params), (self.recurrent, params[self.recurrent_name])
        updates, caches = [], []
        scales = zip(self.input_scales, self.output_scales, strict=True)
        with jax.named_scope("parallel"):
            for (block, own), cache, (of_input, of_output) in zip(blocks, step.cache, scales, strict=True):
                own_step = step._replace(cache=cache)
                y, cache_after = block.run(own, scaled(x, of_input), own_step, consumer="stream")
                updates.append(scaled(y, of_output))
                caches.append(cache_after)
            return updates[0] + updates[1], tuple(caches)
