"""One module uses what jax does not promise to keep, and names the version of jax for which it was written."""

import ast
import pathlib

import jax
import jaxlib
import pytest

from pallas_kernels import jax_internals

ROOT = pathlib.Path(jax_internals.__file__).parents[1]
FILES = [path for folder in ("jaxserve", "pallas_kernels", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
MAY_NAME_INTERNALS = {
    "pallas_kernels/jax_internals.py",
    "tests/support/interpreting.py",  # patches the interpreter that kernels are tested in
}


@pytest.mark.parametrize("package", [jax, jaxlib])
def test_the_version_that_internals_were_read_in(package):
    assert package.__version__ == jax_internals.WRITTEN_FOR, (
        f"{package.__name__} is {package.__version__} now: read each function and import of "
        f"{', '.join(sorted(MAY_NAME_INTERNALS))} and pallas_kernels/layout_inference.py against its source, then set "
        "WRITTEN_FOR"
    )


def test_no_other_module_names_internals():
    def names(path):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "_src" in text else ():
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Attribute):
                yield ast.unparse(node)

    users = {path.relative_to(ROOT).as_posix() for path in FILES for name in names(path) if name.startswith("jax._src")}
    assert users == MAY_NAME_INTERNALS


def test_ptxas_is_asked_for_its_version_once(monkeypatch):
    extension = jax_internals.mosaic_gpu_extension()
    versions = iter([90, 91])
    monkeypatch.setattr(extension, "_get_ptxas_isa_version", lambda: next(versions))
    jax_internals.ask_ptxas_once()
    jax_internals.ask_ptxas_once()
    assert [extension._get_ptxas_isa_version() for _ in range(2)] == [90, 90]
