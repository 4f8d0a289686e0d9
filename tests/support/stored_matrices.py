"""Packers of random matrices as checkpoints store them, written from the formats' descriptions, code by code."""

import json
import struct

import ml_dtypes
import numpy as np

BF16, F8, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
AWQ_OUTPUT_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(codes, bits, *, axis):
    """Words of 32 bits, one code after the other from the lowest bits on, padded with zeros."""
    per_word = 32 // bits
    codes = np.moveaxis(codes, axis, -1)
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, -codes.shape[-1] % per_word)]).astype(np.int64)
    words = np.zeros((*padded.shape[:-1], padded.shape[-1] // per_word), np.int64)
    for index in range(padded.shape[-1]):
        words[..., index // per_word] |= padded[..., index] << bits * (index % per_word)
    return np.moveaxis(words, -1, axis).astype(np.uint32).view(np.int32)


def product(difference, scales):
    """Return what every package computes: an exact difference of codes times its scale, rounded to the scale's type."""
    return difference.astype(scales.dtype) * scales


def fp8(
    rng,
    outputs,
    inputs,
    *,
    scheme,
    leaf="weight_scale",
    dtype=np.float32,
    block=(128, 128),
    as_bytes=False,
    divides=False,
):
    codes = rng.normal(size=(outputs, inputs)).astype(F8)
    shape = {
        "tensor": (),
        "one": (1,),
        "channel": (outputs, 1),
        "flat": (outputs,),
        "runs": (outputs, inputs // block[1]),
        "block": (-(-outputs // block[0]), -(-inputs // block[1])),
    }[scheme]
    scales = rng.uniform(0.01, 0.1, size=shape).astype(dtype)
    stored = scales
    if dtype == E8M0:  # converted before it is multiplied by
        scales = scales.astype(BF16)
    if as_bytes:
        stored = stored.view(np.uint8)
    if divides:
        scales = 1 / stored
    if scheme == "runs":
        each = np.repeat(scales, block[1], 1)
    elif scheme == "block":
        each = np.repeat(np.repeat(scales, block[0], 0), block[1], 1)[:outputs, :inputs]
    else:
        each = np.broadcast_to(scales.reshape(-1, 1), (outputs, inputs))
    return {"weight": codes, leaf: stored}, product(codes, each)


def int8(rng, outputs, inputs, *, dtype=BF16):
    codes = rng.integers(-128, 128, size=(outputs, inputs)).astype(np.int8)
    scales = rng.uniform(0.001, 0.01, size=(outputs, 1)).astype(dtype)
    return {"weight": codes, "weight_scale": scales}, product(codes, np.broadcast_to(scales, codes.shape))


def in_order(inputs, group):
    """The groups of inputs as act-order has them: the same in all matrices that are multiplied by the same values."""
    return np.random.default_rng(inputs).permutation(np.arange(inputs) // group)


def packed(rng, outputs, inputs, *, bits=4, group=None, has_zeros=False, has_order=False, dtype=BF16):
    group = group or inputs
    codes = rng.integers(0, 2**bits, size=(outputs, inputs))
    groups = in_order(inputs, group) if has_order else np.arange(inputs) // group
    scales = rng.uniform(0.01, 0.1, size=(outputs, inputs // group)).astype(dtype)
    zeros = rng.integers(0, 2**bits, size=scales.shape) if has_zeros else np.full(scales.shape, 2 ** (bits - 1))
    tensors = {
        "weight_packed": pack(codes, bits, axis=1),
        "weight_scale": scales,
        "weight_shape": np.array([outputs, inputs], np.int64),
    }
    tensors |= {"weight_zero_point": pack(zeros, bits, axis=0)} if has_zeros else {}
    tensors |= {"weight_g_idx": groups.astype(np.int32)} if has_order else {}
    return tensors, product(codes - zeros[:, groups], scales[:, groups])


def gptq(rng, outputs, inputs, *, bits=4, group=8, version=1, has_order=False, is_symmetric=False, has_groups=True):
    codes = rng.integers(0, 2**bits, size=(inputs, outputs))
    groups = in_order(inputs, group) if has_order else np.arange(inputs) // group
    scales = rng.uniform(0.01, 0.1, size=(-(-inputs // group), outputs)).astype(np.float16)
    zeros = rng.integers(0, 2**bits, size=scales.shape)
    zeros = np.full_like(zeros, 2 ** (bits - 1)) if is_symmetric else zeros
    one_each = np.uint32(sum(2 ** (bits * index) for index in range(32 // bits)))  # GPTQModel subtracts it from words
    words = pack(zeros, bits, axis=1).view(np.uint32) - (one_each if version == 1 else np.uint32(0))
    tensors = {
        "qweight": pack(codes, bits, axis=0),
        "qzeros": words.view(np.int32),
        "scales": scales,
    }
    tensors |= {"g_idx": groups.astype(np.int32)} if has_groups else {}
    return tensors, product(codes - zeros[groups], scales[groups]).T


def awq(rng, outputs, inputs, *, group=8):
    codes = rng.integers(0, 16, size=(inputs, outputs))
    zeros = rng.integers(0, 16, size=(inputs // group, outputs))
    scales = rng.uniform(0.01, 0.1, size=zeros.shape).astype(np.float16)

    def words(values):
        in_order = values.reshape(len(values), -1, 8)[:, :, AWQ_OUTPUT_OF_NIBBLE]
        return pack(in_order.reshape(len(values), -1), 4, axis=1)

    groups = np.arange(inputs) // group
    tensors = {"qweight": words(codes), "qzeros": words(zeros), "scales": scales}
    return tensors, product(codes - zeros[groups], scales[groups]).T


def nvfp4(rng, outputs, inputs, *, package):
    codes = rng.integers(0, 16, size=(outputs, inputs))
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[codes & 7] * np.where(codes & 8, -1, 1)
    scales = rng.uniform(1, 400, size=(outputs, inputs // 16)).astype(F8)
    whole = np.float32(rng.uniform(2000, 3000))
    packed_codes = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    if package == "modelopt":
        tensors = {"weight": packed_codes, "weight_scale": scales, "weight_scale_2": np.float32(1) / whole}
        each = scales.astype(np.float32) * tensors["weight_scale_2"]
    else:
        tensors = {"weight_packed": packed_codes, "weight_scale": scales, "weight_global_scale": whole.reshape(1)}
        each = scales.astype(np.float32) / whole
    return tensors, product(values, np.repeat(each, 16, axis=1))


def mxfp4(rng, outputs, inputs):
    codes = rng.integers(0, 16, size=(outputs, inputs))
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1, 1)
    exponents = rng.integers(-8, -4, size=(outputs, inputs // 32))
    packed_codes = (codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8)
    tensors = {"weight_packed": packed_codes, "weight_scale": (exponents + 127).astype(np.uint8)}
    return tensors, (values * np.repeat(2.0**exponents, 32, axis=1)).astype(BF16)


NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)


def bitsandbytes(rng, outputs, inputs, *, kind="nf4", block=64, nested=False, dtype="bfloat16"):
    table = {"nf4": NF4, "fp4": FP4}[kind]
    codes = rng.integers(0, 16, size=outputs * inputs)
    blocks = -(-len(codes) // block)
    state = {"quant_type": kind, "blocksize": block, "dtype": dtype, "shape": [outputs, inputs]}
    scales = rng.uniform(0.5, 2.0, size=blocks).astype(np.float32)
    tensors = {"weight": (codes[::2] << 4 | codes[1::2]).astype(np.uint8)[:, None], "weight.quant_map": table}
    if nested:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.75}
        nested_table = np.linspace(-1, 1, 256, dtype=np.float32)
        nested_codes = rng.integers(0, 256, size=blocks).astype(np.uint8)
        nested_scales = rng.uniform(0.5, 1.0, size=-(-blocks // 256)).astype(np.float32)
        products = nested_table[nested_codes] * nested_scales[np.arange(blocks) // 256]
        scales = products + np.float32(0.75)
        tensors |= {"weight.absmax": nested_codes, "weight.nested_absmax": nested_scales}
        tensors |= {"weight.nested_quant_map": nested_table}
    else:
        tensors["weight.absmax"] = scales
    tensors[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    values = (table[codes] * np.repeat(scales, block)[: len(codes)]).reshape(outputs, inputs)
    return tensors, values.astype({"bfloat16": BF16, "float32": np.float32}[dtype])


def llm_int8(rng, outputs, inputs):
    codes = rng.integers(-127, 128, size=(outputs, inputs)).astype(np.int8)
    largest = rng.uniform(0.5, 2.0, size=outputs).astype(np.float32)
    tensors = {"weight": codes, "SCB": largest, "weight_format": np.zeros((), np.uint8)}
    return tensors, codes.astype(np.float32) * largest[:, None] * np.float32(1 / 127)


def by_name(**makers):
    """What makes matrices of modules whose names end so, `other` all others."""

    def make(rng, outputs, inputs, *, name):
        suffix = name.rpartition(".")[2]
        return makers.get(suffix, makers["other"])(rng, outputs, inputs)

    make.takes_name = True
    return make


def save(tensors, path):
    """Write safetensors, FP8 too, which their package for NumPy does not know."""
    header, data = {}, b""
    names = {
        "float8_e4m3fn": "F8_E4M3",
        "float8_e8m0fnu": "F8_E8M0",
        "bfloat16": "BF16",
        "float16": "F16",
        "float32": "F32",
    }
    names |= {"int8": "I8", "int32": "I32", "int64": "I64", "uint8": "U8"}
    for name, tensor in tensors.items():
        content = np.ascontiguousarray(tensor).tobytes()
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": names[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": offsets}
        data += content
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def read(path):
    types = {"F8_E4M3": F8, "F8_E8M0": E8M0, "BF16": BF16, "F16": np.float16, "F32": np.float32}
    types |= {"I8": np.int8, "I32": np.int32, "I64": np.int64, "U8": np.uint8}
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    return {
        name: np.frombuffer(data[slice(*entry["data_offsets"])], types[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }
