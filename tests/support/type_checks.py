"""Beartype for every annotated function, whose checks are generated at the first call that needs them, and only once.

jaxtyping asks for two checks of each function that is defined: of the thousands that a process imports and never calls,
and of a nested function whenever the outer one runs. Beartype takes about a millisecond to generate one.
"""

import collections
import functools

import beartype

_check = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))  # an int is accepted as a float
_checks = collections.defaultdict(list)


def check_types(function):
    """Decorate a function that jaxtyping made from another's signature: its body depends on nothing else."""
    with_checks = None

    @functools.wraps(function)
    def checked(*args, **kwargs):
        __tracebackhide__ = True
        nonlocal with_checks
        with_checks = with_checks or _checked_once(function)
        return with_checks(*args, **kwargs)

    return checked


def _checked_once(function):
    """Return the checked function; functions share one if they differ only in the values of their defaults."""
    optional = len(function.__defaults__ or ()), frozenset(function.__kwdefaults__ or ())
    alike = _checks[function.__module__, function.__code__, optional]  # annotations need not be hashable
    for annotations, checked in alike:
        if annotations == function.__annotations__:
            return checked
    alike.append((function.__annotations__, _check(function)))
    return alike[-1][1]
