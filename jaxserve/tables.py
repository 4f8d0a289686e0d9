"""Tables and sizes as text, for the commands that describe a model."""

from collections.abc import Sequence


def size_text(num_bytes: int) -> str:
    """Return a number of bytes in GiB, or in MiB where it is less than 1.00 GiB."""
    return f"{num_bytes / 2**30:.2f} GiB" if round(num_bytes / 2**30, 2) >= 1 else f"{num_bytes / 2**20:.2f} MiB"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines, with columns of equal width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)
