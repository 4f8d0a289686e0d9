"""Model names to directories: the first thing that happens to a `model` argument. No jax.

The built-in models lie in `checkpoints/` of a source tree and in `jaxserve/_checkpoints/` of an installed wheel.
"""

import pathlib

from jaxserve.errors import CheckpointError

DEFAULT_MODEL = "scribe-15m"
BUILTIN_MODELS = ("scribe-15m", "scribe-2m")

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_CHECKPOINT_ROOTS = (_PACKAGE / "_checkpoints", _PACKAGE.parent / "checkpoints")


def resolve_model(name: str) -> str:
    """The directory of the model that a user calls `name`: a path, a built-in name, or "" for the default model.

    A built-in name means the built-in model even where a directory of that name exists; `./name` means the directory.
    Raises CheckpointError if there is no such model.
    """
    name = name or DEFAULT_MODEL
    if name in BUILTIN_MODELS:
        for root in _CHECKPOINT_ROOTS:
            if (root / name / "config.json").is_file():
                return str(root / name)
        raise CheckpointError(f"the built-in model {name} is not part of this installation; name a model directory")
    path = pathlib.Path(name).expanduser()
    if (path / "config.json").is_file():
        return str(path)
    if path.is_dir():
        raise CheckpointError(f"{name} holds no config.json, so it is not a model directory")
    if path.exists():
        raise CheckpointError(f"{name} is a file; a model is a directory that holds config.json")
    builtin = ", ".join(BUILTIN_MODELS)
    raise CheckpointError(f"no model {name!r}: it is neither a directory nor a built-in model ({builtin})")
