"""AFM 4.5B (Arcee AI 2025, huggingface.co/arcee-ai/AFM-4.5B): Llama with a squared ReLU and no gate."""

from dataclasses import replace
from typing import Any

from jaxserve.layers.layer import Layer
from jaxserve.layers.mlp import FeedForward
from jaxserve.models import llama
from jaxserve.models.family import Family
from jaxserve.models.reading import LLAMA

DEFAULTS: dict[str, Any] = LLAMA | {
    "vocab_size": 32000, "hidden_size": 2560, "intermediate_size": 18432, "hidden_act": "relu2",
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-05
}  # fmt: skip


def layers(config: llama.Config) -> tuple[Layer, ...]:
    """Return the layers."""

    def without_gate(layer: Layer) -> Layer:
        assert isinstance(layer.feed_forward, FeedForward)
        return replace(layer, feed_forward=replace(layer.feed_forward, is_gated=False))

    return tuple(map(without_gate, llama.layers(config)))


FAMILY = Family(llama.Config, DEFAULTS, layers=layers, doc=__doc__)
