"""What runs an operation."""

from typing import Literal, get_args

Implementation = Literal["xla", "sm90"]
"""XLA, which runs anywhere, or a Mosaic kernel for Hopper GPUs."""


def check_implementation(implementation: str) -> None:
    """Raise ValueError for an unknown implementation."""
    if implementation not in get_args(Implementation):
        known = ", ".join(map(repr, get_args(Implementation)))
        raise ValueError(f"unknown implementation {implementation!r}, there is {known}")


def is_sm90(implementation: str) -> bool:
    """Return true if a kernel runs the operation. Raises ValueError for an unknown implementation."""
    check_implementation(implementation)
    return implementation == "sm90"
