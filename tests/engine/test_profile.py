import pytest

from jaxserve.engine.profile import Work, busy_fraction, second_half, times_by_name


def busy(*times):
    return busy_fraction([Work(start, end, "a") for start, end in times])


def test_busy_fraction_of_the_second_half():
    """The device is busy from 5 to 9 and from 9.5 to 10, of the time from 5 to 10."""
    assert busy((0, 4), (5, 7), (6, 9), (6.5, 7), (9.5, 10)) == pytest.approx((4 + 0.5) / 5)


def test_an_event_under_way_in_the_middle_counts_from_there():
    assert busy((0, 6), (8, 10)) == pytest.approx((1 + 2) / 5)
    assert busy((3, 4)) == 1


def test_a_profile_that_saw_no_gpu():
    assert busy() is None


def test_what_a_gpu_did_in_the_second_half_of_the_time():
    work = [Work(0, 4, "a"), Work(4, 6, "b"), Work(6, 7, "a"), Work(8, 10, "c")]
    late, span = second_half(work)
    assert late == [Work(5, 6, "b"), Work(6, 7, "a"), Work(8, 10, "c")]
    assert span == 5
    assert [(name, num_runs) for name, num_runs, _ in times_by_name(late)] == [("c", 1), ("b", 1), ("a", 1)]
    [a, *_] = times_by_name(work)
    assert a == ("a", 2, pytest.approx(5e-9))
