"""Hugging Face model directories: config.json, and safetensors tensor by tensor from the disk to the devices.

The tensors are checked against the files' headers first, so that a wrong checkpoint fails at once and in one message.
On the host there is never more than the tensors of one weight.
"""

import contextlib
import dataclasses
import json
import logging
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int32
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from jaxserve.config import DTypeName
from jaxserve.errors import CheckpointError
from jaxserve.layers.layouts import layouts, num_bytes
from jaxserve.layers.params import Params, ParamSpec
from jaxserve.layers.weight import Weight
from jaxserve.loading import mxfp4
from jaxserve.loading.classifier import is_classifier
from jaxserve.loading.json_files import read_config, read_object
from jaxserve.loading.model_types import check_model_type
from jaxserve.loading.multimodal import TEXT_OF, without_towers
from jaxserve.loading.pickles import PICKLED_SUFFIXES, why_not_read
from jaxserve.loading.quantization_files import stored_formats
from jaxserve.loading.stored_forms import CutPart, ExpertPart, in_declared_form
from jaxserve.loading.tied_head import INDEX_FILE, SINGLE_FILE, has_own_head, is_embedding, is_head
from jaxserve.loading.unread_tensors import UnreadTensors
from jaxserve.quantization.common import DIFFERENT_ORDERS, common_scheme, converted
from jaxserve.quantization.scheme import Parts, Scheme
from jaxserve.quantization.stored import FLOAT_NAMES, Format, Header, StoredMatrix, join_parts

logger = logging.getLogger(__name__)

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
INTEGER_TYPES = ("I64", "I32")
"""The types of the map of EAGLE-3 heads from their tokens to those of their targets, "d2t"."""
ONE_BYTE_FLOATS = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E8M0": ml_dtypes.float8_e8m0fnu}
"""Types that safetensors do not know as NumPy's."""


@runtime_checkable
class StoredTensor(Protocol):
    """A tensor of a checkpoint, not yet read."""

    def read(self) -> np.ndarray:
        """Its values, in the host's memory."""
        ...


@runtime_checkable
class QuantizedTensor(StoredTensor, Protocol):
    """A matrix that a checkpoint stores as codes; `read` returns the dequantized values."""

    def scheme(self) -> Scheme | str:
        """Return how an engine can hold the codes as they are, or why it cannot."""
        ...

    def read_parts(self) -> Parts:
        """Return its codes and what belongs to them as its scheme has them, with outputs before inputs."""
        ...


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A tensor in an open file, under the name that it has there."""

    file: Any
    name: str
    path: pathlib.Path

    def read(self) -> np.ndarray:
        if (dtype := ONE_BYTE_FLOATS.get(self.header().dtype)) is not None:
            return read_bytes(self.path, self.name).view(dtype)
        return self.file.get_tensor(self.name)

    def read_part(self, index: tuple[int | slice, ...]) -> np.ndarray:
        """Return the values at an index, the first of which is a number, reading no other entry of the first axis."""
        first, *others = index
        if (dtype := ONE_BYTE_FLOATS.get(self.header().dtype)) is not None:
            assert isinstance(first, int)
            return read_bytes(self.path, self.name, first).view(dtype)[tuple(others)]
        return self.file.get_slice(self.name)[index]

    def header(self) -> Header:
        found = self.file.get_slice(self.name)
        return Header(found.get_dtype(), tuple(found.get_shape()), self.read)

    def complaint(self, shape: tuple[int, ...]) -> str | None:
        """Return why this is not a readable tensor of such a shape, or None if it is."""
        dtype, found, _ = self.header()
        if found == shape and dtype in (INTEGER_TYPES if self.name == "d2t" else FLOAT_NAMES):
            return None
        return f"is {dtype} {list(found)} and not a float of {list(shape)}"


@dataclasses.dataclass(frozen=True)
class _Turned:
    """A tensor of matrices that a file has the other way round: outputs before inputs."""

    stored: _Stored | StoredMatrix

    def read(self) -> np.ndarray:
        return self.stored.read().swapaxes(-1, -2)

    def complaint(self, shape: tuple[int, ...]) -> str | None:
        *rest, inputs, outputs = shape
        return self.stored.complaint((*rest, outputs, inputs))


def load_config(path: str | pathlib.Path) -> dict[str, Any]:
    """Return the fields of `path`/config.json; tie_word_embeddings is false if the files have an LM head of their own.

    Raises CheckpointError if there is no such file, or no JSON object in it, and first of all for an unknown model
    type.
    """
    directory = pathlib.Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"no model directory at {directory}")
    fields = read_config(directory / "config.json")
    check_model_type(fields, directory / "config.json")
    stored_formats(directory, fields)
    if is_classifier(fields):  # which has no LM head
        return fields | {"tie_word_embeddings": True}
    is_tied = fields.get("tie_word_embeddings")
    if (is_tied is None or is_tied is True) and has_own_head(directory, is_wrapped=TEXT_OF in fields):
        fields["tie_word_embeddings"] = False
    return fields


def resolve_dtype(requested: DTypeName, fields: dict[str, Any], *, is_cpu: bool) -> np.dtype:
    """Return the dtype of weights, activations and KV.

    "auto" is float32 on CPU, where narrower types are slower, else the checkpoint's (`dtype` in config.json, or
    `torch_dtype` in older ones), else bfloat16. Raises CheckpointError for a dtype that is not supported.
    """
    if requested != "auto":
        return np.dtype(DTYPES[requested])
    if is_cpu:
        return np.dtype(jnp.float32)
    name = fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"
    if not isinstance(name, str) or name not in DTYPES:
        raise CheckpointError(f"config.json: unknown dtype {name!r}; known are {', '.join(DTYPES)}")
    return np.dtype(DTYPES[name])


def load_params(
    path: str | pathlib.Path, specs: Params, *, dtype: np.dtype, mesh: Mesh, progress: bool = True
) -> Params:
    """Load the weights that `specs` declare from the directory `path`, cast to `dtype` and laid out over `mesh`.

    `progress` draws a bar of the bytes that have reached the devices. Raises CheckpointError, naming all of them, if
    files are missing or truncated, or tensors missing, unexpected, of another shape or not floats of 16 or 32 bits, and
    ConfigError if a weight does not divide over the mesh; then no device memory has been allocated.
    """
    layout = layouts(specs, mesh)
    with open_weights(path, specs) as weights:
        return read_to_devices(weights, layout, dtype=dtype, progress=progress)


@contextlib.contextmanager
def open_weights(path: str | pathlib.Path, specs: Params) -> Iterator[Params]:
    """Yield a SourceWeight for each of `specs`; they can be read until the context ends. Raises CheckpointError as
    `load_params` does.
    """
    directory = pathlib.Path(path)
    with contextlib.ExitStack() as stack:
        expected = source_shapes(specs)
        opened = _open_tensors(directory, expected, stack)
        tensors = _with_embedding(_with_model_prefix(opened.tensors, expected), expected)
        tensors = in_declared_form(_with_inputs_first(tensors, specs), expected, _formats(directory))
        _check(directory, expected, tensors, opened)
        yield jax.tree.map(lambda spec: SourceWeight(spec, tensors), specs)


@contextlib.contextmanager
def named_tensors(path: str | pathlib.Path, specs: Params) -> Iterator[Mapping[str, StoredTensor]]:
    """Yield all tensors of a checkpoint, under the names that `specs` have for them; nothing is checked."""
    with contextlib.ExitStack() as stack:
        expected = source_shapes(specs)
        yield _with_model_prefix(_open_tensors(pathlib.Path(path), expected, stack).tensors, expected)


def is_quantized(path: str | pathlib.Path) -> bool:
    """Report whether a directory's config says that some of its matrices are stored as codes."""
    directory = pathlib.Path(path)
    return bool(_formats(directory)) or bool(read_config(directory / "config.json").get("quantization_config"))


@dataclasses.dataclass(frozen=True)
class SourceWeight:
    """A weight that is composed of its tensors in a checkpoint on demand."""

    spec: ParamSpec
    tensors: Mapping[str, StoredTensor]

    def read(self, dtype: np.dtype) -> Weight | np.ndarray:
        """Return the arrays that store it, in the structure of `spec.leaves`, where other weights have `dtype`.

        Sources are read one by one, and cast before they are put together, which only moves values.
        """
        if self.spec.scheme is not None and self.spec.scheme.stored == self.stored_scheme():
            order = self._order() if self.spec.scheme.has_order else None
            return self.spec.encode_parts(self.read_source_parts(self.spec.scheme.stored), order)
        dtype = self.spec.dtype_in(dtype)
        sources = (source.astype(dtype, copy=False) for source in self.read_sources(dtype))
        values = self.spec.assemble(sources).astype(dtype, copy=False)
        try:
            return self.spec.encode(values)
        except ValueError as error:
            raise CheckpointError(f"{', '.join(self.spec.source)}: {error}") from error

    def stored_scheme(self) -> Scheme | str | None:
        """Return how the codes of all sources can be held as one weight, or why they cannot; None for floats."""
        schemes = self.source_schemes()
        if not any(schemes):
            return None
        if self.spec.is_absorbed:
            return "the layer computes with its values"
        found: list[Scheme] = []
        for scheme in schemes:
            if not isinstance(scheme, Scheme):
                return scheme or "parts of it are floats"
            found.append(scheme)
        common = common_scheme(found, self.spec.row_size)
        if isinstance(common, Scheme) and common.has_order:
            if self.spec.expert_size is not None:
                return "each expert has its inputs in an order of its own (act-order)"
            if self._order() is None:
                return DIFFERENT_ORDERS
        if isinstance(common, str) or common == common.fitted(self.spec.shape, self.spec.num_inputs):
            return common
        return f"{common} does not fit {list(self.spec.shape)}"

    def _order(self) -> Int32[np.ndarray, " K"] | None:
        """Return the input permutation shared by all sources, or None if they have none or differ."""
        tensors = [self.tensors[name] for name in self.spec.source]
        orders = [tensor.order() if isinstance(tensor, StoredMatrix) else None for tensor in tensors]
        first = orders[0]
        if first is None or any(order is None or not np.array_equal(order, first) for order in orders):
            return None
        return first

    def source_schemes(self) -> list[Scheme | str | None]:
        """Return the scheme of each source, why it has none, or None if it is of floats."""
        tensors = [self.tensors[name] for name in self.spec.source]
        return [tensor.scheme() if isinstance(tensor, QuantizedTensor) else None for tensor in tensors]

    def read_source_parts(self, common: Scheme) -> Iterator[Parts]:
        """Read the codes of each source, in order, as a scheme stores them that all of theirs are converted to."""
        for name in self.spec.source:
            tensor = self.tensors[name]
            assert isinstance(tensor, QuantizedTensor)
            scheme, parts = tensor.scheme(), tensor.read_parts()
            assert isinstance(scheme, Scheme)
            yield converted(parts, scheme, common, self.spec.row_size)

    def read_sources(self, dtype: np.dtype) -> Iterator[np.ndarray]:  # noqa: ARG002 (for sources that are made of others)
        """Read the tensors of the spec's `source`, in order; those that have to be computed may be in `dtype`."""
        tensors = (self.tensors[name] for name in self.spec.source)
        is_exact = self.spec.is_exact
        return (
            tensor.read_in_float32() if is_exact and isinstance(tensor, StoredMatrix) else tensor.read()
            for tensor in tensors
        )


def read_to_devices(weights: Params, layout: Params, *, dtype: np.dtype, progress: bool) -> Params:
    """Read the arrays of `weights` one by one, each onto its devices before the next is read. `layout` has a Layout for
    each array.
    """

    def load(weight: SourceWeight, layout: Any) -> Any:
        arrays = weight.read(dtype)
        loaded = jax.tree.map(lambda values, layout: layout.put(values), arrays, layout)
        jax.block_until_ready(loaded)  # a pending transfer would keep its tensors on the host
        bar.update(sum(values.nbytes for values in jax.tree.leaves(arrays)))
        return loaded

    specs = jax.tree.map(lambda weight: weight.spec, weights)
    with bar_of_bytes("loading weights", specs, dtype=dtype, is_shown=progress) as bar:
        return jax.tree.map(load, weights, layout)


def bar_of_bytes(description: str, specs: Params, *, dtype: np.dtype, is_shown: bool) -> tqdm:
    """Return a progress bar of the weights' bytes."""
    total = num_bytes(specs, dtype=dtype)
    return tqdm(total=total, desc=description, unit="B", unit_scale=True, unit_divisor=1024, disable=not is_shown)


type _Tensor = _Stored | _Turned | mxfp4.Mxfp4Tensor | StoredMatrix | CutPart | ExpertPart


@dataclasses.dataclass(frozen=True)
class _Opened:
    """The tensors of a directory, each in its open file; what is wrong with files; and the tensors lost with them."""

    tensors: dict[str, _Tensor]
    problems: list[str]
    lost: Set[str]


def _open_tensors(directory: pathlib.Path, expected: Iterable[str], stack: contextlib.ExitStack) -> _Opened:
    """Open every file of the checkpoint; `stack` closes them. A single file is to hold all that is `expected`."""
    if (directory / SINGLE_FILE).is_file():
        shard_of = dict.fromkeys(expected, SINGLE_FILE)
    elif (directory / INDEX_FILE).is_file():
        shard_of = read_object(directory / INDEX_FILE).get("weight_map") or {}
        if not isinstance(shard_of, dict) or not shard_of or not all(map(_is_file_name, shard_of.values())):
            raise CheckpointError(f"{directory}/{INDEX_FILE} has no weight_map of tensors to files")
    else:
        raise CheckpointError(_without_safetensors(directory))
    tensors: dict[str, _Stored] = {}
    unreadable: dict[str, str] = {}
    twice: set[str] = set()
    for name in sorted(set(shard_of.values())):
        try:
            file = stack.enter_context(safe_open(directory / name, framework="numpy"))
        except (OSError, SafetensorError) as error:
            unreadable[name] = f"{name} ({_describe_failure(directory / name, error)})"
            continue
        found = {tensor: _Stored(file, tensor, directory / name) for tensor in file.keys()}  # noqa: SIM118 (no dictionary)
        twice |= tensors.keys() & found.keys()
        tensors |= found
    problems = [f"cannot read {', '.join(unreadable.values())}"] if unreadable else []
    if twice:
        problems.append(f"in several files: {', '.join(sorted(twice))}")
    lost = {tensor for tensor, file in shard_of.items() if file in unreadable}
    fields = _fields(directory)
    # Quantizers name modules as they are stored.
    joined = join_parts(mxfp4.join_pairs(tensors), _formats(directory))
    if TEXT_OF not in fields:
        return _Opened(joined, problems, lost)
    joined, left = without_towers(joined)
    if left:
        parts = ", ".join(f"{count} of {part}" for part, count in sorted(left.items()))
        logger.info("%s is served for text only; tensors left out: %s", fields[TEXT_OF], parts)
    return _Opened(joined, problems, without_towers(dict.fromkeys(lost))[0].keys())


def _fields(directory: pathlib.Path) -> dict[str, Any]:
    path = directory / "config.json"
    return read_config(path) if path.is_file() else {}


def _formats(directory: pathlib.Path) -> tuple[Format, ...]:
    fields = _fields(directory)
    return stored_formats(directory, fields) if fields else ()


def read_bytes(path: pathlib.Path, name: str, index: int | None = None) -> np.ndarray:
    """Return a tensor of one byte a value, as uint8, or one entry along its first axis, from a file that safetensors
    have opened before.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entry = json.loads(file.read(length))[name]
        start, end = entry["data_offsets"]
        shape = entry["shape"]
        if index is not None:
            first, *shape = shape
            size = (end - start) // first
            start, end = start + index * size, start + (index + 1) * size
        file.seek(8 + length + start)
        return np.frombuffer(file.read(end - start), np.uint8).reshape(shape)


def _describe_failure(path: pathlib.Path, error: Exception) -> str:
    reason = str(error).splitlines()[0]
    if not path.is_file():
        return "no such file"
    return f"truncated or damaged: {reason}" if isinstance(error, SafetensorError) else reason


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and pathlib.PurePath(value).name == value


def _without_safetensors(directory: pathlib.Path) -> str:
    """Why a directory without safetensors is not read."""
    pickled = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLED_SUFFIXES)
    if not pickled:
        return f"neither {SINGLE_FILE} nor {INDEX_FILE} in {directory}"
    shown = pickled[0] if len(pickled) == 1 else f"{pickled[0]} and {len(pickled) - 1} more"
    return f"{directory} has pickled weights only ({shown}), {why_not_read(str(directory))}"


def _with_model_prefix[T](tensors: dict[str, T], expected: Mapping[str, tuple[int, ...]]) -> dict[str, T]:
    """Return the tensors by their names in the model with its head.

    Checkpoints of the model without it (such as GPT-2's first ones) omit its name: "h.0.ln_1" for
    "transformer.h.0.ln_1".
    """
    prefixes = {name.partition(".")[0] for name in expected}
    full = {f"{prefix}.{name}": name for prefix in prefixes for name in tensors.keys() - expected.keys()}
    added = {name: short for name, short in full.items() if name in expected and name not in tensors}
    return {name: tensors[name] for name in tensors.keys() - added.values()} | {
        name: tensors[short] for name, short in added.items()
    }


def _with_embedding[T](tensors: dict[str, T], expected: Mapping[str, tuple[int, ...]]) -> dict[str, T]:
    """Return the tensors, with the LM head as the embedding too if that is missing and the model has no other head."""
    head = next(filter(is_head, tensors), None)
    embedding = next(filter(is_embedding, expected), None)
    if head is None or embedding is None or embedding in tensors or any(map(is_head, expected)):
        return tensors
    return tensors | {embedding: tensors[head]}


def _with_inputs_first(tensors: dict[str, Any], specs: Params) -> dict[str, Any]:
    """Return the tensors, turned where a weight has inputs before outputs and they do not: matrices of codes never do.
    Of tensors of all experts transformers writes either order, and reads them by their shapes; where such a shape is a
    square, the block's other tensor decides.
    """
    inputs_first = [spec for spec in jax.tree.leaves(specs) if spec.is_transposed]
    names = [name for spec in inputs_first for name in spec.source]
    codes = {name: _Turned(each) for name in names if isinstance(each := tensors.get(name), StoredMatrix)}
    shapes = {
        name: shape
        for spec in inputs_first
        if spec.expert_size is not None
        for name, shape in zip(spec.source, spec.source_shapes, strict=True)
    }
    stored = {name: each for name in shapes if isinstance(each := tensors.get(name), _Stored)}
    turned = {name: turn for name, each in stored.items() if (turn := _Turned(each)).complaint(shapes[name]) is None}
    blocks = {name.rpartition(".")[0] for name in turned if stored[name].complaint(shapes[name]) is not None}
    return tensors | codes | {name: turn for name, turn in turned.items() if name.rpartition(".")[0] in blocks}


def _check(
    directory: pathlib.Path,
    expected: Mapping[str, tuple[int, ...]],
    tensors: dict[str, _Tensor],
    opened: _Opened,
) -> None:
    """Raise CheckpointError with everything that is wrong; a tensor lost with its file is not reported as missing
    too.
    """
    found = tensors.keys() | _with_model_prefix(dict.fromkeys(opened.lost), expected).keys()
    missing = [name for name in expected if name not in found]
    unread = UnreadTensors(_fields(directory))
    left_over = [name for name in tensors if name not in expected]
    unexpected = [name for name in left_over if not unread.has(name) and not _is_bias_of_zeros(name, tensors)]
    unread.log(left_over)
    complaints = {name: tensors[name].complaint(expected[name]) for name in expected.keys() & tensors.keys()}
    mismatched = [f"{name} {complaint}" for name, complaint in complaints.items() if complaint]
    problems = opened.problems + describe_tensors(missing=missing, unexpected=unexpected, wrong=mismatched)
    if problems:
        raise CheckpointError(f"{directory} does not fit its config.json; " + "; ".join(problems))


def _is_bias_of_zeros(name: str, tensors: Mapping[str, StoredTensor]) -> bool:
    """Return true if this is a bias of zeros that GPTQ's packages write for every matrix, whether the model has it or
    not.
    """
    module, _, leaf = name.rpartition(".")
    is_quantized = isinstance(tensors.get(f"{module}.weight"), StoredMatrix)
    return leaf == "bias" and is_quantized and not tensors[name].read().any()


def source_shapes(specs: Params) -> dict[str, tuple[int, ...]]:
    """Every tensor that `specs` are made of, and its shape."""
    return {
        name: shape
        for spec in jax.tree.leaves(specs)
        for name, shape in zip(spec.source, spec.source_shapes, strict=True)
    }


def describe_tensors(*, missing: list[str], unexpected: list[str], wrong: list[str]) -> list[str]:
    """Return a complaint for each kind of wrong tensors, naming all of them; empty if there are none."""
    kinds = (("missing", missing), ("unexpected", unexpected), ("wrong", wrong))
    problems = [f"{kind}: {', '.join(sorted(names))}" for kind, names in kinds if names]
    return [f"tensors {problems[0]}", *problems[1:]] if problems else []
