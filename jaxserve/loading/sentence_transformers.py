"""The files by which sentence-transformers make an embedding of a model's hidden states. No jax.

`modules.json` names the modules, which come after each other: the transformer, its pooling (`1_Pooling/config.json`),
and what is done to the pooled vector (`2_Dense`, Normalize). A GGUF file only has a pooling type. What is said there is
followed, or refused by name.
"""

import dataclasses
import logging
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, get_args

import numpy as np
import safetensors
from jaxtyping import Float32

from jaxserve.errors import CheckpointError
from jaxserve.loading.gguf import GGUFFile
from jaxserve.loading.json_files import read_json, read_object
from jaxserve.loading.sentence_bert import read_text_options
from jaxserve.loading.torch_activations import Activation, read_activation
from jaxserve.request import Pooling

logger = logging.getLogger(__name__)

MODULES = "modules.json"
WEIGHTS = "model.safetensors"
RERANKER_MODULES = ("LogitScore", "CausalScoreHead")
"""Modules that make a score of an LM head's logits: `loading.reranking` reads them."""

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
Vector = Float32[np.ndarray, " E"]
Layer = Callable[[Vector], Vector]

# In the order in which several are concatenated.
_OLD_FLAGS: Mapping[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "last",
}
_MODES: Mapping[str, Pooling] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "mean_sqrt_len": "mean_sqrt_len",
    "weightedmean": "weightedmean",
    "lasttoken": "last",
}
_GGUF_POOLING: Mapping[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}
_GGUF_NONE, _GGUF_RANK = 0, 4

_READ = {
    "modules": frozenset({"idx", "name", "path", "type", "kwargs"}),
    "Pooling": frozenset({"embedding_dimension", "word_embedding_dimension", "pooling_mode", "include_prompt"}),
    "Dense": frozenset(
        {
            *("in_features", "out_features", "bias", "activation_function", "use_residual"),
            *("module_input_name", "module_output_name"),
        }
    ),
    "LayerNorm": frozenset({"dimension"}),
    "Normalize": frozenset({"module_input_name", "module_output_name"}),
    "model": frozenset(
        {
            *("prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim", "activation_fn"),
            *("__version__", "model_type", "requirements"),
        }
    ),
}
"""Fields of a module of modules.json, of each kind's config.json and of config_sentence_transformers.json that are
read, or say nothing about vectors; others are logged.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Embedder:
    """What makes an embedding of hidden states, as a checkpoint's files say.

    Attributes:
        pooling: poolings whose results are concatenated.
        source: the file that names the pooling, None if none does.
        layers: what is done to the pooled vector.
        size: entries of the vector.
        normalizes: true if vectors are scaled to length 1 at the end, unless a request says otherwise.
        dimensions: number of entries to which vectors are cut, unless a request says otherwise.
        similarity: what compares two vectors.
        max_length: tokens of the longest text.
        lowercases: true if texts are lowercased.
        prompts: texts that come before an input, by name.
        default_prompt: the name of the prompt before inputs whose request names none.
    """

    pooling: tuple[Pooling, ...] = ("last",)
    source: str | None = None
    layers: tuple[Layer, ...] = ()
    size: int
    normalizes: bool = True
    dimensions: int | None = None
    similarity: Similarity = "cosine"
    max_length: int | None = None
    lowercases: bool = False
    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_prompt: str | None = None

    def text(self, text: str, prompt_name: str | None = None) -> str:
        """Return what is tokenized of an input. `prompt_name` must be one of `prompts`."""
        name = self.default_prompt if prompt_name is None else prompt_name
        text = text if name is None else self.prompts[name] + text
        return text.lower() if self.lowercases else text

    def similarity_of(self, a: Vector, b: Vector) -> float:
        """Compare two vectors, which have length 1 for the cosine."""
        if self.similarity == "euclidean":
            return -float(np.linalg.norm(a - b))
        return -float(np.abs(a - b).sum()) if self.similarity == "manhattan" else float(a @ b)


@dataclasses.dataclass(frozen=True)
class Dense:
    """A matrix and an activation; `residual` is added if there is one, and maps the input to the output's size."""

    weight: Float32[np.ndarray, "O E"]
    bias: Float32[np.ndarray, " O"] | None
    activation: Activation
    residual: Layer | None = None

    def __call__(self, x: Vector) -> Vector:
        """Return the layer's output."""
        product = self.weight @ x
        y = self.activation(product if self.bias is None else product + self.bias).astype(np.float32)
        return y if self.residual is None else y + self.residual(x)


@dataclasses.dataclass(frozen=True)
class LayerNorm:
    """torch.nn.LayerNorm over a vector."""

    weight: Float32[np.ndarray, " E"]
    bias: Float32[np.ndarray, " E"]

    def __call__(self, x: Vector) -> Vector:
        """Return the layer's output."""
        return (x - x.mean()) / np.sqrt(x.var() + np.float32(1e-5)) * self.weight + self.bias


def normalize(x: Vector) -> Vector:
    """Scale a vector to length 1; zeros remain zeros."""
    norm = float(np.linalg.norm(x.astype(np.float64)))
    return (x.astype(np.float64) / norm).astype(np.float32) if norm > 0.0 else x


def read_embedder(path: str | pathlib.Path, *, hidden_size: int) -> Embedder:
    """Return how a model directory or a GGUF file makes embeddings. Raises CheckpointError, naming what is wrong or
    not supported.
    """
    path = pathlib.Path(path)
    if path.is_file():
        return _of_gguf(path, hidden_size)
    embedder = dataclasses.replace(
        Embedder(size=hidden_size, **read_text_options(path, has_modules=(path / MODULES).is_file())), **_of_model(path)
    )
    layers: list[Layer] = []
    has_pooling, include_prompt = False, True
    for kind, folder in _modules(path):
        if kind == "Pooling":
            if has_pooling:
                raise CheckpointError(f"{path / MODULES}: a second Pooling is not supported")
            has_pooling, include_prompt = True, bool(_config(folder).get("include_prompt", True))
            pooling = _pooling(folder / "config.json", hidden_size)
            embedder = dataclasses.replace(
                embedder, pooling=pooling, size=len(pooling) * hidden_size, source=f"{folder.name}/config.json"
            )
        elif kind == "Dropout":
            continue
        elif kind not in _LAYERS:
            raise CheckpointError(f"{path / MODULES}: the module {kind} is not supported")
        elif not has_pooling:
            raise CheckpointError(f"{path / MODULES}: a {kind} before the Pooling is not supported")
        else:
            layer, size = _LAYERS[kind](folder, embedder.size)
            layers.append(layer)
            embedder = dataclasses.replace(embedder, size=size)
    is_normalized = bool(layers) and layers[-1] is normalize
    embedder = dataclasses.replace(
        embedder,
        layers=tuple(layers[:-1] if is_normalized else layers),
        normalizes=is_normalized or not has_pooling or not (path / MODULES).is_file(),
    )
    if not include_prompt and any(embedder.prompts.values()) and embedder.pooling != ("last",):
        raise CheckpointError(
            f"{path / str(embedder.source)}: include_prompt False is not supported: it leaves the prompts of "
            "config_sentence_transformers.json out of the pooling"
        )
    if embedder.dimensions is not None and not 1 <= embedder.dimensions <= embedder.size:
        raise CheckpointError(
            f"{path}/config_sentence_transformers.json: truncate_dim {embedder.dimensions} is not within 1 and "
            f"{embedder.size}"
        )
    return embedder


def module_folders(path: pathlib.Path) -> Iterator[str]:
    """Yield the folders besides `path` itself that its modules.json names. Raises CheckpointError."""
    for _, folder in _modules(path, with_all=True):
        if folder != path:
            yield folder.relative_to(path).as_posix()


def find_module(path: pathlib.Path, kinds: tuple[str, ...]) -> pathlib.Path | None:
    """Return the folder of the first module of one of these kinds, None if there is none. Raises CheckpointError."""
    return next((folder for kind, folder in _modules(path, with_all=True) if kind in kinds), None)


def _modules(path: pathlib.Path, *, with_all: bool = False) -> Iterator[tuple[str, pathlib.Path]]:
    """Yield the kinds and folders of the modules; unless `with_all`, without those that no embedding goes through."""
    file = path / MODULES
    if not file.is_file():
        if (path / "1_Pooling" / "config.json").is_file():
            yield "Pooling", path / "1_Pooling"
        return
    entries = read_json(file)
    entries = entries.get("modules") if isinstance(entries, dict) else entries
    if not isinstance(entries, list):
        raise CheckpointError(f"{file} must hold a list of modules, got {entries!r:.100}")
    for entry in entries:
        kind = entry.get("type") if isinstance(entry, dict) else None
        folder = entry.get("path", "") if isinstance(entry, dict) else None
        if not isinstance(kind, str) or not isinstance(folder, str):
            raise CheckpointError(f"{file}: a module needs a type and a path, got {entry!r:.100}")
        if not with_all:
            _log_unread(file, entry, "modules")
        if pathlib.PurePath(folder).is_absolute() or ".." in pathlib.PurePath(folder).parts:  # links may lead outside
            raise CheckpointError(f"{file}: path {folder!r:.100} is outside of the model's directory")
        package, _, name = kind.rpartition(".")
        if package.partition(".")[0] != "sentence_transformers":
            raise CheckpointError(f"{file}: the module {kind!r:.100} is not supported: code of a checkpoint never runs")
        if name == "Transformer" and folder.strip("./"):
            raise CheckpointError(f"{file}: a Transformer in {folder!r:.100} is not supported")
        if with_all or name not in ("Transformer", *RERANKER_MODULES):
            yield name, path / folder


def _pooling(file: pathlib.Path, hidden_size: int) -> tuple[Pooling, ...]:
    fields = read_object(file)
    _log_unread(
        file, {name: value for name, value in fields.items() if not name.startswith("pooling_mode_")}, "Pooling"
    )
    for name in ("embedding_dimension", "word_embedding_dimension"):
        if fields.get(name) not in (None, hidden_size):
            raise CheckpointError(f"{file}: {name} {fields[name]!r:.100} is not the model's hidden size, {hidden_size}")
    given = fields.get("pooling_mode")
    if given is not None:
        modes = given if isinstance(given, list) else [given]
        for mode in modes:
            if not isinstance(mode, str) or mode.lower() not in _MODES:
                raise CheckpointError(
                    f"{file}: pooling_mode {mode!r:.100} is not supported; known are {', '.join(_MODES)}"
                )
        if modes:
            return tuple(_MODES[mode.lower()] for mode in modes)
    flags = [name for name, value in fields.items() if name.startswith("pooling_mode_") and value]
    if unknown := [name for name in flags if name not in _OLD_FLAGS]:
        raise CheckpointError(f"{file}: {unknown[0]} is not supported; known are {', '.join(_OLD_FLAGS)}")
    return tuple(mode for name, mode in _OLD_FLAGS.items() if name in flags) or ("mean",)


def _dense(folder: pathlib.Path, size: int) -> tuple[Layer, int]:
    file, fields = folder / "config.json", _config(folder)
    _log_unread(file, fields, "Dense")
    _check_names(file, fields)
    _check_size(file, fields, "in_features", size)
    name = fields.get("activation_function", "torch.nn.modules.activation.Tanh")
    activation = read_activation(name, field=f"{file}: activation_function")
    num_outputs = fields.get("out_features")
    tensors = _tensors(folder)
    shapes: dict[str, tuple[Any, ...]] = {"linear.weight": (num_outputs, size)}
    if fields.get("bias") is not False:
        shapes["linear.bias"] = (num_outputs,)
    has_residual = fields.get("use_residual") is True
    if has_residual and num_outputs != size:
        shapes["residual.weight"] = (num_outputs, size)
    _check_shapes(folder, tensors, shapes)
    residual: Layer | None = None
    if has_residual:
        matrix = tensors.get("residual.weight")
        residual = (lambda x: x) if matrix is None else lambda x: matrix @ x
    dense = Dense(tensors["linear.weight"], tensors.get("linear.bias"), activation, residual)
    return dense, len(dense.weight)


def _layer_norm(folder: pathlib.Path, size: int) -> tuple[Layer, int]:
    file, fields, tensors = folder / "config.json", _config(folder), _tensors(folder)
    _log_unread(file, fields, "LayerNorm")
    _check_size(file, fields, "dimension", size)
    _check_shapes(folder, tensors, {"norm.weight": (size,), "norm.bias": (size,)})
    return LayerNorm(tensors["norm.weight"], tensors["norm.bias"]), size


def _normalize(folder: pathlib.Path, size: int) -> tuple[Layer, int]:
    file, fields = folder / "config.json", _config(folder)
    _log_unread(file, fields, "Normalize")
    _check_names(file, fields)
    return normalize, size


_LAYERS = {"Dense": _dense, "LayerNorm": _layer_norm, "Normalize": _normalize}


def _log_unread(file: pathlib.Path, fields: Mapping[str, Any], kind: str) -> None:
    if unread := sorted(name for name, value in fields.items() if name not in _READ[kind] and value is not None):
        logger.warning("%s: not known and not followed: %s", file, ", ".join(unread))


def _check_names(file: pathlib.Path, fields: Mapping[str, Any]) -> None:
    for name in ("module_input_name", "module_output_name"):
        if fields.get(name) not in (None, "sentence_embedding"):
            raise CheckpointError(f"{file}: {name} {fields[name]!r:.100} is not supported")


def _check_size(file: pathlib.Path, fields: Mapping[str, Any], name: str, size: int) -> None:
    if fields.get(name) not in (None, size):
        raise CheckpointError(f"{file}: {name} {fields[name]!r:.100} is not the size of what comes before, {size}")


def _config(folder: pathlib.Path) -> dict[str, Any]:
    """Return the fields of a module that may have none, as a Normalize."""
    file = folder / "config.json"
    return read_object(file) if file.is_file() else {}


def _tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    if not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"no {WEIGHTS} in {folder}: pickled weights are never read")
    try:
        with safetensors.safe_open(folder / WEIGHTS, framework="numpy") as file:
            return {name: np.asarray(file.get_tensor(name)).astype(np.float32) for name in file.keys()}  # noqa: SIM118
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"cannot read {folder / WEIGHTS}: {error}") from error


def _check_shapes(
    folder: pathlib.Path, tensors: Mapping[str, np.ndarray], shapes: Mapping[str, tuple[Any, ...]]
) -> None:
    for name in sorted(shapes.keys() | tensors.keys()):
        found = tensors[name].shape if name in tensors else None
        if found != shapes.get(name):
            raise CheckpointError(f"{folder / WEIGHTS}: {name} must be {shapes.get(name)}, got {found}")


def _of_model(path: pathlib.Path) -> dict[str, Any]:
    """Return what config_sentence_transformers.json says."""
    file = path / "config_sentence_transformers.json"
    fields = read_object(file) if file.is_file() else {}
    _log_unread(file, fields, "model")
    prompts, default = fields.get("prompts") or {}, fields.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise CheckpointError(f"{file}: prompts must be an object of texts, got {prompts!r:.100}")
    prompts = {name: text or "" for name, text in prompts.items()}
    if default is not None and default not in prompts:
        raise CheckpointError(f"{file}: default_prompt_name {default!r:.100} is none of prompts")
    similarity = fields.get("similarity_fn_name") or "cosine"
    if similarity not in get_args(Similarity):
        known = ", ".join(get_args(Similarity))
        raise CheckpointError(f"{file}: similarity_fn_name {similarity!r:.100} is not supported; known are {known}")
    length = fields.get("truncate_dim")
    if length is not None and type(length) is not int:
        raise CheckpointError(f"{file}: truncate_dim must be an integer, got {length!r:.100}")
    return {"prompts": prompts, "default_prompt": default, "similarity": similarity, "dimensions": length}


def _of_gguf(path: pathlib.Path, hidden_size: int) -> Embedder:
    file = GGUFFile(path)
    key = f"{file.architecture}.pooling_type"
    value = file.metadata.get(key)
    if value in (None, _GGUF_NONE):
        return Embedder(size=hidden_size)
    if value not in _GGUF_POOLING:
        why = ": it is a reranker's, whose head is not read" if value == _GGUF_RANK else ""
        raise CheckpointError(f"{path}: {key} {value!r:.100} is not supported{why}")
    return Embedder(size=hidden_size, pooling=(_GGUF_POOLING[value],), source=key)
