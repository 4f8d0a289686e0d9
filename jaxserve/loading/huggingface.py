"""Hugging Face model directories: config.json, and safetensors tensor by tensor from the disk to the devices.

The tensors are checked against the files' headers first, so that a wrong checkpoint fails at once and in one message.
On the host there is never more than the tensors of one weight.
"""

import contextlib
import dataclasses
import json
import pathlib
from collections.abc import Mapping
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

# Tensors that some checkpoints carry and no model reads: rotary tables of old Llamas, causal masks of old GPTs, and the
# LM head where it is tied to the embedding (where it is not, the family declares it and it is no extra).
KNOWN_EXTRAS = (
    "rotary_emb.inv_freq",
    ".attn.bias",
    ".attn.masked_bias",
    ".attention.bias",
    ".attention.masked_bias",
    "lm_head.weight",
    "embed_out.weight",
)


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A tensor in an open file, under the name that it has there."""

    file: Any
    name: str

    def read(self) -> np.ndarray:
        return self.file.get_tensor(self.name)

    def header(self) -> Any:
        return self.file.get_slice(self.name)


def load_config(path: str | pathlib.Path) -> dict[str, Any]:
    """The fields of `path`/config.json. Raises CheckpointError if there is no such file, or no JSON object in it.

    Which model_type is served, `models.get_family` says.
    """
    directory = pathlib.Path(path)
    if not directory.is_dir():
        raise CheckpointError(f"no model directory at {directory}")
    fields = _read_json(directory / "config.json")
    if fields.get("quantization_config"):
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
        expected = {
            name: shape
            for spec in jax.tree.leaves(specs)
            for name, shape in zip(spec.source, spec.source_shapes, strict=True)
        }
        tensors = _with_model_prefix(_open_tensors(directory, stack), expected)
        _check(directory, expected, tensors)
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
            sources = [tensors[name].read() for name in spec.source]
            weight = sources[0] if spec.transform is None else spec.transform(*sources)
            array = jax.device_put(weight.astype(spec.dtype_in(dtype), copy=False), sharding)
            # Transfers that are still under way would keep their tensors on the host.
            bar.update(array.block_until_ready().nbytes)
            return array

        return jax.tree.map(load, specs, layout)


def _open_tensors(directory: pathlib.Path, stack: contextlib.ExitStack) -> dict[str, _Stored]:
    """Each tensor in its open file; `stack` closes the files."""
    if (directory / "model.safetensors").is_file():
        names = ["model.safetensors"]
    elif (directory / "model.safetensors.index.json").is_file():
        weight_map = _read_json(directory / "model.safetensors.index.json").get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{directory}/model.safetensors.index.json has no weight_map")
        names = sorted(set(weight_map.values()))
    else:
        raise CheckpointError(f"neither model.safetensors nor model.safetensors.index.json in {directory}")
    tensors: dict[str, _Stored] = {}
    for name in names:
        try:
            file = stack.enter_context(safe_open(directory / name, framework="numpy"))
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {directory / name}: {error}") from error
        tensors |= {tensor: _Stored(file, tensor) for tensor in file.keys()}  # noqa: SIM118 (no dictionary)
    return tensors


def _with_model_prefix(tensors: dict[str, _Stored], expected: Mapping[str, tuple[int, ...]]) -> dict[str, _Stored]:
    """The tensors by the names of the model with its head.

    Checkpoints of the model without (GPT-2's first ones are) leave out its name: "h.0.ln_1" for "transformer.h.0.ln_1".
    """
    prefixes = {name.partition(".")[0] for name in expected}
    full = {f"{prefix}.{name}": name for prefix in prefixes for name in tensors.keys() - expected.keys()}
    added = {name: short for name, short in full.items() if name in expected and name not in tensors}
    return {name: tensors[name] for name in tensors.keys() - added.values()} | {
        name: tensors[short] for name, short in added.items()
    }


def _check(directory: pathlib.Path, expected: Mapping[str, tuple[int, ...]], tensors: dict[str, _Stored]) -> None:
    missing = [name for name in expected if name not in tensors]
    unexpected = [name for name in tensors if name not in expected and not name.endswith(KNOWN_EXTRAS)]
    mismatched = []
    for name in expected.keys() & tensors.keys():
        header = tensors[name].header()
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
