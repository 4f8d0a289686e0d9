"""Functions are checked when they are called, though the checks of like functions are written once."""

import numpy as np
import pytest
from jaxtyping import Float, TypeCheckError, jaxtyped
from type_checks import check_types

from jaxserve.layers.norm import rms_norm

ONES = np.ones(3)


def multiply_by(factor, result):
    """Define a function, of the same code in each call."""

    @jaxtyped(typechecker=check_types)
    def multiply(values: Float[np.ndarray, " N"], by: int = factor) -> result:
        return values * by

    return multiply


def test_a_function_of_the_package_is_checked():
    with pytest.raises(TypeCheckError, match="rms_norm"):
        rms_norm(np.ones((2, 4)), np.ones((3,)), 1e-5)


def test_each_function_has_its_own_defaults_and_annotations():
    as_long, longer = Float[np.ndarray, " N"], Float[np.ndarray, " N+1"]
    for factor in (2, 3):
        np.testing.assert_array_equal(multiply_by(factor, as_long)(ONES), factor * ONES)
        with pytest.raises(TypeCheckError, match="return value"):
            multiply_by(factor, longer)(ONES)


@pytest.mark.parametrize("arguments", [(np.ones((3, 1)),), (ONES, 1.5)])
def test_wrong_arguments(arguments):
    for _ in range(2):
        with pytest.raises(TypeCheckError, match="parameters"):
            multiply_by(2, Float[np.ndarray, " N"])(*arguments)
