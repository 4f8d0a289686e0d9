"""Compile for an H200 on a machine without a GPU, and read the compilers' reports.

This shows in CI what would otherwise need a GPU: spilled registers, shared memory, copies of the KV pool, split command
buffers. The executables are not autotuned and cannot run. It needs the CUDA plugin's wheels (no CUDA, no driver): `make
deviceless` installs them in a folder of their own, because jax warns about a plugin without a driver at each start.
"""

import collections
import functools
import importlib.util
import math
import os
import pathlib
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

from pallas_kernels import ptx

TARGET_CONFIG = pathlib.Path(__file__).with_name("h200_target_config.txtpb")
"""XLA's description of an H200: driver 580, CUDA 13."""

PLUGIN_FOLDER = pathlib.Path(sys.prefix) / "deviceless"
"""Folder in which `make deviceless` installs the plugin."""

CONTAINERS = {"kCommandBuffer", "kSequential", "kConditional", "kWhile", "kAsyncStart", "kAsyncDone"}
"""Thunks that do nothing but hold others, or make one stream wait for another."""

H200 = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)


class KernelResources(NamedTuple):
    """Resources of one Mosaic kernel on a multiprocessor, as reported by ptxas."""

    name: str
    num_registers: int
    spill_bytes: int
    stack_bytes: int


class DevicelessExecutable(NamedTuple):
    """A program compiled for an H200."""

    compiled: jax.stages.Compiled
    kernels: tuple[KernelResources, ...]
    """The Mosaic kernels that this compilation built; those built earlier in this process are missing."""
    thunks: collections.Counter[str]
    """Number of thunks of each kind called from the host: a whole program in one CUDA graph is 1 kCommandBuffer."""
    num_launches: int
    """Kernels, library calls and copies of a run, those inside command buffers included."""

    @property
    def spill_bytes(self) -> int:
        """Bytes that the kernels spill from registers, stores and loads."""
        return sum(kernel.spill_bytes for kernel in self.kernels)

    @property
    def temp_bytes(self) -> int:
        """Device memory for temporaries."""
        memory = self.compiled.memory_analysis()
        assert memory is not None, "XLA for GPUs always has one"
        return memory.temp_size_in_bytes

    @property
    def host_outputs(self) -> list[str]:
        """Type and shape of each output that the program itself copies to the host, as "s32[64]"."""
        text = self.compiled.as_text()
        assert text is not None, "XLA for GPUs always has one"
        _, outputs = text.splitlines()[0].split("->")
        return re.findall(r"(\w+\[[\d,]*\])\{[\d,]*:[^}]*S\(5\)", outputs)

    def copies_of(self, shape: tuple[int, ...]) -> list[str]:
        """Return the instructions that copy an array of this shape; for a donated KV pool there should be none."""
        wanted = "[" + ",".join(map(str, shape)) + "]"
        copies = re.compile(r"^\s*(?:ROOT )?%?\S+ = \S*" + re.escape(wanted) + r"\S* (?:copy|copy-start)\(")
        text = self.compiled.as_text()
        assert text is not None, "XLA for GPUs always has one"
        return [line.strip() for line in text.splitlines() if copies.match(line)]


def is_available() -> bool:
    """Return true if the CUDA plugin is installed."""
    _find_plugin()
    return importlib.util.find_spec("jax_plugins") is not None and (
        importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
    )


def h200_mesh(shape: tuple[int, ...] = (1,), axis_names: tuple[str, ...] = ("x",)) -> Mesh:
    """Return a mesh of abstract H200s of one host. Raises RuntimeError without the plugin."""
    return absent_mesh(TARGET_CONFIG.read_text(), shape, axis_names)


def absent_mesh(target_config: str, shape: tuple[int, ...], axis_names: tuple[str, ...]) -> Mesh:
    """Return a mesh of abstract GPUs of one host, as XLA's `target_config` describes them. Raises RuntimeError without
    the plugin.
    """
    return topologies.make_mesh(_topology(math.prod(shape), target_config), shape, axis_names)


def compile_for_h200(
    fn: Callable[..., Any],
    *args: Any,
    static_argnums: tuple[int, ...] = (),
    donate_argnums: tuple[int, ...] = (),
    compiler_options: dict[str, Any] | None = None,
) -> DevicelessExecutable:
    """Jit `fn` and compile it for H200s.

    `args` are pytrees of `jax.ShapeDtypeStruct` (or arrays, whose values do not matter); those without a sharding are
    placed on one H200, others have shardings over an `h200_mesh`. Raises RuntimeError without the plugin, for a
    kernel that uses registers of a wgmma too early (see `ptx`) or has a part of an array that begins at no multiple
    of 256 bytes, and whatever the compilers raise.
    """
    replicated = NamedSharding(h200_mesh(), PartitionSpec())

    def on_h200(x: Any) -> jax.ShapeDtypeStruct:
        sharding = x.sharding if isinstance(x, jax.ShapeDtypeStruct) and x.sharding is not None else replicated
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    placed = [arg if index in static_argnums else jax.tree.map(on_h200, arg) for index, arg in enumerate(args)]
    jitted = jax.jit(fn, static_argnums=static_argnums, donate_argnums=donate_argnums)

    def lower() -> jax.stages.Lowered:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
            return jitted.lower(*placed)

    return compile_lowered(lower, compiler_options=compiler_options)


def compile_lowered(
    lower: Callable[[], jax.stages.Lowered], *, compiler_options: dict[str, Any] | None = None
) -> DevicelessExecutable:
    """Compile what `lower` returns, traced for an `h200_mesh`, and read the reports."""
    lowered = lower()
    with tempfile.TemporaryDirectory() as folder, without_cache():
        report = pathlib.Path(folder, "ptxas.txt")
        with _reporting_kernels(report):
            # This dumps more than the thunks; as text it would be hundreds of megabytes for a large model.
            options = {"xla_dump_to": folder, "xla_dump_hlo_as_proto": True}
            # As for a GPU, even if this process has other options for its CPU.
            options |= {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
            compiled = lowered.compile(options | (compiler_options or {}))
        text = report.read_text()
        kernels, entries = tuple(_kernels(text)), list(ptx.entries(text))
        if len(kernels) != len(entries):
            raise RuntimeError(f"Mosaic printed PTX of {len(entries)} kernels, but what ptxas says of {len(kernels)}")
        for name, entry in entries:
            if early := ptx.used_in_flight(entry):
                raise RuntimeError(f"{name} uses registers that a wgmma still writes or reads: {early[0]}")
        hlo = compiled.as_text()
        assert hlo is not None, "XLA for GPUs always has one"
        if parts := misaligned_parts(hlo):
            raise RuntimeError(
                f"kernels have parts of arrays that begin at no multiple of 256 bytes, and would refuse them: {parts}"
            )
        thunks = _thunks(pathlib.Path(folder))
        return DevicelessExecutable(
            compiled=compiled,
            kernels=kernels,
            thunks=collections.Counter(kind for indent, kind in thunks if not indent),
            num_launches=sum(kind not in CONTAINERS for _, kind in thunks),
        )


def misaligned_parts(text: str) -> list[str]:
    """Return the slices in a compiled program that kernels read or write where they are, and would refuse.

    XLA lets a kernel have a contiguous slice of another array in place, wherever it begins (a "dynamic-slice fusion"):
    if its place is constant, or changes by a constant from one turn of a loop to the next.
    """
    found: list[str] = []
    for fusion in re.findall(r"^%dynamic-slice-fusion\S* \(.*?^}", text, re.MULTILINE | re.DOTALL):
        if "mosaic_gpu" not in fusion:
            continue
        for name, dtype, shape, limits in re.findall(
            r"(%\S+) = (\w+)\[[\d,]*\]\S* slice\(%(\S+?)\), slice=\{(.*?)\}", fusion
        ):
            sizes = re.search(rf"%{re.escape(shape)} = \w+\[([\d,]*)\]", fusion)
            assert sizes is not None
            offset = 0
            for size, start in zip(sizes[1].split(","), re.findall(r"\[(\d+):", limits), strict=True):
                offset = offset * int(size) + int(start)
            num_bits = int(re.sub(r"\D", "", dtype.split("e")[0]) or 8)
            if offset * num_bits // 8 % 256:
                found.append(f"{name} of {dtype}[{sizes[1]}] at {limits}")
        for name, array, config in re.findall(
            r"(%\S+) = (\w+\[[\d,]*\])\S* dynamic-(?:update-)?slice\(.*\"dynamic_slice_config\":\{(.*?)\}", fusion
        ):
            places = [int(place) for place in re.findall(r"\"byte_(?:offset|stride)\":\"(\d+)\"", config)]
            if any(place % 256 for place in places):
                found.append(f"{name} of {array} at bytes {places}")
    return found


@functools.cache
def _topology(num_devices: int, target_config: str) -> Any:
    if not is_available():
        raise RuntimeError("compiling for an absent GPU needs jax's CUDA plugin: `make deviceless` installs it")
    return topologies.get_topology_desc(platform="cuda", topology=f"1x1x{num_devices}", target_config=target_config)


def _find_plugin() -> None:
    """Add the plugin to sys.path. Has no effect once jax has been asked for its devices, when it looks for plugins."""
    if PLUGIN_FOLDER.is_dir() and str(PLUGIN_FOLDER) not in sys.path:
        sys.path.append(str(PLUGIN_FOLDER))


@contextmanager
def without_cache() -> Iterator[None]:
    """Keep programs out of the persistent cache: cached ones have no reports and cannot be loaded without a GPU.

    The cache itself cannot be turned off any more once it was used.
    """
    threshold = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", math.inf)
    try:
        yield
    finally:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", threshold)


@contextmanager
def _reporting_kernels(path: pathlib.Path) -> Iterator[None]:
    """Redirect stdout to the file `path`, with Mosaic's PTX and ptxas reports for each kernel that it compiles.

    Mosaic prints them. If it were given a folder, it would also write every pass over every kernel, in Python and in
    C++, which takes as long as the compilation.
    """
    sys.stdout.flush()
    stdout = os.dup(1)
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = os.environ["MOSAIC_GPU_DUMP_PTX"] = "1"
    try:
        with path.open("wb") as file:
            os.dup2(file.fileno(), 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        del os.environ["MOSAIC_GPU_DUMP_PTXAS"], os.environ["MOSAIC_GPU_DUMP_PTX"]


def _kernels(reports: str) -> Iterator[KernelResources]:
    entries = re.split(r"Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?'", reports)
    for name, report in zip(entries[1::2], entries[2::2], strict=True):
        spilled = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
        registers = re.findall(r"Used (\d+) registers", report)
        yield KernelResources(
            name=name,
            num_registers=max(map(int, registers)),
            spill_bytes=sum(int(stores) + int(loads) for _, stores, loads in spilled),
            stack_bytes=max(int(stack) for stack, _, _ in spilled),
        )


def _thunks(folder: pathlib.Path) -> list[tuple[str, str]]:
    """Indentation and kind of each thunk, those in a container under it and indented."""
    # The second file is there if the passes made command buffers.
    path = max(folder.glob("*thunk_sequence*.txt"), key=lambda path: len(path.name))
    return re.findall(r"^( *)\d+: (k\w+)", path.read_text(), flags=re.MULTILINE)
