"""Resolve model names to directories and files, the first step for any `model` argument. No jax.

The built-in models are in `checkpoints/` of a source tree and in `jaxserve/_checkpoints/` of an installed wheel.
"""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import get_args

from jaxserve.config import EngineConfig, StoredFormat
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.loading import hub
from jaxserve.loading.json_files import read_config
from jaxserve.loading.model_types import check_model_type
from jaxserve.loading.overrides import check_format, with_overrides
from jaxserve.loading.pickles import PICKLED_SUFFIXES, why_not_read

BUILTIN_MODELS = ("scribe-15m", "scribe-2m")

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_CHECKPOINT_ROOTS = (_PACKAGE / "_checkpoints", _PACKAGE.parent / "checkpoints")


def resolve_names(config: EngineConfig, *, progress: bool = True) -> EngineConfig:
    """Return `config` with the names of its model and tokenizer replaced by paths, and what it says of the model's
    files carried out (`with_overrides`).

    Raises as `resolve_model` does, ConfigError, and CheckpointError for a model type that is not served.
    """
    with_weights = config.load_format != "dummy"
    if config.quantization in get_args(StoredFormat):  # before the weights are downloaded
        check_format(config.quantization, resolve_model(config.model, revision=config.revision, with_weights=False))
    model = resolve_model(config.model, revision=config.revision, with_weights=with_weights, progress=progress)
    tokenizer = None if config.tokenizer is None else resolve_tokenizer(config.tokenizer)
    config = with_overrides(dataclasses.replace(config, model=model, revision=None, tokenizer=tokenizer))
    described = pathlib.Path(config.model) / "config.json"
    if described.is_file():
        check_model_type(read_config(described), described)
    return config


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    with_weights: bool = True,
    progress: bool = True,
    is_offline: bool = False,
) -> str:
    """Return the directory or GGUF file of the model `name`.

    A built-in name means the built-in model even if a directory of that name exists; `./name` means the directory. Any
    other name that exists as a path is that path; else "org/name" is a model of the hub, at `revision` (a branch, a tag
    or a commit, which may follow the name after an "@"). It is downloaded unless it is cached, only its config and
    tokenizer if not `with_weights`; `is_offline` uses the cache only.

    Raises CheckpointError if there is no such model, or its config.json is not readable as JSON, and ConfigError for a
    revision of a model that is not on the hub.
    """
    if not name:
        raise ConfigError("model must not be empty")
    with _explained(name):
        on_hub = _on_hub(name, revision)
        if on_hub is None:
            return str(_local(name))
    return hub.download(on_hub, with_weights=with_weights, progress=progress, is_offline=is_offline)


def resolve_tokenizer(name: str, *, is_offline: bool = False) -> str:
    """Return the directory or GGUF file of a model whose tokenizer alone is needed; a directory need not have more.

    Raises as `resolve_model` does.
    """
    if not name:
        raise ConfigError("tokenizer must not be empty")
    with naming("tokenizer"):
        with _explained(name):
            directory = pathlib.Path(name).expanduser()
            if name not in BUILTIN_MODELS and directory.is_dir():
                return str(directory)
        return resolve_model(name, with_weights=False, is_offline=is_offline)


@contextlib.contextmanager
def naming(option: str) -> Iterator[None]:
    """Put the name of the option that names a checkpoint beside the model's before errors about it."""
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"{option}: {error}") from error


def _local(name: str) -> pathlib.Path:
    """Return the path of a built-in or local model. Raises CheckpointError as `resolve_model` does."""
    if name in BUILTIN_MODELS:
        for root in _CHECKPOINT_ROOTS:
            if (root / name / "config.json").is_file():
                return root / name
        raise CheckpointError(f"the built-in model {name} is not part of this installation; name a model directory")
    path = pathlib.Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return path
    if (path / "config.json").is_file():
        read_config(path / "config.json")  # before transformers, which reads it for the tokenizer
        return path
    if path.is_dir():
        raise CheckpointError(f"{name} holds no config.json, so it is not a model directory")
    if path.suffix in PICKLED_SUFFIXES and path.exists():
        raise CheckpointError(f"{name} is a file of pickled weights, {why_not_read(str(path.parent))}")
    if path.exists():
        raise CheckpointError(f"{name} is a file; a model is a .gguf file or a directory that holds config.json")
    builtin = ", ".join(BUILTIN_MODELS)
    raise CheckpointError(
        f"no model {name!r}: there is no such directory or .gguf file, and it is neither a built-in model ({builtin}) "
        "nor an id of the hub (org/name)"
    )


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    """Turn errors of path lookups into CheckpointError: no permission, a name too long, an unknown user after "~"."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"cannot read {name}: {error.strerror}") from error
    except RuntimeError as error:
        raise CheckpointError(f"cannot read {name}: {error}") from error


def _on_hub(name: str, revision: str | None) -> hub.HubName | None:
    """Return the model of the hub that `name` means, or None if it is not on the hub."""
    found = None if pathlib.Path(name).expanduser().exists() else hub.parse_name(name)
    if revision is None:
        return found
    if found is None:
        raise ConfigError(f"revision is {revision!r}, but only models of the hub have one, and {name} is none")
    if found.revision not in (None, revision):
        raise ConfigError(f"revision is {revision!r}, but the model is {name}")
    return dataclasses.replace(found, revision=revision)
