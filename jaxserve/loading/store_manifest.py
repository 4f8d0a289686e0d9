"""The manifest of a store: what it holds, what it was made from, and how files are found to differ from that.

It reveals a damaged store before a device is touched.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any, get_args

import msgspec
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.layers.params import LeafSpec
from jaxserve.loading.huggingface import DTYPES
from jaxserve.quantization.scheme import KINDS, ScaleName, Scheme

MANIFEST = "jaxserve_manifest.json"
FORMAT_VERSION = 2

STORED_TYPES = {*DTYPES, "int32", *(str(kind.dtype) for kind in KINDS.values()), *map(str, get_args(ScaleName))}

WEIGHTS = "weights"
"""The folder of a store that has its arrays."""

# Fields of config.json that may be edited in a store: the layout of weights does not depend on them.
_FREE_FIELDS = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "max_position_embeddings",
    "pad_token_id",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


class Source(msgspec.Struct, kw_only=True, frozen=True):
    """The origin of a store: the name of its directory, and the SHA-256 of each file of weights there."""

    name: str
    sha256: dict[str, str]


class StoredArray(msgspec.Struct, kw_only=True, frozen=True):
    """Shape and dtype of a stored array, of which a weight has one or several."""

    shape: tuple[int, ...]
    dtype: str


class Manifest(msgspec.Struct, kw_only=True, frozen=True):
    """The contents and origin of a store.

    `file_sizes` are bytes of the files under weights/; `schemes` describe the weights that are not stored as their
    values.
    """

    format_version: int
    model_type: str
    dtype: str
    source: Source
    versions: dict[str, str]
    config: dict[str, Any]
    arrays: dict[str, StoredArray]
    schemes: dict[str, Scheme]
    file_sizes: dict[str, int]


class _Version(msgspec.Struct):
    format_version: int


def is_store(directory: str | pathlib.Path) -> bool:
    """Return true if this is a directory that `write_store` made."""
    return (pathlib.Path(directory) / MANIFEST).is_file()


def read_manifest(directory: str | pathlib.Path) -> Manifest:
    """Read a manifest. Raises CheckpointError if it cannot be read, or has an unsupported version."""
    path = pathlib.Path(directory) / MANIFEST
    try:
        text = path.read_bytes()
        version = msgspec.json.decode(text, type=_Version).format_version
        if version != FORMAT_VERSION:
            raise CheckpointError(
                f"{path}: format_version is {version}, this jaxserve reads {FORMAT_VERSION}: convert the original again"
            )
        return msgspec.json.decode(text, type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def problems(directory: pathlib.Path, manifest: Manifest, leaves: Mapping[str, LeafSpec]) -> list[str]:
    """Return what is wrong with a store whose arrays are to be read as these leaves: nothing if it is intact."""
    return [
        *_config_problems(directory, manifest),
        *_array_problems(manifest, leaves),
        *_file_problems(directory / WEIGHTS, manifest),
    ]


def file_of(name: str, shape: tuple[int, ...]) -> str:
    """Return the path of an array's only chunk in Zarr."""
    return f"{name}/{'.'.join('0' * len(shape))}"


def file_sizes(folder: pathlib.Path) -> dict[str, int]:
    """Return the bytes of each file below a folder, by its path there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _config_problems(directory: pathlib.Path, manifest: Manifest) -> list[str]:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [f"config.json cannot be read ({error})"]
    names = (config.keys() | manifest.config.keys()) - _FREE_FIELDS
    changed = sorted(name for name in names if config.get(name) != manifest.config.get(name))
    return [f"changed since in config.json: {', '.join(changed)}"] if changed else []


def _array_problems(manifest: Manifest, leaves: Mapping[str, LeafSpec]) -> list[str]:
    stored = manifest.arrays
    wrong = [
        f"{name} is {stored[name].dtype} {list(stored[name].shape)} and not {_wanted(leaf)} of {list(leaf.shape)}"
        for name, leaf in leaves.items()
        if name in stored and (stored[name].shape != leaf.shape or not _is_readable(stored[name].dtype, leaf))
    ]
    return _listed(
        {
            "missing weights": sorted(leaves.keys() - stored.keys()),
            "unexpected weights": sorted(stored.keys() - leaves.keys()),
            "wrong weights": sorted(wrong),
        }
    )


def _is_readable(dtype: str, leaf: LeafSpec) -> bool:
    """Return true if an array of this dtype can be read as this leaf: floats are cast, others must match exactly."""
    return dtype == str(leaf.dtype) if _is_exact(leaf) else dtype in DTYPES


def _wanted(leaf: LeafSpec) -> str:
    return str(leaf.dtype) if _is_exact(leaf) else "a float"


def _is_exact(leaf: LeafSpec) -> bool:
    """Report whether an array is of codes, of scales of a byte each, or of indices."""
    return leaf.dtype is not None and (np.dtype(leaf.dtype).itemsize == 1 or np.dtype(leaf.dtype).kind == "i")


def _file_problems(folder: pathlib.Path, manifest: Manifest) -> list[str]:
    found = file_sizes(folder)
    resized = [
        f"{name} has {found[name]} bytes and not {size}"
        for name, size in manifest.file_sizes.items()
        if name in found and found[name] != size
    ]
    # An edited manifest may differ from the files.
    unlike = [
        name
        for name, array in manifest.arrays.items()
        if array.dtype in STORED_TYPES and not _is_plain(folder, name, array, found)
    ]
    return _listed(
        {
            "missing files": [name for name in manifest.file_sizes if name not in found],
            "truncated or changed files": resized,
            "not stored as one plain array": unlike,
        }
    )


def _is_plain(folder: pathlib.Path, name: str, array: StoredArray, found: Mapping[str, int]) -> bool:
    """Return true if the file of an array consists of nothing but its bytes, or if one of its two files is missing."""
    file, header = file_of(name, array.shape), f"{name}/.zarray"
    if file not in found or header not in found:
        return True
    try:
        fields = json.loads((folder / header).read_text(encoding="utf-8"))
        stored_as = {name: fields[name] for name in ("shape", "chunks", "compressor", "filters", "order")}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    shape = list(array.shape)
    plain = {"shape": shape, "chunks": shape, "compressor": None, "filters": None, "order": "C"}
    return stored_as == plain


def _listed(kinds: Mapping[str, list[str]]) -> list[str]:
    return [f"{kind}: {', '.join(names)}" for kind, names in kinds.items() if names]
