"""Pictures and tables of notebooks: SVG, HTML and text, without a library."""

import dataclasses
import html
import pathlib
from collections.abc import Sequence

COLORS = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#edc948", "#76b7b2", "#e15759", "#9c755f")
"""Colors of devices, in order; with more devices they repeat."""

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclasses.dataclass(frozen=True)
class Picture:
    """An SVG picture, which notebooks show."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<picture of {len(self.svg):,} bytes of SVG>"

    def save(self, path: str | pathlib.Path) -> None:
        """Write the picture to a file."""
        pathlib.Path(path).write_text(self.svg)


class Drawing:
    """An SVG picture under construction; lengths are pixels."""

    def __init__(self, width: float, height: float):
        self._size = f"{width:g}", f"{height:g}"
        self._parts = [self._element("rect", x=0, y=0, width=width, height=height, fill="#ffffff")]

    def rect(self, x: float, y: float, width: float, height: float, *, fill: str, title: str = "") -> None:
        """Add a filled rectangle; `title` appears when the pointer is on it."""
        content = f"<title>{html.escape(title)}</title>" if title else ""
        self._parts.append(self._element("rect", content, x=x, y=y, width=width, height=height, fill=fill))

    def text(self, x: float, y: float, text: str, *, anchor: str = "start", fill: str = "#333333") -> None:
        """Add a line of text, whose baseline is at y."""
        self._parts.append(self._element("text", html.escape(text), x=x, y=y, text_anchor=anchor, fill=fill))

    def line(self, x1: float, y1: float, x2: float, y2: float, *, stroke: str = "#333333") -> None:
        """Add a thin line."""
        self._parts.append(self._element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=stroke))

    def picture(self) -> Picture:
        """Return the finished picture."""
        width, height = self._size
        return Picture(
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">{"".join(self._parts)}</svg>'
        )

    @staticmethod
    def _element(name: str, content: str = "", **attributes: float | str) -> str:
        texts = (
            f'{key.replace("_", "-")}="{value if isinstance(value, str) else format(round(value, 1), "g")}"'
            for key, value in attributes.items()
        )
        return f"<{name} {' '.join(texts)}>{content}</{name}>" if content else f"<{name} {' '.join(texts)}/>"


def size(num_bytes: float) -> str:
    """Format a number of bytes, such as "1.5 MiB"."""
    unit = 0
    while num_bytes >= 1024 and unit < len(_UNITS) - 1:
        num_bytes /= 1024
        unit += 1
    return f"{num_bytes:.3g} {_UNITS[unit]}" if num_bytes < 1000 else f"{num_bytes:.0f} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Format a time, such as "1.5 ms"."""
    scale, unit = (1.0, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "us")
    return f"{seconds * scale:.3g} {unit}"


def html_table(header: Sequence[str], rows: Sequence[Sequence[str | Picture]], *, title: str = "") -> str:
    """Format a table as HTML, under its title; cells are texts or pictures."""
    above = f"<p>{html.escape(title)}</p>" if title else ""
    head = "".join(f'<th style="text-align:left">{html.escape(name)}</th>' for name in header)
    cells = ("".join(f'<td style="text-align:left">{_cell(cell)}</td>' for cell in row) for row in rows)
    return f"{above}<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _cell(cell: str | Picture) -> str:
    return cell.svg if isinstance(cell, Picture) else html.escape(cell)
