"""Stores made by `jaxserve convert`: weights in the models' own layout, read from mapped files onto any mesh.

A store is a complete model directory: config.json, the tokenizer, weights/ (an Orbax checkpoint), and a manifest of
what it was made from, see `store_manifest`.

Orbax writes a weight as one uncompressed chunk of Zarr, which is a file of its bytes. These files are mapped, which
avoids the seconds and the copies that Orbax needs; each device reads only its shard of a weight.
"""

import collections
import contextlib
import dataclasses
import importlib.metadata
import json
import logging
import math
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from jax.sharding import Mesh

from jaxserve.errors import CheckpointError
from jaxserve.layers.layouts import Layout, layouts, put, schemes_of, with_schemes
from jaxserve.layers.params import LeafSpec, Params, ParamSpec, leaf_specs, path_name
from jaxserve.layers.quantized import Quantized
from jaxserve.loading.huggingface import SourceWeight, bar_of_bytes
from jaxserve.loading.store_manifest import (
    FORMAT_VERSION,
    MANIFEST,
    WEIGHTS,
    Manifest,
    Source,
    StoredArray,
    file_of,
    file_sizes,
    is_store,
    problems,
    read_manifest,
)
from jaxserve.quantization.common import values_of
from jaxserve.quantization.scheme import Parts


def load_store(
    directory: str | pathlib.Path, specs: Params, *, dtype: np.dtype, mesh: Mesh, progress: bool = True
) -> Params:
    """Load the weights that `specs` declare, cast to `dtype` and sharded over `mesh`; each device reads its own shards
    only. Codes are dequantized on the host where `specs` declare values.

    `progress` shows a bar of the bytes that have reached the devices. Raises CheckpointError, naming everything that is
    wrong, if the store is damaged or was made for another config, and ConfigError if a weight does not divide over the
    mesh; no device memory has been touched then.
    """
    directory = pathlib.Path(directory)
    layout = layouts(specs, mesh)
    manifest = read_manifest(directory)
    held = schemes_of(specs)
    stored_as = with_schemes(specs, manifest.schemes, dtype=dtype)
    if found := problems(directory, manifest, _flat(leaf_specs(stored_as))):
        raise CheckpointError(f"{directory} is no intact store for its config.json; " + "; ".join(found))

    def opened(name: str, leaf: LeafSpec) -> np.ndarray:
        return np.memmap(
            directory / WEIGHTS / file_of(name, leaf.shape),
            dtype=jnp.dtype(manifest.arrays[name].dtype),
            mode="r",
            shape=leaf.shape,
        )

    def load(path: Any, leaf: LeafSpec, layout: Layout) -> jax.Array:
        stored, served = opened(path_name(path), leaf), leaf.dtype_in(dtype)
        shards = [
            jax.device_put(_shard(layout.shard(stored, index), served, device), device)
            for device, index in layout.sharding.addressable_devices_indices_map(layout.shape).items()
            if index is not None
        ]
        array = jax.make_array_from_single_device_arrays(layout.shape, layout.sharding, shards)
        array.block_until_ready()  # arrays in transfer would stay in host memory
        bar.update(stored.size * served.itemsize)
        return array

    def load_weight(path: Any, spec: ParamSpec, stored: ParamSpec, layout: Any) -> Any:
        if stored.scheme is None or path_name(path) in held:
            return jax.tree_util.tree_map_with_path(
                lambda more, *leaf: load((*path, *more), *leaf), spec.leaves, layout
            )
        values = _dequantized(stored, path, opened).astype(spec.dtype_in(dtype))
        bar.update(values.nbytes)
        return put(spec, layout, values)

    with bar_of_bytes("loading weights", specs, dtype=dtype, is_shown=progress) as bar:
        return jax.tree_util.tree_map_with_path(load_weight, specs, stored_as, layout)


def _dequantized(spec: ParamSpec, path: Any, opened: Callable[[str, LeafSpec], np.ndarray]) -> np.ndarray:
    """Return the values of a weight that is stored as codes, in float32."""
    leaves = spec.leaves
    assert isinstance(leaves, Quantized)

    def rows(name: str, leaf: LeafSpec | None) -> np.ndarray | None:
        return None if leaf is None else opened(name, leaf).reshape(-1, math.prod(leaf.shape[outputs:]))

    outputs, name = len(spec.shape) - spec.num_inputs, path_name(path)
    arrays = leaves.parts._asdict().items()
    found = Parts(**{part: rows(f"{name}.parts.{part}", leaf) for part, leaf in arrays})
    values = values_of(leaves.scheme, found)
    if leaves.order is not None:
        values = values[:, np.argsort(opened(f"{name}.order", leaves.order))]
    return values.reshape(spec.shape)


def write_store(
    destination: str | pathlib.Path,
    weights: Params,
    *,
    dtype: np.dtype,
    config: dict[str, Any],
    source: Source,
    copied: Mapping[str, pathlib.Path],
    force: bool = False,
    progress: bool = True,
) -> Manifest:
    """Write a store of `weights`, a tree of SourceWeight, as `dtype`, with the files `copied`, by the names that they
    get there, and a config.json with the fields `config`.

    Each weight is released before the next is read; `progress` shows a bar of the bytes written. Everything is written
    next to `destination` and renamed when complete. Raises CheckpointError if `destination` exists; `force` replaces it
    if it is a store or empty.
    """
    destination = pathlib.Path(destination).absolute()
    check_destination(destination, force=force)
    config = {name: value for name, value in config.items() if name != "torch_dtype"} | {"dtype": str(dtype)}
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        folder = pathlib.Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
        try:
            new = folder / "new"
            new.mkdir()
            for name, path in copied.items():
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, new / name)
            (new / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            specs = jax.tree.map(lambda weight: weight.spec, weights)
            _write_weights(new / WEIGHTS, weights, dtype, progress)
            manifest = Manifest(
                format_version=FORMAT_VERSION,
                model_type=config["model_type"],
                dtype=str(dtype),
                source=source,
                versions={name: importlib.metadata.version(name) for name in ("jaxserve", "jax", "orbax-checkpoint")},
                config=config,
                arrays={
                    name: StoredArray(shape=leaf.shape, dtype=str(leaf.dtype_in(dtype)))
                    for name, leaf in _flat(leaf_specs(specs)).items()
                },
                schemes=schemes_of(specs),
                file_sizes=file_sizes(new / WEIGHTS),
            )
            text = msgspec.json.format(msgspec.json.encode(manifest), indent=2)
            (new / MANIFEST).write_bytes(text + b"\n")
            if destination.exists():
                destination.rename(folder / "old")
            new.rename(destination)
        finally:
            if (folder / "old").exists() and not destination.exists():
                (folder / "old").rename(destination)
            shutil.rmtree(folder)
    except OSError as error:
        raise CheckpointError(f"cannot write {destination}: {error}") from error
    return manifest


def check_destination(destination: str | pathlib.Path, *, force: bool) -> None:
    """Raise CheckpointError if a store must not be written to this path."""
    path = pathlib.Path(destination)
    if not path.exists() and not path.is_symlink():
        return
    if path.is_symlink() or not path.is_dir() or (any(path.iterdir()) and not is_store(path)):
        raise CheckpointError(f"{path} exists already and is no store of jaxserve, so it is not replaced: remove it")
    if not force:
        raise CheckpointError(f"{path} exists already: --force replaces it")


@dataclasses.dataclass(frozen=True, eq=False)
class _Unread:
    """One array of a weight that has not been read yet, by its index within the weight."""

    weight: SourceWeight
    index: int


def _unread(weight: SourceWeight) -> Any:
    """Return the arrays of a weight before it is read, in the structure of its leaves."""
    leaves, tree = jax.tree.flatten(weight.spec.leaves)
    return tree.unflatten([_Unread(weight, index) for index in range(len(leaves))])


def _write_weights(path: pathlib.Path, weights: Params, dtype: np.dtype, progress: bool) -> None:
    """Write one uncompressed file per array: weights hardly shrink, and decompressing is slower than reading.

    Orbax writes the metadata. If it were given the arrays, it would hold all of them at once.
    """
    import orbax.checkpoint as ocp  # takes a second to import

    specs = jax.tree.map(lambda weight: weight.spec, weights)
    bar = bar_of_bytes("writing weights", specs, dtype=dtype, is_shown=progress)

    class Handler(ocp.type_handlers.NumpyHandler):
        async def serialize(self, values: Any, infos: Any, args: Any = None) -> list[Any]:  # noqa: ARG002 (Orbax's)
            of_weights = collections.defaultdict(list)
            for value, info in zip(values, infos, strict=True):
                of_weights[id(value.weight)].append((value, pathlib.Path(info.parent_dir) / info.name))
            for unread in of_weights.values():
                arrays = jax.tree.leaves(unread[0][0].weight.read(dtype))
                for value, folder in unread:
                    _write_array(folder, arrays[value.index])
                    bar.update(arrays[value.index].nbytes)
            return []

    registry = ocp.type_handlers.create_type_handler_registry((_Unread, Handler()))
    with bar, _quiet():
        handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_compression=False, type_handler_registry=registry)
        with ocp.Checkpointer(handler) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(jax.tree.map(_unread, weights)))


def _write_array(folder: pathlib.Path, array: np.ndarray) -> None:
    """Write an array in Zarr's format 2, as one chunk of its bytes."""
    shape = list(array.shape)
    header = {
        "zarr_format": 2,
        "shape": shape,
        "chunks": shape,
        "dtype": array.dtype.name if array.dtype.kind == "V" else array.dtype.str,
        "order": "C",
        "compressor": None,
        "filters": None,
        "fill_value": None,
        "dimension_separator": ".",
    }
    folder.mkdir(parents=True)
    (folder / ".zarray").write_text(json.dumps(header), encoding="utf-8")
    # NumPy copies integers in bulk, but bfloat16 one by one. Its `tofile` does not report a disk that is full at the
    # last block.
    values = np.ascontiguousarray(array.view(f"u{array.dtype.itemsize}"))
    (folder.parent / file_of(folder.name, array.shape)).write_bytes(values.data)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Orbax's warnings, which do not concern a single process that stores each weight on its own."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _shard(mapped: np.ndarray, dtype: np.dtype, device: Any) -> np.ndarray:
    """Return a device's shard: the mapped file itself or, for a CPU, a copy that does not depend on that file."""
    if device.platform != "cpu" and mapped.dtype == dtype:
        return np.asarray(mapped)
    return _copy(mapped, dtype)


def _copy(mapped: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Copy an array into memory, cast to `dtype`.

    The copy is aligned to 64 bytes, as XLA requires to use an array on a CPU without copying it again.
    """
    size = mapped.size * dtype.itemsize
    memory = np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + size].view(dtype).reshape(mapped.shape)
    if mapped.dtype == dtype:  # NumPy copies integers in bulk, but bfloat16 one by one
        bits = f"u{dtype.itemsize}"
        copy.view(bits)[...] = mapped.view(bits)
    else:
        copy[...] = mapped
    return copy


def _flat(tree: Params) -> dict[str, Any]:
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
