"""How much of a list of cases is tested before each commit (`make test`), and how much only in CI (`make test-all`)."""

import pytest
from hypothesis import settings

QUICK_PROFILE = "quick"
"""Profile of hypothesis that `make test` chooses."""


def quick_first(cases, number=1):
    """Return the cases as parameters of which all but the first `number` have the marker `slow`."""
    return [case if index < number else _slow(case) for index, case in enumerate(cases)]


def quick_only(cases, *quick):
    """Return the cases as parameters of which all but those that equal one of `quick` have the marker `slow`."""
    missing = [case for case in quick if case not in list(cases)]
    assert not missing, f"no such cases: {missing}"
    return [case if case in quick else _slow(case) for case in cases]


def examples(number):
    """Return how many of `number` examples a property is tried with: a fifth of them before each commit."""
    return max(1, number // 5) if settings.get_current_profile_name() == QUICK_PROFILE else number


def drawn(cases, number):
    """Return the cases from which a property draws: before each commit the first `number`, those that cost least."""
    return cases[:number] if settings.get_current_profile_name() == QUICK_PROFILE else cases


def _slow(case):
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
