"""What is published: the wheel holds both packages and the built-in models, and git holds no foreign host."""

import os
import pathlib
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest

from jaxserve.config import DEFAULT_MODEL
from jaxserve.loading.builtin import BUILTIN_MODELS

ROOT = pathlib.Path(__file__).resolve().parents[1]

PACKAGE_SUFFIXES = {".json", ".py", ".md", ".html", ".css", ".js", ".svg", ".txtpb", ".LICENSE"}
NAMES = {"py.typed", "LICENSE"}
MODEL_SUFFIXES = {".json", ".safetensors", ".md", ".jinja"}

# The hosts that files of this project may name: documentation, and what they cite.
HOSTS = {
    "127.0.0.1",
    "arxiv.org",
    "colab.research.google.com",  # where the notebooks can be opened
    "daringfireball.net",  # the author in a copied license, which must stay whole
    "developer.nvidia.com",
    "docs.jax.dev",
    "docs.nvidia.com",
    "docs.vllm.ai",
    "example.org",
    "github.com",
    "huggingface.co",
    "json-schema.org",  # the name of a schema's draft
    "localhost",
    "platform.openai.com",
    "www.apache.org",
    "www.w3.org",  # the name of the SVG namespace
    "x",  # what tests say when any host will do
}


def _tracked_files() -> list[pathlib.Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [ROOT / name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-q"]
    subprocess.run([*build, "-w", str(folder), str(ROOT)], check=True, timeout=300)
    (path,) = folder.glob("jaxserve-*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_the_wheel_holds_every_module_of_both_packages(wheel):
    modules = {str(path.relative_to(ROOT)) for name in ("jaxserve", "pallas_kernels") for path in _python_files(name)}
    assert modules == {name for name in wheel.namelist() if name.endswith(".py")}


def _python_files(package: str) -> list[pathlib.Path]:
    return list((ROOT / package).rglob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("model", BUILTIN_MODELS)
def test_the_wheel_holds_the_built_in_models(wheel, model):
    names = {name.rsplit("/", 1)[1] for name in wheel.namelist() if name.startswith(f"jaxserve/_checkpoints/{model}/")}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"} <= names


@pytest.mark.slow
def test_an_unpacked_wheel_finds_its_models(wheel, tmp_path):
    wheel.extractall(tmp_path)
    code = "import jaxserve.loading.builtin as b, jaxserve.config as c; print(b.resolve_names(c.EngineConfig()).model)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == str(tmp_path / "jaxserve" / "_checkpoints" / DEFAULT_MODEL)


@pytest.mark.slow
def test_the_wheel_holds_nothing_else(wheel):
    odd = []
    for name in wheel.namelist():
        top, *rest = name.split("/")
        suffix = pathlib.PurePosixPath(name).suffix
        if top.endswith(".dist-info"):
            continue
        if rest and rest[0] == "_checkpoints":
            expected = rest[1] in BUILTIN_MODELS and suffix in MODEL_SUFFIXES
        else:
            expected = top in ("jaxserve", "pallas_kernels") and (suffix in PACKAGE_SUFFIXES or rest[-1] in NAMES)
        if not expected:
            odd.append(name)
    assert not odd


@pytest.mark.slow
def test_the_wheel_names_its_command_and_extras(wheel):
    def read(name: str) -> str:
        (path,) = (path for path in wheel.namelist() if path.endswith(f".dist-info/{name}"))
        return wheel.read(path).decode()

    assert "jaxserve = jaxserve.__main__:main" in read("entry_points.txt")
    metadata = read("METADATA")
    assert re.findall(r"^Provides-Extra: (.+)$", metadata, re.M) == ["bench", "cuda12", "cuda13", "dev", "otel", "ray"]
    assert "Requires-Python: >=3.12" in metadata


def test_constraints_are_pinned_versions_and_nothing_else():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", line)] == []


def test_every_dev_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {_normal(name) for name in project["dependencies"] + project["optional-dependencies"]["dev"]}
    pinned = {_normal(line) for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert wanted <= pinned


def _normal(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.match(r"[A-Za-z0-9._-]+", requirement).group()).lower()


def test_git_names_no_host_but_the_known_ones():
    found = []
    for path in _tracked_files():
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue  # weights, images
        found += [
            f"{path.relative_to(ROOT)}: {host}"
            for host in re.findall(r"\bhttps?://(?:[^/@\s]*@)?([A-Za-z0-9.-]*[A-Za-z0-9])", text)
            if host not in HOSTS
        ]
    assert not found
