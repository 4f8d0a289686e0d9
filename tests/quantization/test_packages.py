"""Dequantized values are bit-equal to those of the packages that define the formats (`make goldens SEED=n`)."""

import numpy as np
import pytest
from package_goldens import FORMATS, NAMES, difference, read

from jaxserve.quantization import ggml


def test_every_golden_is_compared():
    assert set(NAMES) == {*FORMATS, *(f"gguf_{kind.lower()}" for kind in ggml.SCHEMES)}


@pytest.mark.parametrize("name", NAMES)
def test_values_are_bit_equal(name):
    result = read(name)
    values, expected = result.values, result.expected
    assert values.dtype == expected.dtype
    np.testing.assert_array_equal(values.view(f"u{values.itemsize}"), expected.view(f"u{expected.itemsize}"))


@pytest.mark.parametrize("name", NAMES)
def test_held_codes_stand_for_the_same_values(name):
    """Packages round to the type of the scales, which codes that are held do not; blocks of GGUF files are exact."""
    result = read(name)
    allowed = (
        0 if name.startswith("gguf") else {"float16": 2**-11, "bfloat16": 2**-8}.get(result.expected.dtype.name, 2**-22)
    )
    assert difference(result.held, result.expected) <= allowed
