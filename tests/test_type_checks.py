"""Functions are checked when they are called: types, and the axes of arrays; also functions within functions."""

import dataclasses

import numpy as np
import pytest
from jaxtyping import Float, TypeCheckError
from type_checks import checked, unchecked

from jaxserve.layers.norm import rms_norm
from jaxserve.scheduling.snapshot import RequestSnapshot

AS_LONG, LONGER = Float[np.ndarray, " N"], Float[np.ndarray, " N+1"]
ONES = np.ones(3)


@checked
def lengthen(values: AS_LONG, by: int) -> AS_LONG:
    return np.append(values, np.ones(by))


@checked
def name_of(value: "int | str", other: "Unknown" = None) -> str:  # noqa: F821
    return value or 0


@checked
@dataclasses.dataclass
class Size:
    width: int


def multiply_by(factor, result):
    """Define a function, of the same code in each call."""

    @checked
    def multiply(values: AS_LONG, by: int = factor) -> result:
        return values * by

    return multiply


def test_nothing_is_checked_meanwhile():
    with unchecked(), unchecked():
        pass
    with unchecked():
        assert name_of(0) == 0
        assert lengthen(ONES, 1).shape == (4,)
        assert multiply_by(2, LONGER)(ONES).shape == (3,)
    with pytest.raises(TypeCheckError):
        name_of(0)


def test_what_fits_is_called():
    np.testing.assert_array_equal(lengthen(ONES, by=0), ONES)
    assert name_of("a", other=1.5) == "a"
    assert Size(3).width == 3
    for factor in (2, 3):
        np.testing.assert_array_equal(multiply_by(factor, AS_LONG)(ONES), factor * ONES)


@pytest.mark.parametrize(
    "call",
    [
        # `make test` does not check the packages' own functions.
        pytest.param(lambda: rms_norm(np.ones((2, 4)), np.ones(3), 1e-5), marks=pytest.mark.slow),
        pytest.param(lambda: RequestSnapshot.of("no request"), marks=pytest.mark.slow),
        lambda: lengthen(ONES, 1),
        lambda: lengthen(np.ones((3, 1)), 0),
        lambda: name_of(1.5),
        lambda: name_of(0),
        lambda: Size("3"),
        lambda: multiply_by(2, LONGER)(ONES),
        lambda: multiply_by(2, AS_LONG)(np.ones((3, 1))),
        lambda: multiply_by(2, AS_LONG)(ONES, 1.5),
    ],
)
def test_what_does_not_fit_is_refused_each_time(call):
    for _ in range(2):
        with pytest.raises(TypeCheckError):
            call()
