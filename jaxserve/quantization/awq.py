"""Matrices as AutoAWQ writes them in its version GEMM: words along the outputs, [inputs, outputs / 8].

Within a word, outputs are in an order that suits its kernel.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.quantization.method import Config, Method, integers, require
from jaxserve.quantization.scheme import Scheme
from jaxserve.quantization.stored import Codes, Format, Header, scheme_of_groups, unpack

ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The index, from the lowest bits on, of each of eight outputs in a word."""
_REQUIRED = ("qweight", "qzeros", "scales")


@dataclasses.dataclass(frozen=True)
class AWQ:
    """Unsigned integers of 4 bits with zero points."""

    def parts(self, leaves: Mapping[str, Header]) -> tuple[str, ...] | None:
        """Return the names of codes, zero points and scales."""
        return tuple(name for name in _REQUIRED if name in leaves) if "qweight" in leaves else None

    def shape(self, module: str, headers: Mapping[str, Header]) -> tuple[int, int]:
        """Return the shape implied by the sizes of the words."""
        if missing := [name for name in _REQUIRED if name not in headers]:
            raise CheckpointError(f"{module}: tensors missing beside qweight: {', '.join(missing)}")
        (dtype, words, _), scales, zeros = headers["qweight"], headers["scales"].shape, headers["qzeros"].shape
        fits = dtype == "I32" and len(words) == len(scales) == 2 and scales[1] == 8 * words[1]
        if not fits or zeros != (scales[0], words[1]) or words[0] % scales[0]:
            raise CheckpointError(
                f"{module}: qweight {dtype} {list(words)}, qzeros {list(zeros)} and scales {list(scales)} do not fit"
            )
        return 8 * words[1], words[0]

    def scheme(self, module: str, headers: Mapping[str, Header]) -> Scheme | str:  # noqa: ARG002 (all are alike)
        """Return the scheme of the integers and their zero points."""
        scales = headers["scales"]
        num_inputs, num_groups = headers["qweight"].shape[0], scales.shape[0]
        return scheme_of_groups("uint4", scales, num_inputs, num_groups=num_groups, has_zeros=True)

    def read(self, module: str, tensors: Mapping[str, np.ndarray]) -> Codes:  # noqa: ARG002 (nothing can be wrong)
        """Return the codes with outputs first."""
        values, zeros = (_unpack(tensors[name]) for name in ("qweight", "qzeros"))
        return Codes(values=values, scales=tensors["scales"].T, zeros=zeros)


def _unpack(words: np.ndarray) -> np.ndarray:
    codes = unpack(words, 4, axis=1).reshape(len(words), -1, 8)[:, :, ORDER]
    return codes.reshape(len(words), -1).T


def _formats(config: Config, where: str) -> tuple[Format, ...]:
    bits = "w_bit" if "w_bit" in config else "bits"
    version = config.get("version") or config.get("format") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise CheckpointError(f"{where}: version {version!r:.100} is not supported, only gemm")
    require(config, where, zero_point=(None, True), **{bits: (4,)})
    return (AWQ(),)


def _scheme(config: Config, module: str) -> Scheme:  # noqa: ARG001 (all are alike)
    size = config.get("group_size") or config.get("q_group_size") or 128
    return integers(4, is_symmetric=False, size=size if size > 0 else None, scale_dtype="float16")


METHOD = Method(formats=_formats, scheme=_scheme)
