"""Find docstrings that cannot be understood by themselves: `python tests/support/lint_docstrings.py FOLDER...`.

A docstring that begins with "Of", "As", "The same" or "Whether" leaves out what it describes, and so does one of a
single word. ruff checks what it can of the rest (D).
"""

import ast
import pathlib
import re
import sys
from collections.abc import Iterator

BEGINNING = re.compile(r"(?:Of|As|The same|Whether)\b|\S+$")


def docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the docstrings of a module, also those of constants and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def main(folders: list[str]) -> int:
    """Print each of these docstrings; return 1 if there are any, else 0."""
    found = [
        f"{path}:{docstring.lineno}: begins with {match[0]!r}: name what it describes"
        for folder in folders
        for path in sorted(pathlib.Path(folder).rglob("*.py"))
        for docstring in docstrings(ast.parse(path.read_bytes()))
        if (match := BEGINNING.match(str(docstring.value).strip()))
    ]
    sys.stdout.writelines(line + "\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
