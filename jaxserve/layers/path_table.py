"""The table of paths: which kernels run in each program of a model, and why no faster ones do.

It is logged at start and printed by `jaxserve models`. It asks the functions that choose while a program is traced.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.layers.layer import POST_NORMS, Arrangement
from jaxserve.layers.linear import norm_adds_partial_sums
from jaxserve.layers.moe import Experts
from jaxserve.layers.params import Params
from jaxserve.layers.parts import (
    AttendsByKernels,
    Kernel,
    Part,
    experts_part,
    few_rows_part,
    gate_up_part,
    gather_part,
    linear_part,
    norm_part,
    routing_part,
    sum_part,
    update_norm_part,
)
from jaxserve.layers.paths import Kind, LayerShape, StepShape, choose
from jaxserve.layers.weight import Weight
from pallas_kernels.peers import PeerBuffers

_LAYER_NORM = Part(Kernel.XLA, "no kernel computes layer norms")
_NORM_OF_BLOCK = Part(Kernel.XLA, "no kernel computes norms after blocks")


class Ends(NamedTuple):
    """What a model has below its layers and above them."""

    embedding: Weight
    head: Weight
    has_head_bias: bool


class _Row(NamedTuple):
    """What runs in a program; programs of several sizes are one line if they differ in numbers only."""

    step: StepShape
    layers: dict[Kind, tuple[int, str | None]]
    """Number of layers of each kind, and the reason why the first of them has no faster path."""
    parts: dict[str, list[Part]]
    """What computes each part that no kernel of a whole layer computes: a Part for each kernel. Matrix products and
    attention.
    """
    others: dict[str, list[Part]]
    """What computes norms, and what devices send each other: a Part for each kernel."""

    @property
    def key(self) -> object:
        """What is equal in all programs of a line."""
        kinds = {kind: count for kind, (count, _) in self.layers.items()}
        return (
            self.step.is_decode_only,
            kinds,
            {name: [part.kernel for part in found] for name, found in (self.parts | self.others).items()},
        )


def describe(
    layers: Sequence[LayerShape],
    steps: Iterable[tuple[StepShape, int]],
    ends: Ends,
    *,
    logits_peers: PeerBuffers | None,
) -> list[str]:
    """Return a line for each range of programs in which the same kernels run, by their number of rows.

    `steps` are what programs are compiled for, and of how many rows they compute logits, 0 for none. `logits_peers` are
    the buffers through which devices send each other logits.
    """
    by_size = sorted(steps, key=lambda step: (not step[0].is_decode_only, step[0].num_rows))
    rows = [_row(layers, step, ends, num_logits, logits_peers) for step, num_logits in by_size]
    return [_line(list(alike)) for _, alike in itertools.groupby(rows, key=lambda row: row.key)]


def multiplies_by_xla(layers: Sequence[LayerShape], step: StepShape, ends: Ends, *, num_logits: int) -> bool:
    """Return true if XLA makes the kernel of a matrix product in such a step; arguments are as for `describe`."""
    parts = _row(layers, step, ends, num_logits, None).parts.values()
    return any(part.kernel in (Kernel.XLA, Kernel.NONE) for found in parts for part in found)


def _row(
    layers: Sequence[LayerShape], step: StepShape, ends: Ends, num_logits: int, logits_peers: PeerBuffers | None
) -> _Row:
    paths = choose(layers, step)
    kinds = [path.kind for path in paths]
    found = {
        kind: (kinds.count(kind), next(path.reason for path in paths if path.kind == kind))
        for kind in Kind
        if kind in kinds
    }
    parts: dict[str, list[Part]] = {}
    others: dict[str, list[Part]] = {}
    x = jax.ShapeDtypeStruct((step.num_rows, ends.embedding.shape[1]), step.dtype)
    distinct = {(layer.key, kind): layer for layer, kind in zip(layers, kinds, strict=True)}
    for (_, kind), layer in distinct.items():
        if kind == Kind.OPERATIONS:
            _add(parts, _operations(layer, step))
            _add(others, _norms(layer, x, step))
        elif kind != Kind.LAYER:
            _add(parts, {"attention": _attention(layer, step)})
        output = layer.weights["attention"]["out"]
        if output.is_split:
            _add(others, {"sums over devices": sum_part(x.update(shape=(step.num_rows, output.shape[0])), step.peers)})
    if kinds[-1] == Kind.OPERATIONS:
        _add(others, {"norm": _final_norm(layers[-1], x, step)})
    if not ends.embedding.mesh.empty and ends.embedding.spec[0] is not None:
        _add(others, {"embedding": sum_part(x, step.peers)})
    if num_logits:
        hidden = jax.ShapeDtypeStruct((num_logits, ends.head.shape[1]), step.dtype)
        head = few_rows_part(hidden, ends.head, kernels=step.kernels, has_bias=ends.has_head_bias)
        _add(parts, {"LM head": head})
        shard = jax.ShapeDtypeStruct((num_logits, ends.head.shard.shape[0]), jnp.float32)
        if shard.shape[1] < ends.head.shape[0]:
            _add(others, {"gather of logits": gather_part(shard, logits_peers)})
    return _Row(step, found, parts, others)


def _add(parts: dict[str, list[Part]], of_layer: dict[str, Part]) -> None:
    """Add the parts of a layer that are computed by other kernels than those of the layers before."""
    for name, part in of_layer.items():
        seen = parts.setdefault(name, [])
        if part.kernel not in [other.kernel for other in seen]:
            seen.append(part)


def _norms(layer: LayerShape, x: jax.ShapeDtypeStruct, step: StepShape) -> dict[str, Part]:
    """Return what computes the norms of the residual stream and of updates in a layer that is not fused."""
    value, weights = layer.layer, layer.weights
    if value.norm.kind != "rms":
        return dict.fromkeys(value.norms, _LAYER_NORM)
    is_sequential = value.arrangement == Arrangement.SEQUENTIAL
    readers: dict[str, Weight | None] = {}
    if is_sequential and "attention_norm" in value.norms:
        readers["attention_norm"] = value.mixer.reader(weights["attention"])
    if is_sequential and "mlp_norm" in value.norms:
        readers["mlp_norm"] = value.feed_forward.reader(weights["mlp"])
    parts: dict[str, Part] = {}
    for name in value.norms:
        if name in POST_NORMS:
            following = "mlp_norm" if name == "attention_post_norm" else "attention_norm"
            parts[name] = update_norm_part(x, readers.get(following), kernels=step.kernels)
        elif is_sequential or (name == "attention_norm" and value.adds_in_first_norm):
            parts[name] = _norm_of_sum(layer, x, step, name, readers.get(name))
        else:
            parts[name] = _NORM_OF_BLOCK
    return parts


def _final_norm(layer: LayerShape, x: jax.ShapeDtypeStruct, step: StepShape) -> Part:
    """Return what computes the final norm if the last layer is not fused."""
    if layer.layer.norm.kind != "rms":
        return _LAYER_NORM
    if layer.layer.arrangement == Arrangement.NORMED_SUMS:  # which leaves no update
        return _NORM_OF_BLOCK
    return _norm_of_sum(layer, x, step, "norm", None)


def _norm_of_sum(layer: LayerShape, x: jax.ShapeDtypeStruct, step: StepShape, name: str, reader: Weight | None) -> Part:
    """Return what adds the update of a block and computes the norm of this name that follows it: "mlp_norm" the
    attention, others the feed-forward.
    """
    value, weights = layer.layer, layer.weights
    if name == "mlp_norm":
        takes_parts, block = value.consumer_of_attention == "norm", (value.mixer, weights["attention"])
    else:
        takes_parts, block = value.consumer_of_mlp("norm") == "norm", (value.feed_forward, weights["mlp"])
    has_partial_sums = (
        takes_parts and block[0].leaves_partial_sums(block[1]) and norm_adds_partial_sums(x.shape, x.dtype, step.peers)
    )
    return norm_part(x, reader, kernels=step.kernels, has_partial_sums=has_partial_sums)


def _attention(layer: LayerShape, step: StepShape) -> Part:
    cache = layer.cache
    if not isinstance(cache, AttendsByKernels):
        return Part(Kernel.XLA, f"{type(cache).__name__} says nothing of kernels")
    return cache.attention_part(dtype=step.dtype, kernels=step.kernels, is_decode_only=step.is_decode_only)


def _operations(layer: LayerShape, step: StepShape) -> dict[str, Part]:
    """Return what computes the parts of a layer that is not fused."""
    weights = layer.weights["attention"]
    parts = {
        name: linear_part(_rows(step, weight), weight, kernels=step.kernels)
        for name, weight in weights.items()
        if isinstance(weight, Weight) and name != "out"
    }
    parts["attention"] = _attention(layer, step)
    output = weights["out"]
    rows = _rows(step, output, num_inputs=output.ndim - 1)
    parts["out"] = linear_part(rows, output, kernels=step.kernels)
    parts |= _feed_forward(layer.weights["mlp"], layer, step)
    return parts


def _feed_forward(weights: Params, layer: LayerShape, step: StepShape) -> dict[str, Part]:
    parts: dict[str, Part] = {}
    block = layer.layer.feed_forward
    for name in sorted(weights, key=lambda name: name.startswith("down")):  # which is the last to run
        weight = weights[name]
        if name == "experts":
            assert isinstance(block, Experts)
            parts["routing"] = routing_part(step.num_rows, block.routing, kernels=step.kernels)
            parts["experts"] = experts_part(weight["gate_up"], block.activation, dtype=step.dtype, kernels=step.kernels)
        elif name == "shared":
            shared = _feed_forward(weight, layer, step)
            parts |= {f"shared {part}": found for part, found in shared.items()}
        elif name == "gate_up":
            x, has_bias = _rows(step, weight), "gate_up_bias" in weights
            parts[name] = gate_up_part(x, weight, block.activation, kernels=step.kernels, has_bias=has_bias)
        elif isinstance(weight, Weight):
            parts[name] = linear_part(_rows(step, weight), weight, kernels=step.kernels)
    return parts


def _rows(step: StepShape, weight: Weight, *, num_inputs: int = 1) -> jax.ShapeDtypeStruct:
    """Return the shape of what a step multiplies by a weight."""
    return jax.ShapeDtypeStruct((step.num_rows, *weight.shape[weight.ndim - num_inputs :]), step.dtype)


def _line(rows: Sequence[_Row]) -> str:
    first, last = rows[0].step.num_rows, rows[-1].step.num_rows
    size = f"{first}" if first == last else f"{first} to {last}"
    layers, parts = rows[0].layers, rows[0].parts | rows[0].others
    num_layers = sum(count for count, _ in layers.values())
    texts = [
        f"{kind}" + (f" of {count} layers" if count < num_layers else "") + _because(reason)
        for kind, (count, reason) in layers.items()
    ]
    names: dict[str, list[str]] = {}
    for name, found in parts.items():
        names.setdefault(" or ".join(f"{part.kernel}{_because(part.reason)}" for part in found), []).append(name)
    texts += [f"{', '.join(alike)}: {kernels}" for kernels, alike in names.items()]
    is_decode_only = rows[0].step.is_decode_only
    return f"{'decode of' if is_decode_only else 'prompts,'} {size} {'rows' if is_decode_only else 'tokens'}: " + (
        "; ".join(texts)
    )


def _because(reason: str | None) -> str:
    return "" if reason is None else f" ({reason})"
