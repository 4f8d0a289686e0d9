"""Hugging Face model directories: config.json, and safetensors tensor by tensor from the disk to the devices.

The tensors are checked against the files' headers first, so that a wrong checkpoint fails at once and in one message.
On the host there is never more than the tensors of one weight.
"""

import contextlib
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from jaxserve.config import DType
from jaxserve.errors import CheckpointError
from jaxserve.layers.params import Params, ParamSpec, num_bytes, shardings

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}
FLOAT_TYPES = ("BF16", "F16", "F32")

# Tensors that some checkpoints carry and no model reads: rotary tables of old Llamas, and the LM head where it is tied
# to the embedding (where it is not, the family declares it and it is no extra).
KNOWN_EXTRAS = ("rotary_emb.inv_freq", "lm_head.weight")


def load_config(path: str | pathlib.Path) -> dict[str, Any]:
    """The fields of `path`/config.json. Raises CheckpointError if there is no such file, or no JSON object in it.

    Which model_type is served, `models.get_family` says.
    """
    directory = pathlib.Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"no model directory at {directory}")
    fields = _read_json(directory / "config.json")
    if "quantization_config" in fields:
        raise CheckpointError(f"{directory}: quantized checkpoints are not supported")
    return fields


def resolve_dtype(requested: DType, fields: dict[str, Any], *, is_cpu: bool) -> np.dtype:
    """The dtype of weights, activations and KV.

    "auto" is float32 on CPU, where narrower types are slower, else the checkpoint's (`dtype` in config.json, or
    `torch_dtype` as older ones write), else bfloat16. Raises CheckpointError for one that is not served.
    """
    if requested != "auto":
        return np.dtype(DTYPES[requested])
    if is_cpu:
        return np.dtype(jnp.float32)
    name = fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"
    if name not in DTYPES:
        raise CheckpointError(f"config.json: unknown dtype {name!r}; known are {', '.join(DTYPES)}")
    return np.dtype(DTYPES[name])


def load_params(
    path: str | pathlib.Path, specs: Params, *, dtype: np.dtype, mesh: Mesh, progress: bool = True
) -> Params:
    """The weights that `specs` declare, from the directory `path`, cast to `dtype` and laid out over `mesh`.

    `progress` draws a bar of the bytes that have reached the devices. Raises CheckpointError, naming all of them, if
    tensors are missing, unexpected, of another shape or not floats of 16 or 32 bits, and ConfigError if a weight does
    not divide over the mesh; then no device memory has been touched.
    """
    directory = pathlib.Path(path)
    layout = shardings(specs, mesh)
    with contextlib.ExitStack() as stack:
        files = _open_tensors(directory, stack)
        _check(directory, specs, files)
        bar = stack.enter_context(
            tqdm(
                total=num_bytes(specs, dtype=dtype),
                desc="loading weights",
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                disable=not progress,
            )
        )

        def load(spec: ParamSpec, sharding: NamedSharding) -> jax.Array:
            tensors = [files[name].get_tensor(name) for name in spec.source]
            weight = tensors[0] if spec.transform is None else spec.transform(*tensors)
            array = jax.device_put(weight.astype(spec.dtype_in(dtype), copy=False), sharding)
            # Transfers that are still under way would keep their tensors on the host.
            bar.update(array.block_until_ready().nbytes)
            return array

        return jax.tree.map(load, specs, layout)


def _open_tensors(directory: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """The open file that holds each tensor; `stack` closes them."""
    if (directory / "model.safetensors").is_file():
        names = ["model.safetensors"]
    elif (directory / "model.safetensors.index.json").is_file():
        weight_map = _read_json(directory / "model.safetensors.index.json").get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{directory}/model.safetensors.index.json has no weight_map")
        names = sorted(set(weight_map.values()))
    else:
        raise CheckpointError(f"neither model.safetensors nor model.safetensors.index.json in {directory}")
    files: dict[str, Any] = {}
    for name in names:
        try:
            file = stack.enter_context(safe_open(directory / name, framework="numpy"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {directory / name}: {error}") from error
        files |= dict.fromkeys(file.keys(), file)
    return files


def _check(directory: pathlib.Path, specs: Params, files: dict[str, Any]) -> None:
    expected = {
        name: shape
        for spec in jax.tree.leaves(specs)
        for name, shape in zip(spec.source, spec.source_shapes, strict=True)
    }
    missing = [name for name in expected if name not in files]
    unexpected = [name for name in files if name not in expected and not name.endswith(KNOWN_EXTRAS)]
    mismatched = []
    for name in expected.keys() & files.keys():
        header = files[name].get_slice(name)
        shape, dtype = tuple(header.get_shape()), header.get_dtype()
        if shape != expected[name] or dtype not in FLOAT_TYPES:
            mismatched.append(f"{name} is {dtype} {list(shape)} and not a float of {list(expected[name])}")
    problems = [
        f"{kind}: {', '.join(sorted(names))}"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("wrong", mismatched))
        if names
    ]
    if problems:
        raise CheckpointError(f"{directory} does not fit its config.json; tensors " + "; ".join(problems))


def _read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError if it is missing or is none."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"no {path.name} in {path.parent}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return fields
