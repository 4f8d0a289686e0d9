"""Attention blocks with grouped query heads (Ainslie et al. 2023, arXiv:2305.13245): projections, norms of heads and
rotations. The attention itself is done by the layer's cache, see `layers.cache`.
"""

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.layers.activations import scaled
from jaxserve.layers.batch import LayerStep
from jaxserve.layers.linear import Consumer, linear, residual_update, unscaled_product
from jaxserve.layers.names import LLAMA_NAMES, Names
from jaxserve.layers.norm import Norm, norm_spec
from jaxserve.layers.paged_kv import KVSpec
from jaxserve.layers.params import NO_ROW, Params, ParamSpec, matrix_spec
from jaxserve.layers.rope import Rope, Rotation, half_split_order
from jaxserve.layers.weight import Weight
from pallas_kernels.kv_write import HeadNorms, rotate
from pallas_kernels.paging import Scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadNorm:
    """The norms of queries and keys.

    Attributes:
        norm: the kind of norm.
        gains: "shared", one gain for all heads; "by head", a gain for each head; or "joint", where all heads of a token
            are normalised as one vector.
        is_after_rotation: heads are rotated first. A rotation keeps lengths but not the gains' dimensions, so that the
            order matters.
    """

    norm: Norm
    gains: Literal["shared", "by head", "joint"] = "shared"
    is_after_rotation: bool = False

    @property
    def has_kernel(self) -> bool:
        """True if the kernel that rotates and writes keys normalises, too."""
        return self.norm.kind == "rms" and self.gains == "shared" and not self.is_after_rotation

    def specs(self, source: str, *, num_heads: int, head_dim: int, axis: str, num_interleaved: int) -> Any:
        """Declare the weights for these heads, which are sharded over `axis`; `source` is the norm's module."""
        order = half_split_order(head_dim, num_interleaved)
        if self.gains == "shared":
            specs = self.norm.specs(source, head_dim)
            if num_interleaved:
                specs = jax.tree.map(lambda spec: dataclasses.replace(spec, rows=order), specs)
            return specs
        rows = np.arange(num_heads * head_dim).reshape(num_heads, head_dim)[:, order].ravel()
        shape = (num_heads, head_dim)
        gain = dataclasses.replace(
            norm_spec(source, head_dim, offset=self.norm.offset),
            shape=shape,
            axes=(axis, None),
            source_shapes=((math.prod(shape),),) if self.gains == "joint" else (shape,),
            rows=rows if num_interleaved else None,
        )
        return gain if self.norm.kind == "rms" else {"gain": gain}

    def __call__(self, x: Float[Array, "T H D"], weights: Any) -> Float[Array, "T H D"]:
        """Normalise heads with the weights of `specs`."""
        if self.gains == "joint":
            weights = jax.tree.map(lambda gain: gain.reshape(-1), weights)
            return self.norm(x.reshape(x.shape[0], -1), weights).reshape(x.shape)
        return self.norm(x, weights)


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryScale:
    """A factor of queries that grows with each original context before their position (Nakanishi 2025,
    arXiv:2501.19399): 1 + beta ln(1 + floor((position + offset) / original_context)).
    """

    beta: float
    original_context: int
    offset: int = 0

    def __call__(self, q: Float[Array, " T *heads"], positions: Int[Array, " T"]) -> Float[Array, " T *heads"]:
        """Return scaled queries. A rotation may come before or after that, a norm only before it."""
        spans = ((positions + self.offset) // self.original_context).astype(jnp.float32)
        factors = (1.0 + self.beta * jnp.log1p(spans)).reshape(-1, *(1,) * (q.ndim - 1))
        return (q.astype(jnp.float32) * factors).astype(q.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputGate:
    """A gate of the attention's output: a factor of each head, or of each of its values, that is a projection of the
    block's input after an activation. `Names.gate` says where a checkpoint has the projection.
    """

    activation: Literal["sigmoid", "softplus"] = "sigmoid"
    is_per_head: bool = False

    def __call__(self, heads: Float[Array, "T H D"], gate: Float[Array, " T H *D"]) -> Float[Array, "T H D"]:
        """Return the gated heads; the activation is computed in float32."""
        activated = {"sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus}[self.activation](gate.astype(jnp.float32))
        return heads * activated.reshape(*gate.shape, *(1,) * (heads.ndim - gate.ndim)).astype(heads.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention:
    """The attention block of a layer.

    Attributes:
        rope: how positions rotate queries and keys; None if they do not.
        scale: factor of the scores; None for head_dim^-1/2.
        sliding_window: number of tokens that a token attends to, its own included; None for all up to its own.
        chunk_size: a token attends to those before it in its chunk of so many tokens; None for all. Without a window.
        soft_cap, alibi_slopes: as in `Scores`.
        has_sinks: each head has a logit that joins the softmax's denominator and nothing else.
        query_scale: a factor of queries by position; None if there is none.
        clip: limit of the absolute values of queries, keys and values, before norms and the rotation; None if there is
            none.
        gate: the gate of the output; None if there is none.
        value_dim: the size of a head's values, if that is less than `head_dim`. Pages hold them padded with zeros.
        value_scale: a factor of the values.
        value_norm: the norm of each value, without a gain; None if there is none.
        keys_are_values: one projection makes both, before norms and the rotation.
        source: the earlier layer, with equal KV heads, whose keys and values this one reads; None if it has its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope | None
    scale: float | None = None
    sliding_window: int | None = None
    chunk_size: int | None = None
    soft_cap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    head_norm: HeadNorm | None = None
    has_sinks: bool = False
    query_scale: QueryScale | None = None
    clip: float | None = None
    gate: OutputGate | None = None
    value_dim: int | None = None
    value_scale: float = 1.0
    value_norm: Norm | None = None
    keys_are_values: bool = False
    source: int | None = None

    @property
    def cache_spec(self) -> KVSpec:
        """What the layer keeps: K and V of its KV heads, within its window; no token sees more than a chunk."""
        window = self.sliding_window if self.chunk_size is None else self.chunk_size
        return KVSpec(self.num_kv_heads, self.head_dim, window, source=self.source)

    def specs(self, prefix: str, hidden_size: int, names: Names = LLAMA_NAMES) -> Params:
        """Declare the weights; `prefix` names the block in the checkpoint, `names` its projections.

        Q, K and V are fused into [K, G + 2, D, E]: KV head k's G query heads, then its key, then its value, so that a
        split over KV heads keeps together what attends together; on more devices than K, several devices have a copy of
        each head with a part of its queries (see `params.Layout`). Where the checkpoint rotates pairs (2i, 2i + 1), the
        rotated dimensions of q and k are reordered (see `half_split_order`). A layer without keys of its own has the
        queries alone, [K, G, D, E].
        """
        E, H, K, D = hidden_size, self.num_heads, self.num_kv_heads, self.head_dim
        G, V = H // K, self.value_dim or D
        q_has_gates = self.gate is not None and not names.gate
        num_query_rows = (2 if q_has_gates else 1) * H * D
        sizes = (num_query_rows, K * D, K * V) if len(names.qkv) == 3 else (num_query_rows + 2 * K * D,)
        num_interleaved = self.rope.head_dim if names.is_interleaved and self.rope is not None else 0
        assert not (names.is_by_kv_head and num_interleaved), "no family has both"
        assert not (q_has_gates and (names.is_by_kv_head or num_interleaved)), "no family has both"
        assert V == D or len(names.qkv) == 3, "other families have values of the size of keys"
        rows = None if names.is_by_kv_head else _rows_by_kv_head(H, K, D, num_interleaved, V, q_has_gates=q_has_gates)
        projections, members, kind = names.qkv, G + 2, "members"
        if self.source is not None or self.keys_are_values:
            assert rows is not None
            assert len(names.qkv) == 3, "other families have three projections"
            by_head = rows.reshape(K, G + 2, D)
            if self.source is not None:
                projections, members, kind, rows = names.qkv[:1], G, "queries", by_head[:, :-2].ravel()
            else:
                projections, rows = names.qkv[:2], by_head[:, [*range(G + 1), G]].ravel()
            sizes = sizes[: len(projections)]
        specs: Params = {
            "qkv": matrix_spec(
                [f"{prefix}.{name}" for name in projections],
                (K, members, D, E),
                ("kv_heads", kind, None, "embed"),
                num_outputs=sizes,
                rows=rows,
                quantize=True,
            ),
            "out": matrix_spec(
                f"{prefix}.{names.out}", (E, H, V), ("embed", "heads", None), num_inputs=2, quantize=True
            ),
        }
        if self.gate is not None:
            outputs = (H,) if self.gate.is_per_head else (H, V)
            specs["gate"] = matrix_spec(
                f"{prefix}.{names.gate or names.qkv[0]}",
                (*outputs, E),
                ("heads", *(None,) * (len(outputs) - 1), "embed"),
                num_outputs=(2 * H * D,) if q_has_gates else None,
                rows=_rows_of_gates(H, D) if q_has_gates else None,
                quantize=not self.gate.is_per_head,
            )
            if q_has_gates and self.qkv_bias:
                specs["gate_bias"] = specs["gate"].bias
        if self.qkv_bias:
            specs["qkv_bias"] = specs["qkv"].bias
        if self.out_bias:
            specs["out_bias"] = specs["out"].bias
        if self.head_norm is not None:
            of_head = {"head_dim": D, "num_interleaved": num_interleaved}
            specs["q_norm"] = self.head_norm.specs(f"{prefix}.{names.q_norm}", num_heads=H, axis="heads", **of_head)
            if self.source is None:
                of_keys: dict[str, Any] = {"num_heads": K, "axis": "kv_heads"} | of_head
                specs["k_norm"] = self.head_norm.specs(f"{prefix}.{names.k_norm}", **of_keys)
        if self.has_sinks:  # in float32, like the scores
            source = (f"{prefix}.{names.sinks}",)
            specs["sinks"] = ParamSpec(shape=(H,), axes=("heads",), dtype=np.float32, source=source)
        return specs

    def reader(self, params: Params) -> Weight | None:
        """Return the only weight that is multiplied by the block's input as it is; None with gates."""
        return None if self.gate is not None else params["qkv"]

    @property
    def _is_written_as_projected(self) -> bool:
        """True if nothing is done to queries, keys and values before a kernel normalises, rotates and writes them."""
        is_normed = self.head_norm is not None and not self.head_norm.has_kernel
        before = self.clip, self.value_norm, self.query_scale, self.source
        return not self.qkv_bias and not is_normed and before == (None,) * len(before)

    def run(self, params: Params, x: Any, step: LayerStep, *, consumer: Consumer) -> tuple[Any, Any]:
        """Compute the block for rows [T, E], or those rounded for qkv; return its update, as `residual_update` does,
        and the cache after this step. The rotation is that of `rope`.
        """
        context = step.batch.context
        with jax.named_scope("attention"):
            qkv, weight = None, params["qkv"]
            if self._is_written_as_projected and step.batch.tokens is None:
                qkv = unscaled_product(x, weight, context, "qkv")
            if qkv is None:
                qkv = linear(x, weight, params.get("qkv_bias"), context=context, name="qkv")
            heads, cache = self.attend(params, qkv, step)
            heads = scaled(heads[:, :, : self.value_dim], self.value_scale)
            if self.gate is not None:
                heads = self.gate(
                    heads, linear(x, params["gate"], params.get("gate_bias"), context=context, name="gate")
                )
            return residual_update(heads, params, "out", context, consumer), cache

    def attend(self, params: Params, qkv: Any, step: LayerStep) -> tuple[Float[Array, "T H D"], Any]:
        """Compute what is between the block's two projections. `qkv` is [T, K, members, D], or an UnscaledProduct of
        this shape if nothing but the cache's write takes it.
        """
        batch, cache, rotation = step
        if self.clip is not None:
            qkv = jnp.clip(qkv, -self.clip, self.clip)
        slopes = None if self.alibi_slopes is None else jnp.asarray(self.alibi_slopes, jnp.float32)
        scores = Scores(
            scale=self.score_scale,
            sliding_window=self.sliding_window,
            soft_cap=self.soft_cap,
            sinks=params.get("sinks"),
            alibi_slopes=slopes,
        )
        if self.source is not None:
            q = self._queries(qkv, params.get("q_norm"), batch.own(rotation))
            return cache.read(q, batch, scores, num_kv_heads=qkv.shape[1]), cache
        if self.value_norm is not None:
            qkv = jnp.concatenate([qkv[:, :, :-1], self.value_norm(qkv[:, :, -1:], {})], axis=2)
        head_norms = None
        if self.head_norm is not None and self.head_norm.has_kernel:
            head_norms = HeadNorms(params["q_norm"], params["k_norm"], eps=self.head_norm.norm.eps)
        elif self.head_norm is not None:
            # The kernel that rotates keys writes them, so what is done to rotated ones cannot come after it.
            turned, rotation = (batch.own(rotation), None) if self.head_norm.is_after_rotation else (None, rotation)
            qkv = _norm_heads(qkv, params["q_norm"], params["k_norm"], self.head_norm, turned)
        if self.query_scale is not None:
            assert self.head_norm is None, "a norm after the scale would undo it"
            q = self.query_scale(qkv[:, :, :-2], batch.own(batch.positions))
            qkv = jnp.concatenate([q, qkv[:, :, -2:]], axis=2)
        return cache.attend(
            qkv,
            batch,
            scores,
            rotation=rotation,
            head_norms=head_norms,
            chunk_size=self.chunk_size,
            scales=params.get("kv_scales"),
        )

    def _queries(self, q: Float[Array, "T K G D"], q_norm: Any, rotation: Rotation | None) -> Float[Array, "T H D"]:
        """Return the queries of a layer without keys of its own, normalised and rotated."""
        assert self.query_scale is None
        q = q.reshape(len(q), -1, self.head_dim)
        norm = self.head_norm
        if norm is not None and not norm.is_after_rotation:
            q = norm(q, q_norm)
        q = q if rotation is None else rotate(q, *rotation)
        return norm(q, q_norm) if norm is not None and norm.is_after_rotation else q

    @property
    def score_scale(self) -> float:
        """The factor of the scores."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def why_not_fused(self) -> str | None:
        """Why no kernel multiplies by both projections and what is around them, or None if some do."""
        if self.gate is not None:
            return "the attention's output is gated"
        if self.value_dim is not None or self.value_scale != 1.0:
            return "the attention's values are smaller than its keys, or scaled"
        if self.source is not None:
            return "the attention reads the keys and values of another layer"
        return "the attention has an output bias" if self.out_bias else None

    @property
    def why_not_in_kernel(self) -> str | None:
        """Why the kernel of a whole layer does not attend like this, or None if it does."""
        if self.sliding_window is not None:
            return f"there is a window of {self.sliding_window}"
        if self.chunk_size is not None:
            return f"there are chunks of {self.chunk_size}"
        more = {
            "norms of heads": self.head_norm,
            "sinks": self.has_sinks or None,
            "capped scores": self.soft_cap,
            "ALiBi": self.alibi_slopes,
            "a scale of queries": self.query_scale,
            "clipped queries, keys and values": self.clip,
            "a norm of values": self.value_norm,
        }
        if found := [name for name, value in more.items() if value is not None]:
            return f"the attention has {', '.join(found)}"
        return "there is no rotary embedding" if self.rope is None else None


@functools.cache  # one array for all layers
def _rows_by_kv_head(
    num_heads: int, num_kv_heads: int, head_dim: int, num_interleaved: int, value_dim: int, *, q_has_gates: bool
) -> np.ndarray:
    """Return the rows of q, then k, then v, in the order of `Attention.specs`: each KV head's queries, its key, its
    value, padded with rows that are none. With gates, q has the rows of each head and of its gate.
    """
    num_of_q = num_heads * (2 if q_has_gates else 1)
    rows = np.arange((num_of_q + num_kv_heads) * head_dim, dtype=np.int32).reshape(-1, head_dim)
    q, k = np.split(rows, (num_of_q,))
    v = rows.size + np.arange(num_kv_heads * value_dim, dtype=np.int32).reshape(-1, value_dim)
    v = np.pad(v, ((0, 0), (0, head_dim - value_dim)), constant_values=NO_ROW)
    q = q[::2] if q_has_gates else q
    order = half_split_order(head_dim, num_interleaved)
    q, k = q[:, order].reshape(num_kv_heads, -1, head_dim), k[:, order]
    return np.concatenate([q, k[:, None], v[:, None]], axis=1).ravel()


def _rows_of_gates(num_heads: int, head_dim: int) -> np.ndarray:
    """Return the rows of the gates among those of q."""
    return np.arange(2 * num_heads * head_dim, dtype=np.int32).reshape(-1, head_dim)[1::2].ravel()


def _norm_heads(
    qkv: Float[Array, "T K members D"], q_norm: Any, k_norm: Any, norm: HeadNorm, rotation: Rotation | None
) -> Float[Array, "T K members D"]:
    """Rotate queries and keys if there is a rotation, and normalise them with norms that no kernel supports."""
    T, K, members, D = qkv.shape
    q, k = qkv[:, :, :-2].reshape(T, -1, D), qkv[:, :, -2]
    if rotation is not None:
        q, k = rotate(q, *rotation), rotate(k, *rotation)
    q, k = norm(q, q_norm).reshape(T, K, members - 2, D), norm(k, k_norm)
    return jnp.concatenate([q, k[:, :, None], qkv[:, :, -1:]], axis=2)
