"""Read GGUF files, llama.cpp's format, whole or in parts: the metadata, and each tensor on demand. No jax.

Versions 2 and 3, little-endian (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md). The reader of the `gguf`
package takes seconds for a vocabulary of 150,000 tokens, and the vocabulary is read by each process that needs it.
"""

import dataclasses
import math
import mmap
import pathlib
import re
import struct
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.loading.dequantization import QUANTIZED_TYPES, block_type, block_types, dequantize, split
from jaxserve.quantization.ggml import SCHEMES
from jaxserve.quantization.scheme import Parts, Scheme

FLOAT_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Codes of `struct` for the format's value types; the two others are 8, a string, and 9, an array."""
STRING, ARRAY = 8, 9
MAX_DIMENSIONS = 4

_TRUNCATED = "it ends within its header: it is truncated"
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")


@dataclasses.dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a mapped file: its `shape` in NumPy's order, what ggml calls its type, where its bytes begin."""

    file: mmap.mmap
    shape: tuple[int, ...]
    kind: str
    offset: int

    def complaint(self, shape: tuple[int, ...]) -> str | None:
        """Return why this is not a readable tensor of such a shape, or None if it is."""
        if self.kind not in (*FLOAT_TYPES, *QUANTIZED_TYPES):
            return f"is {self.kind}, known are {', '.join((*FLOAT_TYPES, *QUANTIZED_TYPES))}"
        if self.shape != shape:
            return f"is {self.kind} {list(self.shape)} and not {list(shape)}"
        block = block_type(self.kind).num_values
        if self.shape[-1] % block:
            return f"is {self.kind} {list(self.shape)}, whose rows are no whole blocks of {block}"
        return None

    @property
    def end(self) -> int:
        """The offset after its last byte."""
        return self.offset + self._num_bytes

    def read(self) -> np.ndarray:
        """Return a copy: floats as they are stored, quantized values as float32."""
        stored = np.frombuffer(self.file, np.uint8, self._num_bytes, self.offset)
        if self.kind in FLOAT_TYPES:
            return stored.view(FLOAT_TYPES[self.kind]).reshape(self.shape).copy()
        return dequantize(stored, self.kind).reshape(self.shape)

    def scheme(self) -> Scheme | str | None:
        """Return how an engine can hold its blocks as codes, or why it cannot; None for floats."""
        if self.kind in FLOAT_TYPES:
            return None
        return SCHEMES.get(self.kind, f"no codes are held of {self.kind}")

    def read_parts(self) -> Parts:
        """Return the arrays that `scheme` stores the tensor as, a row for each of its rows."""
        stored = np.frombuffer(self.file, np.uint8, self._num_bytes, self.offset)
        parts = split(stored, self.kind)
        return Parts(*(None if part is None else part.reshape(*self.shape[:-1], -1) for part in parts))

    @property
    def _num_bytes(self) -> int:
        _, values, size = block_type(self.kind)
        return math.prod(self.shape) // values * size


class GGUFFile:
    """A model in mapped GGUF files, usually one: llama-gguf-split splits it into NAME-00001-of-00003.gguf and so on.

    Attributes:
        metadata: every key of the first file with its value; arrays are lists.
        tensors: every tensor by its name.
        problems: what is wrong with the other files; their tensors may be missing.
    """

    def __init__(self, path: str | pathlib.Path):
        """Open a file, and all others of its model. Raises CheckpointError if the first of them cannot be read."""
        self.path = pathlib.Path(path)
        named = _PART.fullmatch(self.path.name)
        names = [self.path.name] if named is None else _part_names(named[1], int(named[2]))
        first = _Header(self.path.with_name(names[0]))
        self.metadata, self.tensors = first.metadata, dict(first.tensors)
        self.problems: list[str] = []
        self.paths = [first.path]
        count = self.require("split.count", int) if "split.count" in self.metadata else 1
        if count < 2:
            return
        if count != len(names):
            raise CheckpointError(
                f"{first.path} is one of {count} files, which must be called NAME-00001-of-{count:05}.gguf"
            )
        for number, name in enumerate(names[1:], 1):
            try:
                part = _Header(self.path.with_name(name))
            except CheckpointError as error:
                self.problems.append(str(error))
                continue
            if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (number, count):
                self.problems.append(f"{name} is not part {number + 1} of {count}")
            elif twice := sorted(self.tensors.keys() & part.tensors.keys()):
                self.problems.append(f"in several files: {', '.join(twice)}")
            self.tensors |= part.tensors
            self.paths.append(part.path)

    @property
    def architecture(self) -> str:
        """The name of the family in llama.cpp."""
        return self.require("general.architecture", str)

    def require(self, key: str, kind: type) -> Any:
        """Return the value of a key. Raises CheckpointError if it is missing or of another type."""
        value = self.metadata.get(key)
        if not isinstance(value, kind):
            raise CheckpointError(f"{self.path}: {key} must be of type {kind.__name__}, got {value!r:.100}")
        return value


def _part_names(name: str, count: int) -> list[str]:
    return [f"{name}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]


class _Header:
    """The metadata and the tensors of one file. Raises CheckpointError if it is not a GGUF file, damaged or
    truncated.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        try:
            if path.stat().st_size == 0:
                raise ValueError("it is empty, no GGUF file")
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._position = 0
            self._read()
        except struct.error as error:
            raise CheckpointError(f"cannot read {path}: {_TRUNCATED}") from error
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
        except ValueError as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error

    def _read(self) -> None:
        if self._map[:4] != b"GGUF":
            raise ValueError(f"it is no GGUF file: it begins with {self._map[:4]!r}")
        self._position = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ValueError(f"version {version} of the format, known are 2 and 3, little-endian")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        table = [self._tensor() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-self._position // alignment) * alignment
        self.tensors = {name: GGUFTensor(self._map, shape, kind, start + offset) for name, shape, kind, offset in table}
        if len(self.tensors) < num_tensors:
            raise ValueError("several tensors have the same name")
        end = max((tensor.end for tensor in self.tensors.values()), default=0)
        if end > len(self._map):
            raise ValueError(f"it has {len(self._map)} of {end} bytes: it is truncated")

    def _tensor(self) -> tuple[str, tuple[int, ...], str, int]:
        name, num_dimensions = self._string(), self._scalar("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise ValueError(f"the tensor {name} has {num_dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(num_dimensions))[::-1]  # ggml counts from the innermost
        kind = self._scalar("I")
        if kind not in block_types():
            raise ValueError(f"the tensor {name} is of the unknown type {kind}")
        return name, shape, block_types()[kind].name, self._scalar("Q")

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise ValueError(f"there is a value of the unknown type {kind}")
        element, count = self._scalar("I"), self._scalar("Q")
        if element == STRING:
            return [self._string() for _ in range(count)]
        if element not in SCALARS:
            raise ValueError(f"there is an array of the unknown type {element}")
        size = struct.calcsize(SCALARS[element])
        return [value for (value,) in struct.iter_unpack(f"<{SCALARS[element]}", self._bytes(count * size))]

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._map, self._position)
        self._position += struct.calcsize(code)
        return value

    def _string(self) -> str:
        return self._bytes(self._scalar("Q")).decode()

    def _bytes(self, count: int) -> bytes:
        end = self._position + count
        if end > len(self._map):
            raise ValueError(_TRUNCATED)
        found = self._map[self._position : end]
        self._position = end
        return found
