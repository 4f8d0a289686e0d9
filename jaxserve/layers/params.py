"""ParamSpec, the keystone: one declaration per weight, from which everything else about it follows.

From a family's `param_specs(config)` tree come shapes and shardings on the devices (`layouts`), random weights
(`random_params`), which weights are stored as codes (`schemes`), the names to read from a Hugging Face checkpoint and
the Orbax restore target. A weight may be stored as
several arrays: its `leaves` declare each of them, and a tree of weights is a tree of such leaves.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from jaxserve.layers.quantized import Quantized
from jaxserve.layers.weight import Dense, Weight
from jaxserve.quantization.scheme import Init, Parts, Scheme, dtype_of

NO_ROW = -1
"""A row of a weight that no tensor has: zeros. For weights of several tensors."""

Params = dict[str, Any]
"""A tree of dicts and lists, with a ParamSpec for each weight, a `Weight` or an array, or what else there is of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafSpec:
    """One of the arrays that a weight is stored as: its shape, and what the declaration of the weight says about it.

    Attributes:
        name: name of the weight in errors.
        axes: as in a ParamSpec.
        dtype: None means the dtype that the engine serves in.
        init: what random values are: "normal" with `init_scale` as standard deviation; "bits" of any kind; "int8" or
            "int4" (two a byte) with a mean of zero; or all equal to `init_scale` ("constant").
        expert_size: as in a ParamSpec.
        group_size: number of inputs to which an entry of the last axis applies, if more than one.
    """

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    dtype: Any
    init: Init
    init_scale: float
    expert_size: int | None
    group_size: int | None = None

    def dtype_in(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype of this array in an engine that serves in `dtype`."""
        return np.dtype(dtype if self.dtype is None else self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ParamSpec:
    """One weight: its shape, the logical name of each axis, and where it comes from.

    How the weight is composed of its tensors is data, so that whatever else a checkpoint has for each row of a tensor
    (codes, scales) can be arranged in the same way.

    Attributes:
        axes: logical names ("embed", "heads", "kv_heads", "ffn", "experts", "vocab", or None), mapped to mesh axes by
            `layers.sharding`. "kv_heads" comes first if there is one; "members" after it are the queries of a KV head,
            its key and its value, "queries" only the former.
        num_inputs: number of last axes that a matmul contracts; the axes before them are outputs. 0 for weights that no
            matmul reads, such as biases and norms.
        source: names of the Hugging Face tensors that the weight is composed of.
        source_shapes: their shapes; by default the one tensor has the weight's shape.
        rows: for each row of the weight, in row-major order of its outputs, its index among the rows of all sources,
            one source after the other, or NO_ROW; None if they are in order already. A row has all inputs of one
            output.
        is_transposed: the sources have inputs before outputs; their last two axes are swapped first.
        offset: added to the checkpoint's values, in float32.
        unit_axis: vectors along this axis of a checkpoint's values are divided by their lengths, in float32.
        dtype: None means the dtype that the engine serves in.
        quantize: marks the weights that `--quantization` rounds to codes.
        scheme: how a quantized weight is stored; None if it is not quantized.
        is_exact: values that are made of a checkpoint's codes are rounded once, to the weight's dtype, as if the codes
            were held; otherwise as the format's own package rounds them.
        is_absorbed: layers do more with its values than multiply by them, so it is never held as codes.
        init_scale: standard deviation of random initialisation, None for ones (norms), 0.0 for zeros (biases).
        expert_size: the whole inner size of an expert, for the weights of experts, all of which are sharded in the same
            way by it.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    num_inputs: int = 0
    source: tuple[str, ...]
    source_shapes: tuple[tuple[int, ...], ...] = ()
    rows: np.ndarray | None = None
    is_transposed: bool = False
    offset: float = 0.0
    unit_axis: int | None = None
    dtype: Any = None
    quantize: bool = False
    scheme: Scheme | None = None
    is_exact: bool = False
    is_absorbed: bool = False
    init_scale: float | None = 0.02
    expert_size: int | None = None

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{self.source}: shape {self.shape} and axes {self.axes} differ in rank")
        if not self.source_shapes:
            object.__setattr__(self, "source_shapes", (self.shape,))
        if self.scheme is not None and (not self.num_inputs or self.dtype is None):
            raise ValueError(f"{self.source}: a scheme needs inputs, and the dtype of values")
        if len(self.source) != len(self.source_shapes):
            raise ValueError(f"{self.source}: there must be one of source_shapes {self.source_shapes} for each")
        stored = sum(map(math.prod, self.source_shapes)) if self.rows is None else len(self.rows) * self.row_size
        if stored != math.prod(self.shape):
            raise ValueError(f"{self.source}: {stored} values do not make up a weight of shape {self.shape}")

    @property
    def row_size(self) -> int:
        """Number of inputs of one output; 1 if the weight has no inputs."""
        return math.prod(self.shape[len(self.shape) - self.num_inputs :])

    @property
    def bias(self) -> "ParamSpec":
        """The declaration of a bias for each output, which stands beside the weight in a checkpoint."""
        num_outputs = len(self.shape) - self.num_inputs
        return ParamSpec(
            shape=self.shape[:num_outputs],
            axes=self.axes[:num_outputs],
            source=tuple(f"{name.removesuffix('.weight')}.bias" for name in self.source),
            source_shapes=tuple(shape[:1] for shape in self.source_shapes),
            rows=self.rows,
            dtype=self.dtype,
            init_scale=0.0,
        )

    def assemble(self, sources: Iterable[np.ndarray]) -> np.ndarray:
        """Return the weight that is made of the tensors of `source`, given in order."""
        outputs_first = (tensor.swapaxes(-1, -2) if self.is_transposed else tensor for tensor in sources)
        values = self.arrange(outputs_first).reshape(self.shape)
        if self.unit_axis is not None:
            values = values.astype(np.float32)
            values /= np.maximum(np.linalg.norm(values, axis=self.unit_axis, keepdims=True), np.float32(1e-12))
        return values if self.offset == 0.0 else values.astype(np.float32) + np.float32(self.offset)

    def arrange(self, parts: Iterable[np.ndarray]) -> np.ndarray:
        """Return the values of `parts` for each row of the weight, as [rows, values of a row].

        `parts` has one array per source, with its rows first and any number of values for each of them. The arrays are
        copied one by one into the result; a single part that is in order already is not copied.
        """
        counts = [math.prod(shape) // self.row_size for shape in self.source_shapes]
        if len(counts) == 1 and self.rows is None:
            [part] = parts
            return part.reshape(counts[0], -1)
        starts, arranged = np.cumsum([0, *counts]), None
        for part, start, count in zip(parts, starts, counts, strict=False):
            found = _as_integers(part.reshape(count, -1))
            if arranged is None:
                num_rows = starts[-1] if self.rows is None else len(self.rows)
                make = np.empty if self.rows is None or NO_ROW not in self.rows else np.zeros
                arranged = make((num_rows, found.shape[1]), part.dtype)
            into = _as_integers(arranged)
            if self.rows is None:
                into[start : start + count] = found
            elif len(counts) == 1:
                np.take(found, self.rows, axis=0, out=into, mode="clip")  # other modes would copy `out`
            else:
                [here] = np.nonzero((self.rows >= start) & (self.rows < start + count))
                into[here] = found[self.rows[here] - start]
        assert arranged is not None
        return arranged

    def dtype_in(self, dtype: np.dtype) -> np.dtype:
        """Return the dtype of the weight's values in an engine that serves in `dtype`."""
        return np.dtype(dtype if self.dtype is None else self.dtype)

    @property
    def leaves(self) -> Weight | LeafSpec:
        """The arrays that the weight is stored as: a Weight of LeafSpecs, or one LeafSpec for what no matmul reads."""
        scale = 1.0 if self.init_scale is None else self.init_scale
        values = LeafSpec(
            name=self.source[0],
            shape=self.shape,
            axes=self.axes,
            dtype=self.dtype,
            init="normal" if self.init_scale else "constant",
            init_scale=scale,
            expert_size=self.expert_size,
        )
        if self.scheme is None:
            return Dense(values) if self.num_inputs else values
        kind, num_groups = self.scheme.kind, self.scheme.num_groups(self.row_size)
        codes = dataclasses.replace(
            values,
            shape=(*self.shape[:-1], self.shape[-1] // kind.per_byte),
            dtype=kind.dtype,
            init=kind.init,
            init_scale=1.0,
        )
        first_input = len(self.shape) - self.num_inputs
        has_factors = self.scheme.factor_dtype is not None

        def of_groups(num_groups: int, dtype: str, value: float) -> LeafSpec:
            return dataclasses.replace(
                values,
                shape=(*self.shape[:first_input], num_groups),
                axes=self.axes[: first_input + 1],
                dtype=dtype_of(dtype),
                init="constant",
                init_scale=value,
                group_size=self.row_size // num_groups,
            )

        of_scales = functools.partial(of_groups, num_groups, self.scheme.scale_dtype)
        scales = of_scales(1.0 if has_factors else scale / kind.typical)
        zeros = of_scales(kind.mean) if self.scheme.has_zeros else None
        minimums = None
        if self.scheme.has_minimums:
            minimums = of_scales(1.0 if has_factors else kind.mean * scale / kind.typical)
        factors = minimum_factors = None
        if self.scheme.factor_dtype is not None:
            num_factors = self.scheme.num_factors(self.row_size)
            of_factors = functools.partial(of_groups, num_factors, self.scheme.factor_dtype)
            factors = of_factors(scale / kind.typical)
            minimum_factors = of_factors(kind.mean * scale / kind.typical) if self.scheme.has_minimums else None
        parts = Parts(codes, scales, zeros, minimums, factors, minimum_factors)
        order = dataclasses.replace(
            values, shape=(self.row_size,), axes=(None,), dtype=np.dtype(np.int32), init="constant", init_scale=0.0
        )
        return Quantized(parts, self.scheme, jnp.dtype(self.dtype), order if self.scheme.has_order else None)

    def encode(self, values: np.ndarray) -> Weight | np.ndarray:
        """Return the arrays that store a weight of these values, in the structure of `leaves`.

        Raises ValueError for values that the scheme cannot store.
        """
        if self.scheme is None:
            return Dense(values) if self.num_inputs else values
        return self._stored(self.scheme.quantize(values.reshape(-1, self.row_size)))

    def encode_parts(self, sources: Iterable[Parts], order: Int32[np.ndarray, " K"] | None = None) -> Weight:
        """Return the arrays of a weight whose sources are stored as codes already, rows first, by the same scheme.

        If that has an order, `order` says which input each column is.
        """
        columns = zip(*sources, strict=True)
        stored = self._stored(Parts(*(None if column[0] is None else self.arrange(column) for column in columns)))
        if self.scheme is None or not self.scheme.has_order:
            return stored
        assert order is not None
        return dataclasses.replace(stored, order=order)

    def _stored(self, rows: Parts) -> Quantized:
        """Return arrays of [rows, values of a row] in the shapes of `leaves`."""
        leaves = self.leaves
        assert isinstance(leaves, Quantized)
        shaped = jax.tree.map(lambda leaf, part: part.reshape(leaf.shape), leaves.parts, rows)
        return dataclasses.replace(leaves, parts=shaped)


def matrix_spec(
    modules: str | Sequence[str],
    shape: tuple[int, ...],
    axes: tuple[str | None, ...],
    *,
    num_inputs: int = 1,
    num_outputs: Sequence[int] | None = None,
    **options: Any,
) -> ParamSpec:
    """Declare the weight that is composed of the matrices [outputs, inputs] of these modules of a checkpoint.

    `num_outputs` are those of each matrix; by default each has an equal part of the weight's. `options` are further
    fields of ParamSpec.
    """
    modules = (modules,) if isinstance(modules, str) else modules
    end = len(shape) - num_inputs
    if num_outputs is None:
        num_outputs = (math.prod(shape[:end]) // len(modules),) * len(modules)
    return ParamSpec(
        shape=shape,
        axes=axes,
        num_inputs=num_inputs,
        source=tuple(f"{module}.weight" for module in modules),
        source_shapes=tuple((outputs, math.prod(shape[end:])) for outputs in num_outputs),
        **options,
    )


def leaf_specs(specs: Params) -> Params:
    """Return a LeafSpec for each array of the weights that `specs` declare."""
    return jax.tree.map(lambda spec: spec.leaves, specs)


def _as_integers(array: np.ndarray) -> np.ndarray:
    """View an array as integers, which NumPy moves at once, and bfloat16 one by one."""
    return array.view(f"u{array.dtype.itemsize}")


def path_name(path: Any) -> str:
    """Return a path in the tree of weights as text, such as "layers.0.mlp.down"."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
