"""`jaxserve compile`: the programs of an engine for GPUs that are not there, in a folder that `--programs` names."""

import pathlib
import shutil
from collections.abc import Callable

import msgspec

from jaxserve.config import EngineConfig
from jaxserve.engine.startup import check_kernels, programs_of
from jaxserve.errors import ConfigError
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.execution.programs.kinds import Begin, Finish, Forward, PlainDecode, Program
from jaxserve.execution.programs.lowering import Job, settings_of, versions, write_lowered
from jaxserve.execution.programs.shipped import LOWERED, MANIFEST, Manifest, write_executable, write_manifest
from jaxserve.gpus import Gpu
from jaxserve.planning.absent import can_compile
from jaxserve.planning.sizes import Absent, compile_program, declare, name_of, prepare_compilers, sizes_of


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """What a folder got."""

    num_executables: int
    num_lowered: int
    num_bytes: int
    num_blocks: int


def compile_ahead(
    config: EngineConfig, gpu: Gpu, folder: pathlib.Path, *, name: str, progress: Callable[[str], object] = str
) -> Written:
    """Compile an engine's programs into a folder, which is replaced if it is one of these: with `config.warmup` "full"
    all of them, otherwise those without which requests would wait. Raises StartupError, and ConfigError without a
    compiler.
    """
    if not can_compile():
        raise ConfigError(
            "compiling for an absent GPU needs jax's CUDA plugin: pip install jax-cuda13-plugin jax-cuda13-pjrt, of "
            "jax's own version; no GPU or driver is needed"
        )
    if (known := versions()) is None:
        raise ConfigError("programs cannot be shipped by an installation whose code is not in files of its own")
    engine = declare(config, gpu, to_compile=True)
    check_kernels(engine.plan.builder)
    prepare_compilers()
    num_blocks = sizes_of(engine).num_blocks
    _empty(folder)
    builder = engine.plan.builder
    tracing = StepBuilder(builder.spec, settings_of(builder).mesh.mesh())  # as the processes that lower
    programs = programs_of(builder, engine.plan.warmup)
    executables: list[Program] = []
    for program in programs:
        progress(name_of(program))
        exported = tracing.export(program, num_blocks)
        write_lowered(folder / LOWERED, settings_of(builder), Job(program, num_blocks), exported)
        if may_be_shipped(engine, program):
            compiled = compile_program(engine, program).compiled
            write_executable(folder, program, compiled)
            executables.append(program)
    write_manifest(
        folder,
        Manifest(
            model=name,
            settings=settings_of(builder),
            versions=known,
            num_blocks=num_blocks,
            executables=executables,
            lowered=programs,
        ),
    )
    num_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return Written(
        num_executables=len(executables), num_lowered=len(programs), num_bytes=num_bytes, num_blocks=num_blocks
    )


def may_be_shipped(engine: Absent, program: Program) -> bool:
    """Return true if a program is compiled as well without the device as on it: XLA does not try out its matrix
    products there, and does not sort, for which it has no sizes without a device.
    """
    with_layers = isinstance(program, PlainDecode | Forward | Begin | Finish)
    return with_layers and not engine.plan.builder.is_tuned(program)


def _empty(folder: pathlib.Path) -> None:
    """Make the folder, or empty it if it is one of programs. Raises ConfigError for another one that is not empty."""
    if (folder / MANIFEST).is_file():
        shutil.rmtree(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty, and no folder of programs")
