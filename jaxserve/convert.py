"""`jaxserve convert`: write a model as a store, which loads without conversion (`loading.orbax_store`)."""

import dataclasses
import hashlib
import json
import pathlib
import tempfile

import numpy as np

from jaxserve.config import DType, Quantization
from jaxserve.errors import CheckpointError
from jaxserve.loading.builtin import resolve_model
from jaxserve.loading.classifier import is_classifier
from jaxserve.loading.gguf import GGUFFile
from jaxserve.loading.hub import parse_name
from jaxserve.loading.huggingface import resolve_dtype
from jaxserve.loading.orbax_store import check_destination, write_store
from jaxserve.loading.pickles import PICKLED_SUFFIXES
from jaxserve.loading.quantization_files import FIELDS, FILES
from jaxserve.loading.sentence_transformers import module_folders, read_embedder
from jaxserve.loading.store_manifest import Manifest, Source, is_store
from jaxserve.loading.tied_head import SINGLE_FILE
from jaxserve.loading.weights import load_config, naming_config, open_weights, stored_specs
from jaxserve.models import get_family
from jaxserve.tokenizer import Tokenizer

WEIGHT_FILES = ("*.safetensors", "*.gguf", *(f"*{suffix}" for suffix in PICKLED_SUFFIXES))
_LARGEST_COPIED = 64 * 2**20
"""Maximum bytes of a file that is copied to the store; larger files next to the weights are not tokenizer files."""


def convert(
    source: str,
    destination: str | pathlib.Path,
    *,
    revision: str | None = None,
    dtype: DType = "auto",
    quantization: Quantization | None = None,
    dequantize: bool = False,
    force: bool = False,
    progress: bool = True,
) -> Manifest:
    """Write the store `destination` from the model `source`, given by any name that `serve` takes.

    dtype "auto" keeps the model's dtype, bfloat16 for GGUF files, whose tokenizer is written as JSON. The host holds
    one weight at a time. Codes of a quantized model are kept unless `dequantize` asks for values. `quantization` rounds
    matrices as `serve` does when it loads.

    Raises StartupError: CheckpointError if the source cannot be read or the destination exists, unless it is a store
    and `force` is set, which replaces it.
    """
    check_destination(destination, force=force)
    path = pathlib.Path(resolve_model(source, revision=revision, progress=progress))
    if is_store(path):
        raise CheckpointError(f"{source} is a store already: convert the original")
    fields = load_config(path)
    if is_classifier(fields):
        raise CheckpointError(f"{source} has a classification head, which a store does not hold")
    with naming_config(path):
        family = get_family(fields)
        config = family.config(fields)
        specs = family.param_specs(config)
        weights_dtype = resolve_dtype(dtype, fields, is_cpu=False)
    specs = stored_specs(path, specs, dtype=weights_dtype, quantization=quantization, dequantizes=dequantize)
    describes_source = {*FIELDS, *FILES} if quantization is not None or dequantize else set()
    with tempfile.TemporaryDirectory() as folder, open_weights(path, specs) as weights:
        return write_store(
            destination,
            weights,
            dtype=np.dtype(weights_dtype),
            config={name: value for name, value in fields.items() if name not in describes_source}
            | {"tie_word_embeddings": config.tie_word_embeddings},
            source=Source(name=_origin(source, path), sha256=_digests(path)),
            copied=_files_of_gguf(path, pathlib.Path(folder), hidden_size=config.hidden_size)
            if path.is_file()
            else {name: file for name, file in _companions(path).items() if name not in describes_source},
            force=force,
            progress=progress,
        )


def _origin(source: str, path: pathlib.Path) -> str:
    """Return the name of the directory or file, or the id and commit of a model of the hub."""
    on_hub = None if pathlib.Path(source).expanduser().exists() else parse_name(source)
    if on_hub is None:
        return path.resolve().name
    commit = path.as_posix().rpartition("/snapshots/")[2].partition("/")[0]
    return str(dataclasses.replace(on_hub, revision=commit))


def _digests(path: pathlib.Path) -> dict[str, str]:
    """Return the SHA-256 of each file of weights, as the hub shows it."""
    digests = {}
    for weights in GGUFFile(path).paths if path.is_file() else sorted(path.glob("*.safetensors")):
        with weights.open("rb") as file:
            digests[weights.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests


def _files_of_gguf(path: pathlib.Path, folder: pathlib.Path, *, hidden_size: int) -> dict[str, pathlib.Path]:
    """Write the tokenizer of a GGUF file as Hugging Face's files in `folder`, with its EOS tokens, and its pooling;
    return their names and paths.
    """
    tokenizer = Tokenizer.load(path)
    tokenizer.save(folder)
    eos = {"eos_token_id": list(tokenizer.eos_token_ids)}
    (folder / "generation_config.json").write_text(json.dumps(eos) + "\n", encoding="utf-8")
    files = {file.name: file for file in sorted(folder.iterdir())}
    embedder = read_embedder(path, hidden_size=hidden_size)
    if embedder.source is not None:
        file = folder / "pooling.json"
        modes = ["lasttoken" if mode == "last" else mode for mode in embedder.pooling]
        file.write_text(json.dumps({"pooling_mode": modes}) + "\n", encoding="utf-8")
        files["1_Pooling/config.json"] = file
    return files


def _companions(directory: pathlib.Path) -> dict[str, pathlib.Path]:
    """Return the files of a model besides weights and config.json, by name: tokenizer, chat template, generation
    config, license, and the modules of sentence-transformers.
    """
    weights = {path for pattern in WEIGHT_FILES for path in directory.glob(pattern)}
    modules = [
        directory / folder / name for folder in module_folders(directory) for name in ("config.json", SINGLE_FILE)
    ]
    templates = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    below = {path.relative_to(directory).as_posix(): path for path in (*modules, *templates) if path.is_file()}
    return below | {
        path.name: path
        for path in sorted(directory.iterdir())
        if path.is_file()
        and path not in weights
        and path.name != "config.json"
        and not path.name.endswith(".index.json")
        and path.stat().st_size <= _LARGEST_COPIED
    }
