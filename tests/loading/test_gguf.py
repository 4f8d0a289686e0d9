"""GGUF files: every type of tensor, and whatever can be wrong with a file."""

import gguf
import gguf_files
import ml_dtypes
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.loading.dequantization import PIECE, QUANTIZED_TYPES
from jaxserve.loading.gguf import GGUFFile

SCALES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Offsets of a block's float16 scales."""


def random_blocks(kind, num_rows, num_columns):
    rng = np.random.default_rng(1)
    ggml_type = gguf.GGMLQuantizationType[kind]
    if kind not in SCALES:
        return gguf.quants.quantize(rng.normal(size=(num_rows, num_columns)).astype(np.float32), ggml_type)
    values, size = gguf.GGML_QUANT_SIZES[ggml_type]
    blocks = rng.integers(0, 256, size=(num_rows * num_columns // values, size), dtype=np.uint8)
    for offset in SCALES[kind]:
        scales = rng.normal(size=(len(blocks), 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("kind", QUANTIZED_TYPES)
def test_quantized_types_bit_for_bit(tmp_path, kind):
    num_columns = 768
    num_rows = PIECE // num_columns + 5  # more than one piece, the last of them smaller
    blocks = random_blocks(kind, num_rows, num_columns)
    gguf_files.write(tmp_path / "m.gguf", "llama", {}, {"x": blocks}, {"x": kind})
    tensor = GGUFFile(tmp_path / "m.gguf").tensors["x"]
    assert (tensor.kind, tensor.shape) == (kind, (num_rows, num_columns))
    values = tensor.read()
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))
    assert np.abs(values).max() > 0.5


def test_every_byte_of_mxfp4_under_every_scale(tmp_path):
    codes = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (256, 16, 16))
    scales = np.broadcast_to(np.arange(256, dtype=np.uint8)[:, None, None], (256, 16, 1))
    blocks = np.concatenate([scales, codes], axis=-1).reshape(256, -1)
    gguf_files.write(tmp_path / "m.gguf", "llama", {}, {"x": blocks}, {"x": "MXFP4"})
    values = GGUFFile(tmp_path / "m.gguf").tensors["x"].read()
    with np.errstate(over="ignore"):
        expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(values.view(np.uint32), expected.view(np.uint32))


def test_floats_as_they_are_stored(tmp_path):
    x = np.random.default_rng(2).normal(size=(3, 5)).astype(np.float32)
    narrow = x.astype(ml_dtypes.bfloat16)
    tensors = {"f32": x, "f16": x.astype(np.float16), "bf16": narrow.view(np.uint8), "vector": x[0]}
    gguf_files.write(tmp_path / "m.gguf", "llama", {}, tensors, {"bf16": "BF16"})
    file = GGUFFile(tmp_path / "m.gguf")
    expected = {"f32": x, "f16": x.astype(np.float16), "bf16": narrow, "vector": x[0]}
    for name, tensor in file.tensors.items():
        read = tensor.read()
        assert read.dtype == expected[name].dtype
        np.testing.assert_array_equal(read, expected[name])
        assert read.flags.owndata or read.base.flags.owndata  # no view of the file, which may go away


def test_metadata_of_every_type(tmp_path):
    metadata = {
        "general.name": "ü",
        "a.flag": True,
        "a.count": 7,
        "a.share": 0.5,
        "a.words": ["x", "", "ÿ"],
        "a.numbers": [1, -2, 3],
        "a.scores": [0.5, -1.5],
        "general.alignment": 64,
    }
    gguf_files.write(tmp_path / "m.gguf", "llama", metadata, {"x": np.ones(3, np.float32)})
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.architecture == "llama"
    assert metadata.items() <= file.metadata.items()
    with pytest.raises(CheckpointError, match=r"a\.count must be of type str, got 7"):
        file.require("a.count", str)


def test_every_truncated_file_is_refused_by_name(tmp_path):
    path = tmp_path / "m.gguf"
    metadata = {"a.words": ["one", "two"], "a.numbers": [1, 2], "a.count": 1}
    gguf_files.write(path, "llama", metadata, {"x": np.ones((2, 3), np.float32)})
    whole = path.read_bytes()
    end = GGUFFile(path).tensors["x"].end
    for size in range(end):
        path.write_bytes(whole[:size])
        reason = "it is empty, no GGUF file" if size == 0 else "it is no GGUF file" if size < 4 else "it is truncated"
        with pytest.raises(CheckpointError, match=f"cannot read {path}: .*{reason}"):
            GGUFFile(path)
    path.write_bytes(whole[:end])
    assert GGUFFile(path).tensors.keys() == {"x"}


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, b"GGML", "it is no GGUF file: it begins with b'GGML'"),
        (4, b"\x01\0\0\0", "version 1 of the format"),
        (4, b"\0\0\0\x03", "little-endian"),
        (16, b"\xff" * 8, "cannot read"),
        (8, b"\xff" * 8, "cannot read"),
    ],
)
def test_damaged_headers(tmp_path, position, value, message):
    path = tmp_path / "m.gguf"
    gguf_files.write(path, "llama", {}, {"x": np.ones((2, 3), np.float32)})
    content = bytearray(path.read_bytes())
    content[position : position + len(value)] = value
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        GGUFFile(path)


def test_a_tensor_of_an_unknown_type_is_named(tmp_path):
    path = tmp_path / "m.gguf"
    gguf_files.write(path, "llama", {}, {"x": np.ones((2, 3), np.float32)})
    content = bytearray(path.read_bytes())
    content[content.index(b"x\2\0\0\0") + 5 + 2 * 8] = 200
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"cannot read {path}: the tensor x is of the unknown type 200"):
        GGUFFile(path)


def test_parts_of_a_split_file(tmp_path):
    gguf_files.write(tmp_path / "m.gguf", "llama", {"split.count": 2}, {"x": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"one of 2 files, which must be called NAME-00001-of-00002\.gguf"):
        GGUFFile(tmp_path / "m.gguf")
