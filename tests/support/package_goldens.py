"""Goldens of quantized formats (`make goldens SEED=n`), and what this package makes of each.

As a script it prints the table of formats (`make formats`).
"""

import pathlib
from typing import NamedTuple

import msgspec
import numpy as np
import stored_matrices
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxserve.quantization import bitsandbytes, ggml, nvfp4
from jaxserve.quantization.awq import AWQ
from jaxserve.quantization.common import values_of
from jaxserve.quantization.gptq import GPTQ
from jaxserve.quantization.mxfp4 import MXFP4
from jaxserve.quantization.packed import Packed
from jaxserve.quantization.plain import Plain
from jaxserve.quantization.scheme import Parts, Scheme
from jaxserve.quantization.stored import Header, order_of

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
    "mxfp4": MXFP4(),
    "gptq_v1": GPTQ(bits=4, is_symmetric=False, is_version_2=False),
    "gptq_v2": GPTQ(bits=4, is_symmetric=False, is_version_2=True),
    "gptq_8_bits": GPTQ(bits=8, is_symmetric=False, is_version_2=False),
    "gptq_2_bits": GPTQ(bits=2, is_symmetric=False, is_version_2=True),
    "awq": AWQ(),
    "autoround_v1": GPTQ(bits=4, is_symmetric=False, is_version_2=False, group_size=32),
    "autoround_v2": GPTQ(bits=4, is_symmetric=False, is_version_2=True, group_size=32),
    "bnb_nf4": bitsandbytes.FourBits(),
    "bnb_nf4_nested": bitsandbytes.FourBits(),
    "bnb_nf4_float32": bitsandbytes.FourBits(),
    "bnb_fp4": bitsandbytes.FourBits(),
    "bnb_int8": bitsandbytes.EightBits(),
}
TYPES = {"float8_e4m3fn": "F8_E4M3", "int8": "I8", "int32": "I32", "int64": "I64", "uint8": "U8"}
TYPES |= {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
NAMES = sorted(path.stem for path in QUANTIZED.glob("*.safetensors"))


class Result(NamedTuple):
    """A golden's values here, and those of its package."""

    expected: np.ndarray
    values: np.ndarray
    """Dequantized as the package does."""
    scheme: Scheme
    """The scheme in which codes are held."""
    held: np.ndarray
    """The values of held codes, in float32."""
    num_bytes: int
    """Size of the tensors that the matrix is stored as."""
    held_bytes: int


def read(name):
    tensors = stored_matrices.read(QUANTIZED / f"{name}.safetensors")
    expected = tensors.pop("expected")
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    if name.startswith("gguf_"):
        return _read_gguf(name.removeprefix("gguf_").upper(), tensors["blocks"], expected)
    stored = FORMATS[name]
    headers = {
        leaf: Header(TYPES[tensor.dtype.name], tensor.shape, lambda tensor=tensor: tensor)
        for leaf, tensor in tensors.items()
    }
    assert set(stored.parts(headers)) == tensors.keys()
    assert stored.shape("module", headers) == expected.shape
    codes = stored.read("module", tensors)
    values = codes.dequantize()
    if name == "nvfp4":  # which the package rounds to bfloat16 at last
        values = values.astype(expected.dtype)
    scheme = stored.scheme("module", headers)
    assert isinstance(scheme, Scheme)
    if name.startswith("gptq"):  # whose groups are no runs of inputs
        scheme = msgspec.structs.replace(scheme, has_order=True)
    parts = codes.parts(scheme)
    held = values_of(scheme, parts)
    if scheme.has_order:
        held = held[:, np.argsort(order_of(codes.groups))]
    return Result(expected, values, scheme, held, num_bytes, _num_bytes(parts))


def _read_gguf(kind, blocks, expected):
    from jaxserve.loading.dequantization import dequantize

    scheme = ggml.SCHEMES[kind]
    by_block = ggml.split(kind, blocks.reshape(-1, GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]))
    rows = Parts(*(None if part is None else part.reshape(len(blocks), -1) for part in by_block))
    values = dequantize(blocks.ravel(), kind).reshape(expected.shape)
    return Result(expected, values, scheme, values_of(scheme, rows), blocks.nbytes, _num_bytes(rows))


def _num_bytes(parts):
    return sum(part.nbytes for part in parts if part is not None)


def difference(values, expected):
    """Return the largest difference, in units of the largest value."""
    expected = expected.astype(np.float64)
    return np.abs(values.astype(np.float64) - expected).max() / np.abs(expected).max()


def print_table():
    """Print one line per golden: its largest differences, and the bits of a value as stored and as held."""
    header = f"{'format':<18}{'dequantized':>12}{'held codes':>12}{'stored bits':>12}{'held bits':>11}  held as"
    print(header)  # noqa: T201
    for name in NAMES:
        result = read(name)
        bits, held_bits = (8 * size / result.expected.size for size in (result.num_bytes, result.held_bytes))
        exact, held = (f"{difference(values, result.expected):.1e}" for values in (result.values, result.held))
        print(f"{name:<18}{exact:>12}{held:>12}{bits:>12.2f}{held_bits:>11.2f}  {result.scheme}")  # noqa: T201


if __name__ == "__main__":
    print_table()
