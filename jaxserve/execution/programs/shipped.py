"""A folder of programs that were compiled ahead of time for a kind of device: `jaxserve compile` fills it, an engine
with `programs` loads from it.

It has a manifest, which says for what the programs are; lowered programs, as `lowering` keeps them; and executables,
which need neither lowering nor compiling. Loading an executable runs what is in it, as is so for jax's compilation
cache: a folder is to be trusted like the code of the engine.
"""

import concurrent.futures
import hashlib
import logging
import os
import pathlib
from typing import Any

import jax
import msgspec
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from jaxserve.errors import ConfigError
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.execution.programs.compile import CompiledSteps
from jaxserve.execution.programs.kinds import Program
from jaxserve.execution.programs.lowering import WorkerSettings, settings_of, versions
from jaxserve.execution.programs.spec import StepSpec

logger = logging.getLogger(__name__)

MANIFEST = "manifest.msgpack"
LOWERED = "steps"
EXECUTABLES = "executables"

NAMES = {
    "model": "the model's config.json",
    "dtype": "dtype",
    "kernels": "kernels",
    "block_size": "block_size",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_logprobs": "max_logprobs",
    "kv_cache_dtype": "kv_cache_dtype",
    "kv_scales": "whether the checkpoint has scales of keys and values",
    "speculation": "speculative_config",
    "drafter": "the config.json of what drafts",
    "num_kept_states": "max_cached_states",
    "schemes": "the format of the weights (quantization)",
    "has_peers": "whether the devices reach each other's memory",
    "traits": "the kind of device",
}
"""Fields of a StepSpec, for people."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """For what the programs of a folder are."""

    model: str
    settings: WorkerSettings
    versions: dict[str, str]
    num_blocks: int
    executables: list[Program]
    lowered: list[Program]


class Shipped:
    """The programs of one folder, for one engine.

    Attributes:
        num_blocks: blocks of the KV cache that they are for.
    """

    def __init__(self, folder: pathlib.Path, manifest: Manifest, builder: StepBuilder):
        self._folder = folder
        self._manifest = manifest
        self._builder = builder
        self.num_blocks = manifest.num_blocks

    @property
    def executables(self) -> set[Program]:
        """The programs that need not be lowered."""
        return set(self._manifest.executables)

    @property
    def lowered(self) -> pathlib.Path:
        """The folder of lowered programs."""
        return self._folder / LOWERED

    def load_into(self, steps: CompiledSteps) -> int:
        """Load the executables. Returns how many; one that is damaged, or that this driver does not take, is compiled
        instead, which is logged.
        """
        with concurrent.futures.ThreadPoolExecutor() as pool:
            loaded = list(
                zip(self._manifest.executables, pool.map(self._load, self._manifest.executables), strict=True)
            )
        for program, executable in loaded:
            if executable is not None:
                steps.put(program, executable)
        return sum(executable is not None for _, executable in loaded)

    def _load(self, program: Program) -> jax.stages.Compiled | None:
        mesh = self._builder.model.mesh
        assert isinstance(mesh, Mesh)
        path = _path(self._folder, program)
        try:
            digest, data = path.read_bytes().split(b"\n", 1)
            if digest.decode(errors="replace") != hashlib.sha256(data).hexdigest():
                raise ValueError("it is damaged")
            in_tree, out_tree = self._builder.trees(program, self.num_blocks)
            return serialize_executable.deserialize_and_load(
                data, in_tree, out_tree, execution_devices=list(mesh.devices.flat)
            )
        except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
            logger.warning("%s of %s is compiled instead of loaded: %s", program, self._folder, error)
            return None


def open_shipped(folder: str, builder: StepBuilder) -> Shipped:
    """Open the programs of a folder for an engine. Raises ConfigError, which names what differs, if they are for
    another device, version, model or size.
    """
    path = pathlib.Path(folder).expanduser()
    try:
        data = (path / MANIFEST).read_bytes()
    except OSError as error:
        raise ConfigError(f"programs: {folder} is no folder of `jaxserve compile`: {error.strerror}") from error
    try:
        stated = msgspec.msgpack.decode(data, type=dict[str, Any])
        _check_versions(folder, stated.get("versions"))
        manifest = msgspec.msgpack.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"programs: {path / MANIFEST} cannot be read: {error}") from error
    _check(folder, manifest.settings, settings_of(builder))
    return Shipped(path, manifest, builder)


def _check_versions(folder: str, theirs: Any) -> None:
    ours = versions()
    if not isinstance(theirs, dict) or ours is None:
        raise ConfigError(f"programs: {folder} does not say which versions its programs are of")
    for name, version in ours.items():
        if theirs.get(name) != version:
            what = "another version of jaxserve" if name == "code" else f"{name} {theirs.get(name)}"
            here = "" if name == "code" else f", this is {version}"
            raise ConfigError(f"programs: those of {folder} were compiled by {what}{here}: compile them again")


def _check(folder: str, theirs: WorkerSettings, ours: WorkerSettings) -> None:
    if theirs.mesh != ours.mesh:
        raise ConfigError(
            f"programs: those of {folder} are for {_devices(theirs)}, but the engine has {_devices(ours)}"
        )
    for name in StepSpec.__struct_fields__:
        their, our = getattr(theirs.spec, name), getattr(ours.spec, name)
        if their != our:
            values = f": {their} there, {our} here" if isinstance(our, int | str) else ""
            raise ConfigError(f"programs: those of {folder} are for another engine: {NAMES[name]} differs{values}")
    if theirs.jax_options != ours.jax_options:
        raise ConfigError(f"programs: those of {folder} were lowered with other options of jax")


def _devices(settings: WorkerSettings) -> str:
    mesh = settings.mesh
    axes = ", ".join(f"{size} along {name}" for name, size in zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    return f"{mesh.device_kind} ({axes})"


def write_manifest(folder: pathlib.Path, manifest: Manifest) -> None:
    """Write the manifest, last: a folder without one is not complete."""
    (folder / MANIFEST).write_bytes(msgspec.msgpack.encode(manifest))


def write_executable(folder: pathlib.Path, program: Program, compiled: jax.stages.Compiled) -> int:
    """Write an executable. Returns its number of bytes."""
    data, _, _ = serialize_executable.serialize(compiled)
    path = _path(folder, program)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_bytes(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
    os.replace(temporary, path)
    return len(data)


def _path(folder: pathlib.Path, program: Program) -> pathlib.Path:
    digest = hashlib.sha256(msgspec.msgpack.encode(program, order="sorted")).hexdigest()[:16]
    return folder / EXECUTABLES / f"{type(program).__name__}-{digest}"
