import pytest

from jaxserve.engine.bandwidth import BandwidthMeter


def test_weights_and_kv_a_step_over_the_peak():
    meter = BandwidthMeter(weight_bytes=1000, bytes_per_position=10, peak=10_000)
    assert meter.ratio(num_steps=4, seconds=2.0, num_positions=25) == pytest.approx(4 * (1000 + 250) / 2 / 10_000)
    assert meter.ratio(num_steps=4, seconds=2.01, num_positions=25) == pytest.approx(0.25)  # too soon: the last one
    assert meter.ratio(num_steps=14, seconds=4.0, num_positions=100) == pytest.approx(10 * (1000 + 1000) / 2 / 10_000)
    assert meter.ratio(num_steps=14, seconds=4.0, num_positions=0) == 0.0  # idle


def test_a_device_of_unknown_peak():
    meter = BandwidthMeter(weight_bytes=1000, bytes_per_position=10, peak=None)
    assert meter.ratio(num_steps=4, seconds=2.0, num_positions=25) == 0.0
