"""The runner of a model's layers, whatever they consist of, and the config that most decoders have.

Layers are unrolled: a Python list of weight trees, so that XLA never copies a layer out of a stack. Equal ones are
traced once.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, override

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.layers.attention import Attention, HeadNorm
from jaxserve.layers.batch import Batch, KVCache, LayerStep
from jaxserve.layers.context import ExpertLoads, result
from jaxserve.layers.decode_layer import run_fused_layer
from jaxserve.layers.embedding import embedding_spec
from jaxserve.layers.launch import cut_launch
from jaxserve.layers.layer import PRE_NORMS, Arrangement, Layer
from jaxserve.layers.linear import Consumer, linear
from jaxserve.layers.mlp import FeedForward
from jaxserve.layers.names import LLAMA_NAMES, Names
from jaxserve.layers.norm import Norm, add_update
from jaxserve.layers.params import Params
from jaxserve.layers.paths import Kind, LayerShape, Path, choose
from jaxserve.layers.rope import Rope, Rotation, frequencies, rotations
from jaxserve.layers.sharding import DATA
from jaxserve.layers.token_shards import over_shards


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The fields that the configs of all families with grouped query heads have, and the layers that follow from them:
    by default Llama's without biases. A family adds fields of its own, and replaces parts of the layer.

    Fields with a default are not read from config.json by themselves: `head_norm` names the gains of norms of q and k,
    as `HeadNorm` does; the others are those of `Attention`, `FeedForward`, `Norm` and `Layer`.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: str
    tie_word_embeddings: bool
    rope: Rope | None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    is_gated: bool = True
    norm_kind: Literal["rms", "layer"] = "rms"
    norm_offset: float = 0.0
    norms: tuple[str, ...] = PRE_NORMS
    head_norm: Literal["shared", "by head", "joint"] | None = None
    arrangement: Arrangement = Arrangement.SEQUENTIAL
    score_scale: float | None = None
    update_scale: float = 1.0
    attention_soft_cap: float | None = None
    sliding_window: int | None = None
    alibi_slopes: tuple[float, ...] | None = None

    @property
    def attention(self) -> Attention:
        """The attention block."""
        return Attention(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope=self.rope,
            scale=self.score_scale,
            soft_cap=self.attention_soft_cap,
            sliding_window=self.sliding_window,
            alibi_slopes=self.alibi_slopes,
            qkv_bias=self.qkv_bias,
            out_bias=self.out_bias,
            head_norm=None if self.head_norm is None else HeadNorm(norm=self.norm, gains=self.head_norm),
        )

    @property
    def feed_forward(self) -> FeedForward:
        """The feed-forward block."""
        return FeedForward(
            size=self.intermediate_size, activation=self.activation, is_gated=self.is_gated, has_bias=self.mlp_bias
        )

    @property
    def norm(self) -> Norm:
        """The norm before each block."""
        return Norm(eps=self.norm_eps, kind=self.norm_kind, offset=self.norm_offset)

    @property
    def layer(self) -> Layer:
        """The layer."""
        return Layer(
            hidden_size=self.hidden_size,
            mixer=self.attention,
            feed_forward=self.feed_forward,
            norm=self.norm,
            norms=self.norms,
            arrangement=self.arrangement,
            update_scale=self.update_scale,
        )

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, which are alike."""
        return (self.layer,) * self.num_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowedConfig(DecoderConfig):
    """The fields of families whose layers have windows of their own, None in layers that attend to all tokens.

    Attributes:
        local_rope: the rotation of layers with a window; None if it is that of all layers.
        rotates_everywhere: False if layers without a window do not rotate.
    """

    sliding_windows: tuple[int | None, ...]
    local_rope: Rope | None = None
    rotates_everywhere: bool = True

    @property
    @override
    def layers(self) -> tuple[Layer, ...]:
        """The layers, which are alike but for their windows."""
        return self.windowed(self.layer)

    def windowed(self, layer: Layer) -> tuple[Layer, ...]:
        """Return such a layer for each window."""
        assert isinstance(layer.mixer, Attention)
        local = {"rope": self.local_rope or layer.mixer.rope}
        full = {} if self.rotates_everywhere else {"rope": None}
        mixers = [
            dataclasses.replace(layer.mixer, sliding_window=window, **(full if window is None else local))
            for window in self.sliding_windows
        ]
        return tuple(dataclasses.replace(layer, mixer=mixer) for mixer in mixers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BiasedConfig(DecoderConfig):
    """The fields of families with one flag for the biases of all projections of the attention."""

    attention_bias: bool

    @property
    @override
    def attention(self) -> Attention:
        """The attention block."""
        return dataclasses.replace(super().attention, qkv_bias=self.attention_bias, out_bias=self.attention_bias)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnrotatedConfig(DecoderConfig):
    """The fields that the configs of families have that have a KV head for each query head and no rotary embedding."""

    num_kv_heads: int = dataclasses.field(init=False)
    rope: None = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_kv_heads", self.num_heads)


def decoder_specs(config: Any, layers: Sequence[Layer], *, names: Names = LLAMA_NAMES) -> Params:
    """Declare the whole tree of a decoder with these layers: embedding, layers, final norm and, unless the embedding
    serves as such, the LM head.
    """
    V, E = config.vocab_size, config.hidden_size
    specs: Params = {
        "embed": embedding_spec(names.embed, vocab_size=V, hidden_size=E),
        "layers": [layer.specs(f"{names.layers}.{index}", names) for index, layer in enumerate(layers)],
        "norm": layers[-1].norm.specs(names.norm, E),
    }
    if not config.tie_word_embeddings:
        specs["lm_head"] = embedding_spec(names.lm_head, vocab_size=V, hidden_size=E)
    return specs


def run_layers(
    layers: Sequence[Layer],
    params: Params,
    x: Float[Array, "T E"],
    batch: Batch,
    kv_cache: KVCache,
    span: range,
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run a range of a model's layers; return the residual stream after them and the updated cache.

    After the model's last layer the first result is the hidden states after the final norm, if it has one. With kernels
    "sm90" some layers are fused, as `paths` chooses for each; consecutive ones pass on the next one's qkv. On a mesh
    with an axis "data" each device along it runs a share of the tokens (`token_shards`).
    """
    chosen = choose(layer_shapes(layers, params, kv_cache, span), x, batch.context)
    return run_paths(layers, params, x, batch, kv_cache, span, dict(zip(span, chosen, strict=True)))


def layer_shapes(layers: Sequence[Layer], params: Params, kv_cache: KVCache, span: range) -> list[LayerShape]:
    """Return the layers of a range with their weights and caches."""
    return [
        LayerShape(layer=layers[index], weights=params["layers"][index], cache=kv_cache.of_layer(index))
        for index in span
    ]


def run_paths(
    layers: Sequence[Layer],
    params: Params,
    x: Float[Array, "T E"],
    batch: Batch,
    kv_cache: KVCache,
    span: range,
    paths: Mapping[int, Path],
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run a range of layers as `run_layers` does, each by its path; those without one are left out."""

    def run(params: Params, x: Array, batch: Batch, kv_cache: KVCache) -> tuple[Array, KVCache]:
        return _run_paths(layers, params, x, batch, kv_cache, span, paths)

    if jax.typeof(x).sharding.mesh.shape.get(DATA, 1) == 1:
        return run(params, x, batch, kv_cache)
    return over_shards(run, params, x, batch, kv_cache)


def _run_paths(
    layers: Sequence[Layer],
    params: Params,
    x: Float[Array, "T E"],
    batch: Batch,
    kv_cache: KVCache,
    span: range,
    paths: Mapping[int, Path],
) -> tuple[Float[Array, "T E"], KVCache]:
    weights, context = params["layers"], batch.context
    ropes = {layers[index].mixer.rope for index in paths}
    turned = {rope: None if rope is None else _rotations(rope, batch) for rope in ropes}
    # Of this program only: what is traced once is dropped with it.
    run, run_fused = functools.partial(_run_layer), functools.partial(run_fused_layer)
    if context.record is None:
        run = jax.jit(run, static_argnums=0, static_argnames=("consumer", "counts_experts"))
        run_fused = jax.jit(run_fused, static_argnums=(0, 1))
    counts_experts = kv_cache.expert_loads is not None
    update = qkv = hidden = None
    loads: dict[int, Array] = {}
    for index, path in paths.items():
        layer, own, cache = layers[index], weights[index], kv_cache.of_layer(index)
        step = LayerStep(batch.of_layer(index), cache, turned[layer.mixer.rope])
        with jax.named_scope(f"layer_{index}"):
            if path.kind == Kind.UNFUSED:
                consumer = consumer_of(layers, params, index, span)
                options = {"consumer": consumer, "counts_experts": counts_experts}
                (x, update, cache), load = run(layer, own, x, update, step, **options)
                if load is not None:
                    loads[index] = load
                qkv = hidden = None
            else:
                if qkv is None or index - 1 not in paths:
                    x, y = layer.norm.of_sum(x, update, own["attention_norm"], context)
                    qkv = linear(y, own["attention"]["qkv"], context=context, of_few_rows=True)
                if path.passes_on_qkv:
                    after = weights[index + 1]["attention"]["qkv"], weights[index + 1]["attention_norm"]
                else:
                    after = None, params["norm"]  # which is only of use after the last layer
                x, y, cache = run_fused(layer, path.kind, own, x, qkv, step, *after)
                update, qkv, hidden = None, *((y, None) if path.passes_on_qkv else (None, y))
            x = cut_launch(x, batch, index=index, num_layers=len(layers))
        kv_cache = kv_cache.with_layer(index, cache)
    kv_cache = kv_cache.with_loads(loads)
    if span.stop < len(layers) or "norm" not in params:
        return add_update(x, update, context), kv_cache
    if hidden is None:
        _, hidden = layers[-1].norm.of_sum(x, update, params["norm"], context, "norm")
    return hidden, kv_cache


def _run_layer(
    layer: Layer,
    params: Params,
    x: Float[Array, "T E"],
    update: Any,
    step: LayerStep,
    *,
    consumer: Consumer,
    counts_experts: bool,
) -> tuple[tuple[Any, Any, Any], Int[Array, " X"] | None]:
    """Return what `Layer.run` does, and the numbers of tokens of its experts, None if it has none."""
    loads = ExpertLoads() if counts_experts and step.batch.record is None else None
    step = step._replace(batch=dataclasses.replace(step.batch, loads=loads))
    ran = layer.run(params, x, update, step, consumer=consumer)
    return ran, loads.counts[0] if loads is not None and loads.counts else None


def _rotations(rope: Rope, batch: Batch) -> Rotation:
    shape = len(batch.positions), len(frequencies(rope))
    angles = result(shape, jnp.float32)
    return batch.context.call(rotations, (angles, angles), rope, batch.positions)


def consumer_of(layers: Sequence[Layer], params: Params, index: int, span: range) -> Consumer:
    """Return what takes the update of this layer's feed-forward: the first norm of the next layer, the final norm, or
    the stream.
    """
    layer = layers[index]
    if index + 1 == len(layers):
        norm = layer.norm if "norm" in params else None
    else:
        following = layers[index + 1]
        norm = following.norm if index + 1 in span and following.adds_in_first_norm else None
    return layer.consumer_of_mlp("norm" if norm is not None and norm.kind == "rms" else "stream")
