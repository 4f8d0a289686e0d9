"""`deploy/install.py`: what `make serve` would install, for machines with and without an NVIDIA GPU."""

import os
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORKING = 'printf "%s\\n" {rows}'
"""An nvidia-smi that lists GPUs."""

BROKEN = 'echo "NVIDIA-SMI has failed because it could not communicate with the NVIDIA driver."; exit 9'
PROC = {
    "": "cpu",
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32\nGCC version: 12": "cuda12",
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (a@b)  Sun": "cuda13",
}
"""Texts of /proc/driver/nvidia/version, and what is installed there."""


def dry_run(tmp_path, nvidia_smi, *extra, **environment):
    """Run install.py on a machine with this nvidia-smi (a shell script; None: there is none)."""
    if nvidia_smi is not None:
        command = tmp_path / "nvidia-smi"
        command.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
        command.chmod(0o755)
    return subprocess.run(
        [sys.executable, str(ROOT / "deploy" / "install.py"), "venv", "--dry-run", *extra],
        env={"PATH": f"{tmp_path}:/bin:/usr/bin", **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def installed(result):
    """What pip is told to install from the clone, as extras of the package."""
    assert result.returncode == 0, result.stderr
    create, install = result.stdout.splitlines()
    assert " -m venv " in create
    assert f"-c {ROOT}/constraints.txt" in install
    return re.search(rf"{ROOT}(?:\[(.*)\])?'?$", install)[1]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (["NVIDIA H200, 580.65.06, 9.0"], "cuda13"),
        (["NVIDIA B200, 600.10, 10.0"], "cuda13"),
        (["Tesla T4, 580.82.07, 7.5"], "cuda13"),
        (["NVIDIA H100 80GB HBM3, 570.124.06, 9.0"], "cuda12"),
        (["NVIDIA A100-SXM4-40GB, 525.60.13, 8.0"], "cuda12"),
        (["Tesla V100-SXM2-16GB, 580.65.06, 7.0"], "cuda12"),
        (["NVIDIA H100, 580.65.06, 9.0", "Tesla V100, 580.65.06, 7.0"], "cuda12"),
        (["Tesla K80, 470.57.02, 3.7"], None),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else str(value),
)
def test_the_driver_and_the_gpu_decide_which_cuda_is_installed(tmp_path, rows, expected):
    result = dry_run(tmp_path, WORKING.format(rows=" ".join(f"'{row}'" for row in rows)))
    assert installed(result) == expected
    assert (rows[0] if expected else "too old").split(",")[0] in result.stderr or len(rows) > 1


def test_development_has_its_extra_too(tmp_path):
    smi = WORKING.format(rows="'NVIDIA H200, 580.65.06, 9.0'")
    assert installed(dry_run(tmp_path, smi, "--extra", "dev")) == "dev,cuda13"


@pytest.mark.parametrize("nvidia_smi", [None, BROKEN])
@pytest.mark.parametrize(("text", "expected"), PROC.items(), ids=PROC.values())
def test_without_a_working_nvidia_smi_the_driver_itself_is_asked(tmp_path, monkeypatch, nvidia_smi, text, expected):
    sys.path.insert(0, str(ROOT / "deploy"))
    try:
        import install
    finally:
        sys.path.remove(str(ROOT / "deploy"))
    version = tmp_path / "version"
    if text:
        version.write_text(text)
    if nvidia_smi is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{nvidia_smi}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(install, "DRIVER_VERSION", version)
    accelerator, why = install.choose(install.find_gpu())
    assert accelerator == expected
    assert why


def test_a_machine_without_a_gpu_gets_the_build_for_cpus(tmp_path):
    if pathlib.Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has an NVIDIA driver")
    result = dry_run(tmp_path, None)
    assert installed(result) is None
    assert "no NVIDIA GPU was found" in result.stderr


@pytest.mark.parametrize("accelerator", ["cpu", "cuda12", "cuda13"])
def test_the_environment_overrides_the_choice(tmp_path, accelerator):
    smi = WORKING.format(rows="'NVIDIA H200, 570.00, 9.0'")
    result = dry_run(tmp_path, smi, ACCELERATOR=accelerator)
    assert installed(result) == (None if accelerator == "cpu" else accelerator)


def test_an_unknown_accelerator_is_refused_with_those_that_there_are(tmp_path):
    result = dry_run(tmp_path, None, ACCELERATOR="rocm")
    assert result.returncode == 2
    assert "'rocm'; it must be one of cpu, cuda12, cuda13" in result.stderr


@pytest.mark.parametrize(("version", "is_used"), [("0.11.2", True), ("0.10.0", False)])
def test_a_jax_with_cuda_that_the_interpreter_has_is_not_installed_again(tmp_path, version, is_used):
    for name, number in {"jax": version, "jax_cuda13_plugin": version}.items():
        metadata = tmp_path / "site" / f"{name}-{number}.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    smi = WORKING.format(rows="'NVIDIA H200, 580.65.06, 9.0'")
    result = dry_run(tmp_path, smi, PYTHONPATH=str(tmp_path / "site"))
    assert installed(result) == (None if is_used else "cuda13")
    assert ("--system-site-packages" in result.stdout) == is_used


@pytest.mark.parametrize("cuda", ["12", "13"])
def test_every_library_of_both_cudas_is_pinned(cuda):
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
    assert pins[f"jax-cuda{cuda}-plugin"] == pins[f"jax-cuda{cuda}-pjrt"] == pins["jax"] == pins["jaxlib"]
    suffix = "-cu12" if cuda == "12" else ""
    for name in ("cublas", "cuda-cupti", "cuda-nvcc", "cuda-runtime", "cufft", "cusolver", "cusparse", "nvjitlink"):
        assert f"nvidia-{name}{suffix}" in pins
    for name in ("cudnn", "nccl", "nvshmem"):
        assert f"nvidia-{name}-cu{cuda}" in pins
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"cuda{cuda}" in extras


def test_make_serve_installs_by_it(tmp_path):
    make = ["make", "-n", "serve", f"VENV={tmp_path / 'venv'}", "PYTHON=python3"]
    result = subprocess.run(make, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=True)
    assert f"python3 deploy/install.py {tmp_path / 'venv'}\n" in result.stdout
    assert f"{tmp_path / 'venv'}/bin/jaxserve serve" in result.stdout
