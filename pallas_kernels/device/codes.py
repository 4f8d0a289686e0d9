"""Codes of 8 and 4 bits: their values, and how registers of them are converted to pairs of bfloat16.

bfloat16 represents every code exactly, fp4 times 12, but for those of nf4. Two codes of 4 bits are stored per byte, the
first of them in the lower half.
"""

from typing import Any, Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jaxtyping import Array, Float

from pallas_kernels.device.code_values import E2M1, FP4, NF4
from pallas_kernels.jax_internals import arith, ir, llvm, vector

Code = Literal["int8", "fp8", "e5m2", "int4", "uint4", "e2m1", "nf4", "fp4"]
"""fp8 is e4m3 without infinities, e5m2 is taken to have none; int4 is stored with 8 added to it; uint4 has zero points
or minimums; nf4 and fp4 are indices of tables.
"""
E2M1_EXPONENT = 126
"""The bias of bfloat16's exponent less that of e2m1."""
TABLES: dict[Code, tuple[float, ...]] = {"e2m1": E2M1, "nf4": NF4, "fp4": FP4}
"""Values of the codes that are not integers."""
MULTIPLIERS: dict[Code, float] = {"nf4": 1.436715, "fp4": 12.0}
"""What the values of a table are multiplied by before they are rounded to bfloat16. Those of fp4 are exact then; of all
multipliers between 1 and 2 this one of nf4 has the least error of normally distributed weights: 0.8e-3 of their norm,
beside 1.4e-3 without one.
"""

_REGISTERS = "{ .reg .b32 a, m, s; "
# PTX that makes a pair of bfloat16, $0, of two 4-bit codes in a, at the bottom of its halves; e2m1 has its own.
_NIBBLES = {
    # 128 + code has the code in its lowest bits: less 136, or 128 + the zero point ($2), that is exact.
    "int4": "lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea; mov.b32 m, 0x43084308; sub.bf16x2 $0, a, m; }",
    "uint4": "lop3.b32 a, a, 0x000f000f, 0x43004300, 0xea; sub.bf16x2 $0, a, $2; }",
}
# PTX that makes a pair of bfloat16, $0, of two bytes of a: the odd ones for floats, the even ones for int8.
_BYTES = {
    # Sign and the other 7 bits, then times 2^120.
    "fp8": "and.b32 s, a, 0x80008000; shr.u32 a, a, 4; lop3.b32 a, a, 0x07f007f0, s, 0xea; "
    "mov.b32 m, 0x7b807b80; mul.bf16x2 $0, a, m; }",
    # The same, times 2^112.
    "e5m2": "and.b32 s, a, 0x80008000; shr.u32 a, a, 3; lop3.b32 a, a, 0x0fe00fe0, s, 0xea; "
    "mov.b32 m, 0x77807780; mul.bf16x2 $0, a, m; }",
    # 128 + the lowest 7 bits, less 128 or, if the sign is set, 256.
    "int8": "lop3.b32 m, a, 0x00800080, 0x43004300, 0xea; lop3.b32 a, a, 0x007f007f, 0x43004300, 0xea; "
    "sub.bf16x2 $0, a, m; }",
}
# What brings the even or the odd bytes of a word, $1, to where these are read.
_BYTES_TO = {
    "fp8": ("shl.b32 a, $1, 8; ", "mov.b32 a, $1; "),
    "e5m2": ("shl.b32 a, $1, 8; ", "mov.b32 a, $1; "),
    "int8": ("mov.b32 a, $1; ", "shr.u32 a, $1, 8; "),
}


def codes_per_byte(code: Code) -> int:
    """Return the number of codes per byte."""
    return 1 if code in _BYTES else 2


def values_of(codes: Array, code: Code) -> Float[Array, "..."]:
    """Return the values of stored codes in float32, without scales and zero points."""
    if codes_per_byte(code) == 1:
        return codes.astype(jnp.float32)
    halves = jnp.stack([codes & jnp.uint8(15), codes >> jnp.uint8(4)], axis=-1)
    halves = halves.reshape(*codes.shape[:-1], 2 * codes.shape[-1])
    if code in TABLES:
        return jnp.asarray(TABLES[code], jnp.float32)[halves]
    return halves.astype(jnp.float32) - (8 if code == "int4" else 0)


def pair_of_nibbles(word: Any, index: int, code: Code, minus: Any = None) -> Any:
    """Return in a register the values of codes `index` and `index + 4` of a word of eight; `minus` is 128 + zero."""
    if code == "e2m1":
        return _asm([small_pair_of_e2m1(word, index)], "{ .reg .b32 m; mov.b32 m, 0x7e807e80; mul.bf16x2 $0, $1, m; }")
    text = _REGISTERS + (f"shr.u32 a, $1, {4 * index}; " if index else "mov.b32 a, $1; ") + _NIBBLES[code]
    return _asm([word] if minus is None else [word, minus], text)


def small_pair_of_e2m1(word: Any, index: int) -> Any:
    """Return in a register the values of codes `index` and `index + 4` of a word of eight, times 2^-E2M1_EXPONENT.

    That is the sign, and exponent and mantissa at the bottom of bfloat16's exponent.
    """

    def shifted(bits: int, name: str) -> str:
        left = bits - 4 * index
        return f"shl.b32 {name}, $1, {left}; " if left >= 0 else f"shr.u32 {name}, $1, {-left}; "

    text = shifted(12, "s") + shifted(6, "a") + "and.b32 s, s, 0x80008000; lop3.b32 $0, a, 0x01c001c0, s, 0xea; }"
    return _asm([word], _REGISTERS + text)


def small_pairs_of_e2m1(word: Any) -> list[Any]:
    """Return what `small_pair_of_e2m1` does for the four pairs of a word, in fewer operations.

    One multiplication brings a code to where its sign is to be, and to where the others of its bits are.
    """
    upper = _asm([word], "shr.u32 $0, $1, 8;")
    return [
        _asm(
            [source],
            f"{_REGISTERS}and.b32 a, $1, {mask}; mul.lo.u32 a, a, {factor}; and.b32 $0, a, 0x81c081c0; }}",
        )
        for source in (word, upper)
        for mask, factor in (("0x000f000f", (1 << 12) + (1 << 6)), ("0x00f000f0", (1 << 8) + (1 << 2)))
    ]


def scales_of_exponents(word: Any) -> Any:
    """Return in a register powers of two, of the lowest two bytes of a word, times 2^(E2M1_EXPONENT // 2).

    They are infinite from 2^65 on, as that is for e8m0's NaN.
    """
    bias = E2M1_EXPONENT // 2
    text = "prmt.b32 a, $1, 0, 0x4140; min.u16x2 a, a, m; "
    return _asm(
        [word],
        f"{_REGISTERS}mov.b32 m, {(255 - bias) * 0x10001}; {text}mad.lo.u32 $0, a, 128, {(bias << 7) * 0x10001}; }}",
    )


def times_half(pair: Any, factors: Any, index: int) -> Any:
    """Return in a register the products of a pair of bfloat16 and one of two factors."""
    factor = ("l", "h")[index]
    text = "{ .reg .b16 l, h; .reg .b32 f; mov.b32 {l, h}, $2; "
    return _asm([pair, factors], f"{text}mov.b32 f, {{{factor}, {factor}}}; mul.bf16x2 $0, $1, f; }}")


def pairs_of_table(word: Any, code: Code) -> list[Any]:
    """Return in four registers the values of codes `index` and `index + 4` of a word of eight, times MULTIPLIERS.

    A byte of four values at a time is one of eight of the table, for codes below 8 and for the others, and then one of
    these two.
    """
    halves = []
    for bits in (0, 16):
        low, high = _bytes_of_table(word, bits, code)
        halves.append([rearranged(low, high, selector) for selector in ("0x5140", "0x7362")])
    selectors = ("0x5410", "0x7632")
    return [rearranged(halves[0][i // 2], halves[1][i // 2], selectors[i % 2]) for i in range(4)]


def pair_of_table(byte: Any, code: Code) -> Any:
    """Return in a register the values of both codes of a byte, times MULTIPLIERS."""
    return rearranged(*_bytes_of_table(byte, 0, code), "0x5140")


def _bytes_of_table(word: Any, bits: int, code: Code) -> tuple[Any, Any]:
    """Return the lower bytes of the values of four codes, those from `bits` on of a word, and the upper ones."""
    entries = np.asarray(TABLES[code]) * MULTIPLIERS[code]
    entries = entries.astype(ml_dtypes.bfloat16).view(np.uint8).reshape(16, 2)
    index = _asm([word], f"{{ .reg .b32 a; shr.u32 a, $1, {bits}; and.b32 $0, a, 0x7777; }}")
    choice = _asm([word], f"{{ .reg .b32 a; shr.u32 a, $1, {bits + 1}; lop3.b32 $0, a, 0x4444, 0x3210, 0xea; }}")

    def chosen(plane: Any) -> Any:
        first, second, third, fourth = map(int, plane.copy().view(np.uint32))
        below = _asm([index], f"prmt.b32 $0, {first}, {second}, $1;")
        above = _asm([index], f"prmt.b32 $0, {third}, {fourth}, $1;")
        return _asm([below, above, choice], "prmt.b32 $0, $1, $2, $3;")

    return chosen(entries[:, 0]), chosen(entries[:, 1])


def pair_of_bytes(word: Any, index: int, code: Code) -> Any:
    """Return in a register the values of codes `index` and `index + 2` of a word of four."""
    return _asm([word], _REGISTERS + _BYTES_TO[code][index] + _BYTES[code])


def halves_of_bytes(word: Any, code: Code) -> list[Any]:
    """Return in two registers the values of the first two and the last two codes of a word of four, as float16."""
    match code:
        case "fp8":
            return [
                _asm([word], f"{{ .reg .b16 l, h; mov.b32 {{l, h}}, $1; cvt.rn.f16x2.e4m3x2 $0, {half}; }}")
                for half in "lh"
            ]
        case "e5m2":  # the upper byte of float16
            return [_asm([word], f"prmt.b32 $0, $1, 0, {selector};") for selector in ("0x1404", "0x3424")]
        case "int8":  # 1024 + 128 + the code, less that
            text = "{ .reg .b32 a, m; xor.b32 a, $1, 0x80808080; mov.b32 m, 0x64806480; "
            return [
                _asm([word], text + f"prmt.b32 a, a, 0x64646464, {selector}; sub.f16x2 $0, a, m; }}")
                for selector in ("0x4140", "0x4342")
            ]
    raise ValueError(f"no codes of 8 bits: {code}")


def float_of(word: Any, index: int, dtype: str) -> Any:
    """Return in float32 a number of a word of them, of a type of 4, 2 or 1 bytes; a power of two (e8m0) is not NaN."""
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    match dtype:
        case "float32":
            return utils.bitcast(word, f32)
        case "bfloat16" | "float16":
            kind = ir.BF16Type.get() if dtype == "bfloat16" else ir.F16Type.get()
            return arith.extf(f32, _element(word, index, kind))
        case "int8" | "float8_e4m3fn":
            pair = pair_of_bytes(word, index % 2, "int8" if dtype == "int8" else "fp8")
            return arith.extf(f32, _element(pair, index // 2, ir.BF16Type.get()))
        case "float8_e8m0fnu":
            exponent = arith.andi(arith.shrui(word, mgpu.c(8 * index, i32)), mgpu.c(255, i32))
            bits = arith.shli(exponent, mgpu.c(23, i32))
            is_zero = arith.cmpi(arith.CmpIPredicate.eq, exponent, mgpu.c(0, i32))
            return utils.bitcast(arith.select(is_zero, mgpu.c(1 << 22, i32), bits), f32)
    raise ValueError(f"no numbers of {dtype}")


def _element(word: Any, index: int, kind: Any) -> Any:
    """Return one of two numbers of 16 bits in a word."""
    return vector.extract(utils.bitcast(word, ir.VectorType.get((2,), kind)), [], [index])


def rearranged(first: Any, second: Any, selector: str) -> Any:
    """Return bytes of two words, as prmt selects them."""
    return _asm([first, second], f"prmt.b32 $0, $1, $2, {selector};")


def times(pair: Any, factors: Any, minimums: Any = None) -> Any:
    """Return in a register the products of two pairs of bfloat16, less a third one if there is one, rounded once."""
    if minimums is None:
        return _asm([pair, factors], "mul.bf16x2 $0, $1, $2;")
    return _asm([pair, factors, minimums], "{ .reg .b32 m; neg.bf16x2 m, $3; fma.rn.bf16x2 $0, $1, $2, m; }")


def times_sum(pair: Any, high: Any, low: Any) -> Any:
    """Return in a register the products of two pairs of bfloat16, the second of which is a sum, rounded once."""
    return _asm([pair, high, low], "{ .reg .b32 m; mul.bf16x2 m, $1, $3; fma.rn.bf16x2 $0, $1, $2, m; }")


def _asm(operands: list[Any], text: str) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(i32, [utils.bitcast(x, i32) for x in operands], text, "=r" + ",r" * len(operands))
