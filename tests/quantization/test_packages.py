"""Dequantized values are bit-equal to those of the packages that define the formats (`make goldens SEED=n`)."""

import pathlib

import numpy as np
import pytest
import stored_matrices

from jaxserve.quantization import nvfp4
from jaxserve.quantization.packed import Packed
from jaxserve.quantization.plain import Plain
from jaxserve.quantization.stored import Header

QUANTIZED = pathlib.Path(__file__).parents[1] / "goldens" / "quantized"
FORMATS = {
    "float_tensor": Plain(),
    "float_channel": Plain(),
    "float_block": Plain(block=(32, 64)),
    "int_channel": Plain(),
    "packed_channel": Packed(bits=4),
    "packed_group": Packed(bits=4),
    "packed_zeros": Packed(bits=4),
    "packed_8_bits": Packed(bits=8),
    "nvfp4": nvfp4.COMPRESSED_TENSORS,
}
TYPES = {"float8_e4m3fn": "F8_E4M3", "int8": "I8", "int32": "I32", "int64": "I64", "uint8": "U8"}
TYPES |= {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def test_every_golden_is_compared():
    assert {path.stem for path in QUANTIZED.glob("*.safetensors")} == FORMATS.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_bit_equal(name):
    tensors = stored_matrices.read(QUANTIZED / f"{name}.safetensors")
    expected = tensors.pop("expected")
    stored = FORMATS[name]
    headers = {
        leaf: Header(TYPES[tensor.dtype.name], tensor.shape, tensor.tobytes()) for leaf, tensor in tensors.items()
    }
    assert set(stored.parts(headers)) == tensors.keys()
    assert stored.shape("module", headers) == expected.shape
    values = stored.read("module", tensors).dequantize()
    if name == "nvfp4":  # which the package rounds to bfloat16 at last
        values = values.astype(expected.dtype)
    assert values.dtype == expected.dtype
    np.testing.assert_array_equal(values.view(f"u{values.itemsize}"), expected.view(f"u{expected.itemsize}"))
