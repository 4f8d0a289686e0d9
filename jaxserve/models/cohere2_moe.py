"""Command A+ (Cohere 2026, huggingface.co/CohereLabs/command-a-plus-05-2026): Command A with experts beside a shared
one.
"""

import dataclasses
from dataclasses import replace
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.layers.attention import Attention
from jaxserve.layers.layer import ONE_NORM, Arrangement, Layer
from jaxserve.layers.moe import Experts
from jaxserve.layers.names import ExpertNames
from jaxserve.layers.norm import Norm
from jaxserve.models import cohere, hf_config, hf_rope, mixture
from jaxserve.models.family import Family
from jaxserve.models.reading import read_config

DEFAULTS: dict[str, Any] = cohere.DEFAULTS | {
    "head_dim": 128, "sliding_window": 4096, "sliding_window_pattern": 4, "num_experts": 8, "num_experts_per_tok": 2,
    "num_shared_experts": 0, "shared_expert_combination_strategy": "average", "expert_selection_fn": "softmax",
    "prefix_dense_sliding_window_pattern": 1, "norm_topk_prob": True, "first_k_dense_replace": 0
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(mixture.Config):
    """The shape of one Command A+; `intermediate_size` is that of layers without experts.

    Attributes:
        has_rms_norms: norms are RMS norms instead of layer norms.
        rotates: whether each layer rotates.
        shared_scale: a factor of the shared experts.
    """

    logit_scale: float
    has_rms_norms: bool
    rotates: tuple[bool, ...]
    shared_scale: float

    @property
    def norm(self) -> Norm:
        """The norm before the blocks."""
        return Norm(eps=self.norm_eps) if self.has_rms_norms else Norm(eps=self.norm_eps, kind="layer", has_bias=False)


def _read(fields: dict[str, Any]) -> Config:
    hf_config.require(fields, rope_scaling=None)  # which transformers reads over
    has_rms_norms, size = fields.get("rms_norm_eps") is not None, hf_config.integer(fields, "intermediate_size")
    num_shared = hf_config.integer(fields, "num_shared_experts", minimum=0)
    is_sparse = hf_config.sparse_layers_by_type(
        fields if fields.get("mlp_layer_types") is None else fields | {"first_k_dense_replace": None}, first=0
    )
    windows, is_dense_rotated = _windows(fields), hf_config.integer(fields, "prefix_dense_sliding_window_pattern") == 1
    scores = _one_of(fields, "expert_selection_fn", {"softmax": "softmax_of_chosen", "sigmoid": "sigmoid"})
    scale = _one_of(fields, "shared_expert_combination_strategy", {"sum": 1.0, "average": 0.5}) if num_shared else 1.0
    is_normalized = scores == "sigmoid" and hf_config.flag(fields, "norm_topk_prob")
    return read_config(
        Config,
        fields,
        **hf_config.biases(fields),
        norm_eps=hf_config.number(fields, "rms_norm_eps" if has_rms_norms else "layer_norm_eps"),
        has_rms_norms=has_rms_norms,
        intermediate_size=hf_config.integer(fields, "prefix_dense_intermediate_size", size),
        expert_size=size,
        shared_expert_size=size * num_shared,
        shared_scale=scale,
        sparse_layers=is_sparse,
        sliding_windows=windows,
        rotates=tuple(
            window is not None or (is_dense_rotated and not sparse)
            for window, sparse in zip(windows, is_sparse, strict=True)
        ),
        routing=mixture.read_routing(fields, scores=scores, is_normalized=is_normalized, scale=scale),
        rope=hf_rope.rope(fields),
    )


def _windows(fields: dict[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's sliding window; the first layers, without experts, may have another period."""
    num_layers, num_dense = (
        hf_config.integer(fields, name, minimum=0) for name in ("num_hidden_layers", "first_k_dense_replace")
    )
    first = hf_config.integer(fields, "prefix_dense_sliding_window_pattern")
    period = hf_config.integer(fields, "sliding_window_pattern")
    is_full = [(index + 1) % first == 0 for index in range(num_dense)]
    is_full += [(index + 1) % period == 0 for index in range(num_layers - num_dense)]
    kinds = ["full_attention" if full else "sliding_attention" for full in is_full]
    return hf_config.windows_by_type(fields, hf_config.optional_integer(fields, "sliding_window"), kinds)


def _one_of(fields: dict[str, Any], name: str, known: dict[str, Any]) -> Any:
    if not isinstance(fields[name], str) or fields[name] not in known:
        raise CheckpointError(f"config.json: {name} must be one of {', '.join(known)}, got {fields[name]!r:.100}")
    return known[fields[name]]


def layers(config: Config) -> tuple[Layer, ...]:
    """Return the layers."""

    def of_layer(layer: Layer, rotates: bool) -> Layer:
        assert isinstance(layer.mixer, Attention)
        mixer, feed_forward = replace(layer.mixer, rope=config.rope if rotates else None), layer.feed_forward
        if isinstance(feed_forward, Experts):
            feed_forward = replace(feed_forward, shared_scale=config.shared_scale)
        return replace(layer, mixer=mixer, feed_forward=feed_forward, norms=ONE_NORM, arrangement=Arrangement.PARALLEL)

    return tuple(map(of_layer, mixture.layers(config), config.rotates))


NAMES = replace(cohere.NAMES, experts=ExpertNames(shared="shared_experts"))
FAMILY = Family(
    Config, DEFAULTS, _read, layers=layers, names=NAMES, head=cohere.head, doc=__doc__, features=("parallel blocks",)
)
