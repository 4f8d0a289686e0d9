"""Engines that load programs which were compiled ahead of time, here for the CPU."""

import dataclasses
import functools
import shutil

import jax
import msgspec
import pytest
from engine_harness import GOLDENS
from jax.experimental.compilation_cache import compilation_cache

from jaxserve.config import EngineConfig
from jaxserve.engine import startup
from jaxserve.errors import ConfigError
from jaxserve.execution.programs import shipped as shipped_module
from jaxserve.execution.programs.lowering import Job, settings_of, versions, write_lowered
from jaxserve.execution.programs.shipped import LOWERED, MANIFEST, Manifest, write_executable, write_manifest
from jaxserve.execution.programs.spec import StepSpec

CONFIG = EngineConfig(
    model=str(GOLDENS / "llama_biases_linear_rope"),
    max_model_len=64,
    max_num_seqs=2,
    max_num_batched_tokens=40,
    kv_cache_memory=2**20,
    warmup="full",
    compilation_cache_dir="",
)


@pytest.fixture(scope="module", autouse=True)
def _compiled_here():
    """Turn off jax's cache, which other tests fill: on a CPU, what jax has loaded from it cannot be written again."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # only a new one asks whether it is turned on
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


def start(config):
    engine, info = startup.start_engine(config, mesh=None, progress=False)
    return engine.runner, info


def write_folder(folder, runner, *, only_lowered=()):
    """Write what `jaxserve compile` does, of programs compiled here."""
    builder, settings = runner.builder, settings_of(runner.builder)
    programs = builder.shapes.programs
    executables = [program for program in programs if program not in only_lowered]
    for program in programs:
        exported = builder.export(program, runner.num_blocks)
        write_lowered(folder / LOWERED, settings, Job(program, runner.num_blocks), exported)
    for program in executables:
        write_executable(folder, program, runner.steps[program])
    manifest = Manifest(
        model="m",
        settings=settings,
        versions=versions(),
        num_blocks=runner.num_blocks,
        executables=executables,
        lowered=programs,
    )
    write_manifest(folder, manifest)
    return manifest


@pytest.fixture(scope="module")
def folder(tmp_path_factory, _compiled_here):
    folder = tmp_path_factory.mktemp("programs")
    runner, _ = start(CONFIG)
    write_folder(folder, runner, only_lowered=runner.builder.shapes.programs[-1:])
    runner.close()
    return folder


def with_programs(folder, **options):
    return dataclasses.replace(CONFIG, programs=str(folder), **options)


def test_loaded_programs_are_not_compiled(folder):
    runner, _ = start(with_programs(folder))
    try:
        assert runner.num_compiles == 1  # the one that is only lowered there
        assert len(runner.steps.items()) == len(runner.builder.shapes.programs)
        runner.run_empty_steps()
    finally:
        runner.close()


def test_a_damaged_program_is_compiled(folder, tmp_path, caplog):
    copy = shutil.copytree(folder, tmp_path / "programs")
    damaged, gone, *_ = (copy / shipped_module.EXECUTABLES).iterdir()
    damaged.write_bytes(damaged.read_bytes()[:-1])
    gone.unlink()
    runner, _ = start(with_programs(copy))
    runner.close()
    assert runner.num_compiles == 3  # with the one that is only lowered there
    assert "is compiled instead of loaded: it is damaged" in caplog.text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_num_seqs": 3}, "max_num_seqs differs: 2 there, 3 here"),
        ({"max_model_len": 48}, "max_model_len differs: 64 there, 48 here"),
        ({"block_size": 8}, "block_size differs: 16 there, 8 here"),
        ({"dtype": "bfloat16"}, "dtype differs: float32 there, bfloat16 here"),
        ({"hf_overrides": {"rope_theta": 5.0}}, "the model's config.json differs"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype differs: auto there, fp8 here"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative_config differs"),
        ({"quantization": "int8"}, r"the format of the weights \(quantization\) differs"),
        ({"tensor_parallel_size": 2}, r"are for .*\(1 along tensor\), but the engine has .*\(2 along tensor\)"),
        ({"kv_cache_memory": 2**19}, r"a KV cache of \d+ blocks, but the device's memory holds \d+"),
    ],
)
def test_programs_of_another_engine_are_refused_by_name(folder, options, named):
    with pytest.raises(ConfigError, match=f"programs: .*{named}"):
        start(with_programs(folder, **options))


def test_all_that_may_differ_has_a_name():
    assert shipped_module.NAMES.keys() == set(StepSpec.__struct_fields__)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (["versions"], {"jax": "0.1", "jaxlib": "0.1", "code": "x"}, "compiled by jax 0.1, this is"),
        (["versions"], None, "does not say which versions"),
        (["versions", "code"], "0", "compiled by another version of jaxserve: compile them again"),
        (["settings", "mesh", "device_kind"], "NVIDIA H200", "are for NVIDIA H200 .*, but the engine has cpu"),
    ],
)
def test_programs_of_another_version_or_device_are_refused_by_name(folder, tmp_path, path, value, named):
    manifest = msgspec.msgpack.decode((folder / MANIFEST).read_bytes())
    functools.reduce(dict.__getitem__, path[:-1], manifest)[path[-1]] = value
    (tmp_path / MANIFEST).write_bytes(msgspec.msgpack.encode(manifest))
    with pytest.raises(ConfigError, match=f"programs: .*{named}"):
        start(with_programs(tmp_path))


def test_what_is_no_folder_of_programs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no folder of `jaxserve compile`"):
        start(with_programs(tmp_path))
    (tmp_path / MANIFEST).write_bytes(b"\xc1")
    with pytest.raises(ConfigError, match="cannot be read"):
        start(with_programs(tmp_path))
