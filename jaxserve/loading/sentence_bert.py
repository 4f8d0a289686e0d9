"""The file sentence_bert_config.json: which texts sentence-transformers' transformer module reads, and how. No jax."""

import pathlib
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.loading.bounds import MAX_CONTEXT
from jaxserve.loading.json_files import read_object

# Fields of sentence_bert_config.json that are about loading by torch.
_HARMLESS = frozenset(
    {
        *("transformer_task", "modality_config", "module_output_name", "unpad_inputs", "trust_remote_code"),
        *("dtype", "torch_dtype", "attn_implementation", "device_map", "padding_side"),
        *("max_seq_length", "do_lower_case", "processing_kwargs"),
    }
)
_ARGUMENTS = ("model_args", "model_kwargs", "tokenizer_args", "processor_kwargs", "config_args", "config_kwargs")
_TOKENIZER_ARGUMENTS = ("tokenizer_args", "processor_kwargs")
_OUTPUTS = {"method": (None, "forward"), "method_output_name": (None, "last_hidden_state", "logits")}
_TASKS = (None, "feature-extraction", "sequence-classification", "text-generation")


def read_text_options(path: pathlib.Path, *, has_modules: bool) -> dict[str, Any]:
    """Return what sentence_bert_config.json says: `max_length` and `lowercases` of an Embedder.

    Without a length of its own, that of the tokenizer counts if there are modules (`has_modules`). Raises
    CheckpointError for what is not supported.
    """
    file = path / "sentence_bert_config.json"
    fields = read_object(file) if file.is_file() else {}
    given = {name: value for name, value in fields.items() if name not in _ARGUMENTS}
    lengths = {"max_seq_length": fields.get("max_seq_length")}
    for group in _ARGUMENTS:
        arguments = dict(fields.get(group) or {})
        if group in _TOKENIZER_ARGUMENTS:
            lengths["model_max_length"] = arguments.pop("model_max_length", lengths.get("model_max_length"))
        given |= arguments
    for name, value in given.items():
        if name not in _HARMLESS and value is not None:
            raise CheckpointError(f"{file}: {name} {value!r:.100} is not supported")
    _check_output(file, fields)
    if unknown := [name for name in fields.get("processing_kwargs") or {} if name != "chat_template"]:
        raise CheckpointError(f"{file}: processing_kwargs.{unknown[0]} is not supported")
    lowercases = fields.get("do_lower_case") or False
    for name, length in lengths.items():
        if length is not None and (type(length) is not int or length < 1):
            raise CheckpointError(f"{file}: {name} must be a positive integer, got {length!r:.100}")
    length = lengths["max_seq_length"] if lengths.get("model_max_length") is None else lengths["model_max_length"]
    if length is None and has_modules:
        length = _own_length(path)
    if not isinstance(lowercases, bool):
        raise CheckpointError(f"{file}: do_lower_case must be true or false, got {lowercases!r:.100}")
    return {"max_length": length, "lowercases": lowercases}


def _own_length(path: pathlib.Path) -> int | None:
    """Return model_max_length of tokenizer_config.json, None if it sets no limit (a float of 1e30)."""
    file = path / "tokenizer_config.json"
    fields = read_object(file) if file.is_file() else {}
    length = fields.get("model_max_length", fields.get("max_len"))
    return length if type(length) is int and 1 <= length < MAX_CONTEXT else None


def _check_output(file: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Raise CheckpointError if texts are not read as they are, or another output than the last states is taken."""
    modalities = fields.get("modality_config") or {}
    for name in modalities:
        if name not in ("text", "message"):
            raise CheckpointError(f"{file}: modality_config.{name} is not supported: there is only text")
        how = modalities[name] or {}
        for field, known in _OUTPUTS.items():
            if how.get(field) not in known:
                raise CheckpointError(f"{file}: {field} {how[field]!r:.100} is not supported")
    if (task := fields.get("transformer_task")) not in _TASKS:
        raise CheckpointError(f"{file}: transformer_task {task!r:.100} is not supported")
    if (
        modalities
        and "text" not in modalities
        and fields.get("transformer_task", "feature-extraction") != ("text-generation")
    ):
        raise CheckpointError(f"{file}: modality_config without text is not supported: it wraps texts into messages")
    output = fields.get("module_output_name")
    if output not in (None, "token_embeddings", "causal_logits", "scores"):
        raise CheckpointError(f"{file}: module_output_name {output!r:.100} is not supported")
