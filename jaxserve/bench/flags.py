"""Flags that several benchmarks have, and values of flags."""

import argparse
import math
from collections.abc import Callable
from typing import Any

from jaxserve.arguments import Parser
from jaxserve.bench.shapes import SHAPES


def add_flag(parser: Parser, *names: str, **options: Any) -> None:
    """Add a flag that describes the workload."""
    parser.add_flag("workload", *names, **options)


def add_shape(parser: Parser) -> None:
    """Add --shape."""
    add_flag(parser, "--shape", choices=sorted(SHAPES), help="random weights of this shape, in place of a model")


def add_number(parser: Parser, name: str, default: int, text: str, *, least: int = 1) -> None:
    """Add a flag for a whole number, with its default in the help."""
    add_flag(parser, name, type=at_least(least), default=default, metavar="N", help=f"{text}; default: {default}")


def at_least(least: int) -> Callable[[str], int]:
    """Return the parser of whole numbers that are not smaller."""

    def number(given: str) -> int:
        if (value := int(given)) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number


def positive(text: str) -> float:
    """Parse a positive number. Raises argparse.ArgumentTypeError."""
    if not 0 < (value := float(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text}")
    return value
