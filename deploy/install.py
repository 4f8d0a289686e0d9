"""Install jaxserve from a clone into a virtual environment: the CUDA build of jax where there is an NVIDIA GPU.

    python3.12 deploy/install.py .venv               # what `make serve` does
    python3.12 deploy/install.py .venv --extra dev   # what `make test` does
    python3.12 deploy/install.py .venv --dry-run     # print the commands only

Which CUDA it is follows from the driver. ACCELERATOR=cpu, cuda12 or cuda13 in the environment overrides that. A jax
with CUDA that the interpreter has already, as in images for GPUs, is used as it is.
"""

import argparse
import importlib.metadata
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
ACCELERATORS = ("cpu", "cuda12", "cuda13")
DRIVER_VERSION = pathlib.Path("/proc/driver/nvidia/version")
OLDEST_DRIVERS = {"cuda13": 580, "cuda12": 525}
"""First number of the oldest driver that runs programs of a CUDA, newest first."""

OLDEST_GPU_OF_CUDA_13 = 7.5
"""Compute capability: CUDA 13 has dropped Volta and what came before."""


class Gpu(NamedTuple):
    """The NVIDIA GPU of this machine that needs the oldest CUDA."""

    name: str
    driver: str
    capability: float | None
    """None if only the driver is known."""


def find_gpu() -> Gpu | None:
    """Return the GPU that nvidia-smi lists or, where that does not work, what the driver says in /proc."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
        result = subprocess.run(query, capture_output=True, text=True, check=False)
        rows = re.findall(r"^(.+), *(\d[\d.]*), *(\d+\.\d+) *$", result.stdout, re.MULTILINE)
        if result.returncode == 0 and rows:
            return min((Gpu(name, driver, float(capability)) for name, driver, capability in rows), key=_capability)
    if DRIVER_VERSION.exists():
        found = re.search(r"NVRM version:.*?\s(\d+\.\d[\d.]*)\s", DRIVER_VERSION.read_text())
        if found:
            return Gpu("an NVIDIA GPU", found[1], None)
    return None


def _capability(gpu: Gpu) -> float:
    return gpu.capability or 0.0


def choose(gpu: Gpu | None) -> tuple[str, str]:
    """Return the accelerator for a GPU, one of ACCELERATORS, and the reason."""
    if gpu is None:
        return "cpu", "no NVIDIA GPU was found"
    what = f"{gpu.name}, driver {gpu.driver}"
    for accelerator, oldest in OLDEST_DRIVERS.items():
        is_dropped = accelerator == "cuda13" and gpu.capability is not None and gpu.capability < OLDEST_GPU_OF_CUDA_13
        if int(gpu.driver.split(".")[0]) >= oldest and not is_dropped:
            return accelerator, what
    return "cpu", f"{what} is too old: CUDA 12 needs a driver of version {OLDEST_DRIVERS['cuda12']} or newer"


def has_already(accelerator: str) -> bool:
    """Return true if this interpreter has jax with the plugin for this CUDA, in the version of constraints.txt."""
    pinned = re.search(r"^jax==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    names = ("jax", f"jax-{accelerator}-plugin")
    try:
        return pinned is not None and all(importlib.metadata.version(name) == pinned[1] for name in names)
    except importlib.metadata.PackageNotFoundError:
        return False


def commands(venv: str, accelerator: str, extras: list[str], *, is_there: bool) -> list[list[str]]:
    """Return the commands that install. `is_there`: the interpreter has jax with CUDA, which the environment uses."""
    wanted = [*extras, *([] if accelerator == "cpu" or is_there else [accelerator])]
    package = f"{ROOT}[{','.join(wanted)}]" if wanted else str(ROOT)
    create = [sys.executable, "-m", "venv", *(["--system-site-packages"] if is_there else []), venv]
    python = str(pathlib.Path(venv, "bin", "python"))
    # Byte-compiling all packages takes as long as everything else; what is imported is compiled then.
    pip = [python, "-m", "pip", "install", "--no-compile", "--disable-pip-version-check", "--progress-bar", "off"]
    return [create, [*pip, "-c", str(ROOT / "constraints.txt"), "-e", package]]


def main() -> int:
    """Run the commands, or print them. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Install jaxserve from a clone into a virtual environment.")
    parser.add_argument("venv", help="directory of the environment, which is created where there is none")
    parser.add_argument("--extra", action="append", default=[], metavar="NAME", help="of pyproject.toml; repeatable")
    parser.add_argument("--dry-run", action="store_true", help="print the commands only")
    args = parser.parse_args()
    accelerator, why = os.environ.get("ACCELERATOR", ""), "as ACCELERATOR says"
    if not accelerator:
        accelerator, why = choose(find_gpu())
    if accelerator not in ACCELERATORS:
        parser.error(f"ACCELERATOR is {accelerator!r}; it must be one of {', '.join(ACCELERATORS)}")
    is_there = accelerator != "cpu" and has_already(accelerator)
    size = ", some 3 GB of CUDA libraries" if accelerator != "cpu" and not is_there else ""
    print(f"installing jaxserve for {accelerator} into {args.venv} ({why}){size}", file=sys.stderr, flush=True)
    for command in commands(args.venv, accelerator, args.extra, is_there=is_there):
        if args.dry_run:
            print(shlex.join(command))
        elif code := run(command):
            return code
    return 0


def run(command: list[str]) -> int:
    """Run a command, and print one line for each package it downloads. If it fails, print all it has said. Returns its
    exit code.
    """
    start = time.monotonic()
    said, number = [], 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            seconds = time.monotonic() - start
            if found := re.match(r"Collecting (\S+)", line):
                number += 1
                print(f"  {seconds:4.0f} s  package {number}: {found[1]}", file=sys.stderr, flush=True)
            elif line.startswith(("Installing collected packages", "Building wheels")):
                print(f"  {seconds:4.0f} s  {line.split(':')[0].lower()}", file=sys.stderr, flush=True)
    if process.returncode:
        sys.stderr.writelines(said)
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
