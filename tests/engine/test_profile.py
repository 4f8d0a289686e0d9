import pytest

from jaxserve.engine.profile import busy_share_of


def test_share_of_the_second_half():
    """Of the time from 5 to 10: 5 to 9 and 9.5 to 10."""
    assert busy_share_of([(0, 4), (5, 7), (6, 9), (6.5, 7), (9.5, 10)]) == pytest.approx((4 + 0.5) / 5)


def test_an_event_under_way_in_the_middle_counts_from_there():
    assert busy_share_of([(0, 6), (8, 10)]) == pytest.approx((1 + 2) / 5)
    assert busy_share_of([(3, 4)]) == 1
