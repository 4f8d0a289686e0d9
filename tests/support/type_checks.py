"""Beartype for every annotated function of the packages, at a cost that tests of long loops can bear.

jaxtyping's own decorator makes three calls of one: it checks the arguments, calls the function, and checks arguments
and result. It also has beartype generate the checks, which takes a millisecond, of all functions that are defined: of
those that are never called, and of a nested one whenever the outer function runs.
"""

import collections
import contextlib
import dataclasses
import functools
from typing import Any, TypeAliasType, get_args

import beartype
import jaxtyping

_jaxtyped = jaxtyping.jaxtyped
_with_checks = beartype.beartype(
    conf=beartype.BeartypeConf(
        is_pep484_tower=True,  # an int is accepted as a float
        violation_type=jaxtyping.TypeCheckError,
    )
)
_checks = collections.defaultdict(list)
_is_paused = False


def check_types(packages):
    """Check the functions and dataclasses of packages that are imported from now on."""
    jaxtyping.install_import_hook(packages, "type_checks.checked")
    jaxtyping.jaxtyped = lambda typechecker: typechecker  # what the hook decorates by: `checked` alone does


@contextlib.contextmanager
def unchecked():
    """Check nothing meanwhile."""
    global _is_paused
    before = _is_paused
    _is_paused = True
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        _is_paused = before
        jaxtyping.config.update("jaxtyping_disable", before)


def checked(defined):
    """Decorate a function, or the constructor of a dataclass: each call checks arguments and result."""
    if isinstance(defined, type):
        if dataclasses.is_dataclass(defined) and not hasattr(defined.__init__, "__wrapped__"):
            defined.__init__ = checked(defined.__init__)
        return defined
    if not defined.__annotations__:
        return defined
    if "<locals>" in defined.__qualname__:
        return _jaxtyped(defined, typechecker=_checked_alike)
    if any(map(_names_axes, defined.__annotations__.values())):
        return _jaxtyped(_checked_when_called(defined), typechecker=None)
    return _checked_when_called(defined)


def _names_axes(annotation):
    """Return whether a type has axes, whose lengths are compared between the arguments of a call."""
    if isinstance(annotation, TypeAliasType):
        return _names_axes(annotation.__value__)
    return isinstance(annotation, type(jaxtyping.AbstractArray)) or any(map(_names_axes, get_args(annotation)))


def _checked_when_called(function):
    """Generate the checks of a function at its first call."""
    with_checks = None

    @functools.wraps(function)
    def checked_function(*args, **kwargs):
        __tracebackhide__ = True
        nonlocal with_checks
        if _is_paused:
            return function(*args, **kwargs)
        if with_checks is None:
            _resolve(function)
            with_checks = _with_checks(function)
        return with_checks(*args, **kwargs)

    return checked_function


def _resolve(function):
    """Evaluate annotations that are text. What a module imports for type checkers only is not checked."""
    for name, annotation in function.__annotations__.items():
        if isinstance(annotation, str):
            function.__annotations__[name] = Any
            with contextlib.suppress(NameError):
                function.__annotations__[name] = eval(annotation, function.__globals__)


def _checked_alike(function):
    """Return the checks of a function that jaxtyping made: it has another's signature, and does nothing.

    Functions that only differ in the values of their defaults share their checks.
    """
    optional = len(function.__defaults__ or ()), frozenset(function.__kwdefaults__ or ())
    alike = _checks[function.__module__, function.__code__, optional]
    for annotations, with_checks in alike:  # annotations need not be hashable
        if annotations == function.__annotations__:
            return with_checks
    alike.append((function.__annotations__, _with_checks(function)))
    return alike[-1][1]
