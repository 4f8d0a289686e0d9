"""The values of codes of 4 bits that are not integers, by code."""

import numpy as np

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1 = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))
_TWELFTHS = (0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
FP4 = (
    0.0,
    *(float(np.float32(value / 12)) for value in _TWELFTHS),
    0.0,
    *(float(np.float32(-value / 12)) for value in _TWELFTHS),
)
"""What bitsandbytes calls FP4."""
NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The quantiles of QLoRA (Dettmers et al. 2023, arXiv:2305.14314, appendix E)."""
