"""Updates whose norm and scale are left to where they are added: as if one operation ran after the other."""

import dataclasses
import inspect

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.context import StepContext
from jaxserve.layers.norm import Norm, PendingUpdate, add_update
from jaxserve.layers.weight import Dense
from pallas_kernels import add_rms_norm, row_quantization

NORM = Norm(eps=1e-5)
LAYER_NORM = Norm(eps=1e-5, kind="layer", has_gain=False)
PENDING = {
    "normalised": (NORM, 1.0),
    "scaled": (None, 0.22),
    "both": (NORM, 0.22),
    "of another eps": (Norm(eps=1e-2), 1.0),
    "of another kind": (LAYER_NORM, 1.0),
}


@dataclasses.dataclass(frozen=True)
class Rounding(Dense):
    """A weight that rounds rows; nothing is multiplied by it."""

    def product(self, x, context):
        return super().product(x, context)._replace(rounds_to="int8")


def make_update(norm, scale):
    """Return a residual stream, an update, the gain of a norm of the sum, and the update as it is to be added."""
    rng = np.random.default_rng(0)
    x, value = jnp.asarray(3 * rng.standard_normal((2, 5, 128)), jnp.bfloat16)
    gain, weights = jnp.asarray(rng.standard_normal((2, 128)), jnp.bfloat16)
    if norm is None:
        weights = None
    elif norm.kind == "layer":
        weights = {}
    update = PendingUpdate(value=value, weights=weights, norm=norm, scale=scale)
    finished = value if norm is None else norm(value, weights)
    return x, update, gain, (finished.astype(jnp.float32) * scale).astype(finished.dtype)  # not by a rounded scale


@pytest.fixture
def calls(monkeypatch):
    """Compute kernels' operations by XLA, and record the names of those that are called."""
    calls = []
    for module, name in [
        (add_rms_norm, "add_rms_norm"),
        (add_rms_norm, "add_normed_update"),
        (row_quantization, "add_rms_norm_and_quantize"),
    ]:
        operation = inspect.unwrap(getattr(module, name))

        def run(*args, _name=name, _operation=operation, implementation, **options):
            assert implementation == "sm90"
            calls.append(_name)
            return _operation(*args, **options, implementation="xla")

        monkeypatch.setattr(module, name, run)
    return calls


@pytest.mark.parametrize("kernels", ["xla", "sm90"])
@pytest.mark.parametrize("norm", [NORM, LAYER_NORM], ids=lambda norm: norm.kind)
@pytest.mark.parametrize("pending", PENDING)
def test_sum_and_norm(calls, pending, norm, kernels):
    x, update, gain, finished = make_update(*PENDING[pending])
    weights = gain if norm is NORM else {}
    total, normed = norm.of_sum(x, update, weights, StepContext(kernels))
    np.testing.assert_array_equal(total, x + finished)
    np.testing.assert_array_equal(normed, norm(x + finished, weights))
    alone = pending in ("normalised", "both", "of another eps")
    expected = ["add_rms_norm"] if norm is NORM else ["add_normed_update"] * alone
    assert calls == (expected if kernels == "sm90" else [])


@pytest.mark.parametrize("kernels", ["xla", "sm90"])
@pytest.mark.parametrize("pending", PENDING)
def test_sum_without_a_norm(calls, pending, kernels):
    x, update, _, finished = make_update(*PENDING[pending])
    np.testing.assert_array_equal(add_update(x, update, StepContext(kernels)), x + finished)
    alone = pending in ("normalised", "both", "of another eps")
    assert calls == ["add_normed_update"] * (alone and kernels == "sm90")


@pytest.mark.parametrize("pending", PENDING)
def test_rows_that_are_rounded_have_finished_updates(calls, pending):
    x, update, gain, finished = make_update(*PENDING[pending])
    reader = Rounding(jnp.zeros((1, 128)))
    total, rows = NORM.of_sum(x, update, gain, StepContext("sm90"), reader=reader)
    np.testing.assert_array_equal(total, x + finished)
    want = row_quantization.quantize_rows(NORM(x + finished, gain), "int8")
    np.testing.assert_array_equal(rows.codes, want.codes)
    assert calls == ["add_rms_norm_and_quantize"]
