"""How blocks of attention and feed-forward update the residual stream, and the decoder of Llama and similar models.

Layers are unrolled: a Python list of weight trees, so that XLA never copies a layer out of a stack.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jaxtyping import Array, Float

from jaxserve.layers import decode_layer
from jaxserve.layers.activations import ACTIVATIONS, Gate
from jaxserve.layers.alike import Alike
from jaxserve.layers.attention import attend_heads, attention_specs, self_attention
from jaxserve.layers.batch import Batch, KVCache
from jaxserve.layers.embedding import embedding_spec
from jaxserve.layers.launch import cut_launch
from jaxserve.layers.mlp import gated_mlp, gated_mlp_specs
from jaxserve.layers.moe import Routing, can_leave_partial_sums, moe_or_mlp
from jaxserve.layers.norm import add_rms_norm, norm_spec, rms_norm
from jaxserve.layers.params import Params
from jaxserve.layers.parts import Kernel, sum_part
from jaxserve.layers.paths import Kind, LayerShape, StepShape, choose
from jaxserve.layers.peers import summed
from jaxserve.layers.rope import Rope, rotations
from jaxserve.layers.weight import Weight
from pallas_kernels.paging import Scores
from pallas_kernels.peers import PeerBuffers
from pallas_kernels.row_quantization import UnscaledProduct

Attend = Callable[[Params, Any, Any], tuple[Any, Any]]
"""(weights, input, LayerCache) -> (output, LayerCache)

Inputs are arrays or, for weights that round them, QuantizedRows; outputs are arrays or, for an AddNorm,
UnscaledProducts.
"""
Mlp = Callable[[Params, Any], Any]
"""(weights, input) -> output, as those of `Attend`"""
Norm = Callable[[Array, Any], Array]
"""(input, weights) -> output"""
AddNorm = Callable[..., tuple[Array, Any]]
"""(residual stream, update, weights, reader=weight) -> (their sum, its norm)

A `reader` alone is multiplied by the norm, which may be rows that are rounded for it.
"""
Block = Callable[[Params, Array, Any, Any], tuple[Array, Any, Any]]
"""(weights of the layer, residual stream, update that is still to be added to it, LayerCache) -> the last three

An update is added where the sum is normalised next, in the following layer, so that both can be one kernel. It is an
array or an UnscaledProduct; or None: there is nothing to add, as in the first layer.
"""

Layers = Callable[[Params, Any, Array, Batch, KVCache, range], tuple[Array, KVCache]]
"""(weights, config, residual stream, batch, cache, range of layers) -> (residual stream after them, cache)

After a model's last layer the first result is the hidden states after the final norm.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """The fields that the configs of all families with grouped query heads and rotary embedding have; a family adds its
    own.
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
    rope: Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """The names of a decoder's parts in a checkpoint; `attention` and `mlp` are parts of its numbered `layers`."""

    embed: str = "model.embed_tokens"
    layers: str = "model.layers"
    attention: str = "self_attn"
    mlp: str = "mlp"
    norm: str = "model.norm"
    lm_head: str = "lm_head"


LLAMA_NAMES = Names()
PRE_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
"""The norms of Llama's layer and their names in checkpoints."""

SANDWICH_NORMS = {
    "attention_norm": "input_layernorm",
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""The norms of a layer of Gemma 2 and 3."""


BlockSpecs = Callable[[str, Any], Params]
"""(name of a block in the checkpoint, config) -> its weights"""


def decoder_specs(
    config: Any,
    *,
    attention: BlockSpecs = attention_specs,
    mlp: BlockSpecs | Sequence[BlockSpecs] = gated_mlp_specs,
    norm: Callable[[str, int], Any] = norm_spec,
    norms: Mapping[str, str] = PRE_NORMS,
    names: Names = LLAMA_NAMES,
) -> Params:
    """Declare the whole tree; the defaults are those of Llama's checkpoints, without biases.

    `attention`, `mlp` and `norm` return the specs of one block, given its name in the checkpoint and `config` (or a
    norm's size); `mlp` may have one entry per layer. `norms` maps the norms of a layer, as `sequential_block` and
    `parallel_block` know them, to their names in the checkpoint.
    """
    V, E, L = config.vocab_size, config.hidden_size, config.num_layers
    mlps = [mlp] * L if callable(mlp) else mlp

    def layer_specs(layer: str, mlp: BlockSpecs) -> Params:
        return {name: norm(f"{layer}.{source}", E) for name, source in norms.items()} | {
            "attention": attention(f"{layer}.{names.attention}", config),
            "mlp": mlp(f"{layer}.{names.mlp}", config),
        }

    specs: Params = {
        "embed": embedding_spec(names.embed, vocab_size=V, hidden_size=E),
        "layers": [layer_specs(f"{names.layers}.{index}", mlps[index]) for index in range(L)],
        "norm": norm(names.norm, E),
    }
    if not config.tie_word_embeddings:
        specs["lm_head"] = embedding_spec(names.lm_head, vocab_size=V, hidden_size=E)
    return specs


def windows_of(config: Any) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, by the fields that configs have: one for all, one a layer, or none."""
    by_layer = getattr(config, "sliding_windows", None)
    return by_layer or (getattr(config, "sliding_window", None),) * config.num_layers


def windowed_attends(
    config: Any, batch: Batch, *, scale: float, soft_cap: float | None = None, **options: Any
) -> list[Callable[..., tuple[Any, Any]]]:
    """Return `self_attention` for each layer by the config's `sliding_windows`, with `options` of all layers.

    Layers with a window rotate by the config's `local_rope`, if it has one.
    """
    rotation = rotations(config.rope, batch.positions)
    local_rope = getattr(config, "local_rope", None)
    local_rotation = rotation if local_rope is None else rotations(local_rope, batch.positions)
    return [
        functools.partial(
            self_attention,
            rotation=rotation if window is None else local_rotation,
            scores=Scores(scale=scale, sliding_window=window, soft_cap=soft_cap),
            **options,
        )
        for window in config.sliding_windows
    ]


def activation_of(config: Any) -> str | Gate:
    """Return the gate of a config's feed-forwards, by default one by its `activation`."""
    return getattr(config, "gate", config.activation)


def decoder(
    params: Params,
    config: DecoderConfig,
    x: Float[Array, "T E"],
    batch: Batch,
    kv_cache: KVCache,
    span: range,
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run a range of Llama's layers, and after the last one the final norm; also return the updated cache.

    A `routing` of the config is for the layers that have experts; a `gate` is that of the feed-forward if its
    `activation` does not name it. With kernels "sm90" some layers of a decode step are one kernel, if their keys and
    values are in pages.
    """
    activation, routing = activation_of(config), getattr(config, "routing", None)
    rotation = rotations(config.rope, batch.positions)
    norm = functools.partial(rms_norm, eps=config.norm_eps)
    of_heads = {"rotation": rotation, "head_norm_eps": config.norm_eps}
    windows = windows_of(config)
    views = [
        {"batch": batch.of_layer(index), "scores": Scores(scale=config.head_dim**-0.5, sliding_window=windows[index])}
        for index in span
    ]
    step = StepShape(
        num_rows=len(x),
        dtype=x.dtype,
        kernels=batch.kernels,
        is_decode_only=batch.is_decode_only,
        peers=batch.peers,
    )
    layers = [params["layers"][index] for index in span]
    shapes = layer_shapes(
        layers,
        [kv_cache.of_layer(index) for index in span],
        activation=activation,
        sliding_windows=[windows[index] for index in span],
        num_rotated=rotation[0].shape[1],
    )
    kinds = [path.kind for path in choose(shapes, step)]
    if Kind.OPERATIONS not in kinds and isinstance(activation, str):
        attends = [functools.partial(attend_heads, **view, **of_heads) for view in views]
        return decode_layer.decode_layers(
            params,
            x,
            batch,
            kv_cache,
            span,
            kinds=kinds,
            attends=attends,
            rotation=rotation,
            activation=ACTIVATIONS[activation],
            eps=config.norm_eps,
        )

    leaves_partial_sums = adds_up_partial_sums(layers, x, batch.peers)
    sums = {"kernels": batch.kernels, "peers": batch.peers, "leaves_partial_sums": leaves_partial_sums}
    # Only `add_norm` takes a product without its scales.
    leaves_scales = batch.kernels == "sm90" and all(_has_pre_norms_only(layer) for layer in layers)
    mlp = functools.partial(gated_mlp, activation=activation, leaves_scales=leaves_scales, **sums)
    if routing is not None:
        mlp = functools.partial(
            moe_or_mlp, batch=batch, routing=routing, activation=activation, leaves_partial_sums=leaves_partial_sums
        )
    add_norm = functools.partial(add_rms_norm, eps=config.norm_eps, kernels=batch.kernels, peers=batch.peers)

    of_heads |= {"leaves_partial_sums": leaves_partial_sums, "leaves_scales": leaves_scales}
    attends = [functools.partial(self_attention, **view, **of_heads) for view in views]
    block = functools.partial(sequential_block, mlp=mlp, norm=norm, add_norm=add_norm)
    blocks = [functools.partial(block, attend=attend) for attend in attends]
    return run_layers(params, x, batch, kv_cache, span, blocks, norm=norm, add_norm=add_norm)


def layer_shapes(
    layers: Sequence[Params],
    caches: Sequence[Any],
    *,
    activation: str | Gate,
    sliding_windows: Sequence[int | None],
    num_rotated: int | None,
    own: str | None = None,
    adds_in_norms: bool = True,
    routing: Routing | None = None,
) -> list[LayerShape]:
    """Return what the layers of a decoder consist of: weights, caches and windows are those of each layer."""
    return [
        LayerShape(
            weights=layer,
            following=following,
            cache=cache,
            activation=activation,
            sliding_window=window,
            num_rotated=num_rotated,
            own=own,
            adds_in_norms=adds_in_norms,
            routing=routing,
        )
        for layer, following, cache, window in zip(layers, [*layers[1:], None], caches, sliding_windows, strict=True)
    ]


def adds_up_partial_sums(layers: Sequence[Params], x: Any, peers: PeerBuffers | None) -> bool:
    """Return true if `decoder` leaves devices' partial sums to `add_rms_norm`, which has a kernel that adds them up.

    `x` is the residual stream, or its shape.
    """
    return sum_part(x, peers).kernel == Kernel.ALL_REDUCE and all(
        _has_pre_norms_only(layer) and "out_bias" not in layer["attention"] and can_leave_partial_sums(layer["mlp"])
        for layer in layers
    )


def readers_of(layer: Params) -> dict[str, Weight | None]:
    """Return the only weight that is multiplied by each of the norms before a layer's blocks, None if there is none."""
    feed_forward = layer["mlp"]
    gate_up = None if "experts" in feed_forward else feed_forward.get("gate_up")
    return {"attention_norm": layer["attention"].get("qkv"), "mlp_norm": gate_up}


def _has_pre_norms_only(layer: Params) -> bool:
    return layer.keys() == {*PRE_NORMS, "attention", "mlp"}


def run_layers(
    params: Params,
    x: Float[Array, "T E"],
    batch: Batch,
    kv_cache: KVCache,
    span: range,
    blocks: Sequence[Block],
    *,
    norm: Norm,
    add_norm: AddNorm | None = None,
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run a range of layers, each by its block; return the residual stream after them and the updated cache.

    Layers whose blocks are partials with equal values are traced once, see `alike`. After the model's last layer the
    first result is the hidden states after the final norm, if it has one. `add_norm` adds the last update and
    normalises in one call, if that is faster.
    """
    layers, update, call = params["layers"], None, Alike()
    for index, block in zip(span, blocks, strict=True):
        with jax.named_scope(f"layer_{index}"):
            x, update, cache = call(block, layers[index], x, update, kv_cache.of_layer(index))
            x = cut_launch(x, batch, index=index, num_layers=len(layers))
        kv_cache = kv_cache.with_layer(index, cache)
    if span.stop < len(layers):
        if isinstance(update, UnscaledProduct):
            update = update.values()
        return x if update is None else x + summed(update, batch.peers, kernels=batch.kernels), kv_cache
    if update is not None and add_norm is not None:
        return add_norm(x, update, params["norm"])[1], kv_cache
    x = x if update is None else x + update
    return norm(x, params["norm"]) if "norm" in params else x, kv_cache


def sequential_block(
    layer: Params,
    x: Array,
    update: Any,
    cache: Any,
    *,
    attend: Attend,
    mlp: Mlp,
    norm: Norm,
    add_norm: AddNorm | None = None,
) -> tuple[Array, Any, Any]:
    """Apply attention, then the feed-forward, each of which updates the residual stream x.

    A norm is applied if the layer has weights for it: before ("attention_norm", "mlp_norm") as in Llama, after
    ("attention_post_norm", "mlp_post_norm") as in OLMo 2, or both as in Gemma 2. `add_norm` adds and normalises in one
    call, if that is faster.
    """

    def normed(name: str, y: Any) -> Any:
        return norm(y, layer[name]) if name in layer else y

    def add(x: Array, update: Any, name: str) -> tuple[Array, Any]:
        if update is not None and add_norm is not None and name in layer:
            return add_norm(x, update, layer[name], reader=readers[name])
        x = x if update is None else x + update
        return x, normed(name, x)

    readers = readers_of(layer)
    x, y = add(x, update, "attention_norm")
    update, cache = attend(layer["attention"], y, cache)
    x, y = add(x, normed("attention_post_norm", update), "mlp_norm")
    return x, normed("mlp_post_norm", mlp(layer["mlp"], y)), cache


def parallel_block(
    layer: Params,
    x: Array,
    update: Array | None,
    cache: Any,
    *,
    attend: Attend,
    mlp: Mlp,
    norm: Norm,
) -> tuple[Array, Array, Any]:
    """Attention and the feed-forward side by side, both updates of the residual stream x (Wang and Komatsuzaki 2021).

    Both read "attention_norm" of x, unless the layer has an "mlp_norm" too.
    """
    x = x if update is None else x + update
    y = norm(x, layer["attention_norm"])
    update, cache = attend(layer["attention"], y, cache)
    if "mlp_norm" in layer:
        y = norm(x, layer["mlp_norm"])
    return x, update + mlp(layer["mlp"], y), cache


def plain_layers(
    params: Params,
    config: Any,
    x: Float[Array, "T E"],
    batch: Batch,
    kv_cache: KVCache,
    span: range,
    *,
    attend: Callable[..., tuple[Array, Any]] | Sequence[Callable[..., tuple[Array, Any]]],
    norm: Norm,
    feed_forward: Callable[..., Array] = gated_mlp,
    arrange: Callable[..., tuple[Array, Array | None, Any]] = sequential_block,
) -> tuple[Float[Array, "T E"], KVCache]:
    """Run a range of layers of any family, one operation after the other, and after the last one the final norm.

    `attend` is `self_attention` with all options but `batch`, or one such for each layer of the model; `feed_forward`
    is `gated_mlp` or `mlp`. `arrange` says how both update the residual stream.
    """
    attends = [attend] * config.num_layers if callable(attend) else attend
    mlp = functools.partial(feed_forward, activation=config.activation, kernels=batch.kernels, peers=batch.peers)
    block = functools.partial(arrange, mlp=mlp, norm=norm)
    blocks = [
        functools.partial(block, attend=functools.partial(attends[index], batch=batch.of_layer(index)))
        for index in span
    ]
    return run_layers(params, x, batch, kv_cache, span, blocks, norm=norm)
