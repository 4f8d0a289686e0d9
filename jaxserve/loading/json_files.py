"""Read the JSON files of a model directory, and report what is wrong with an invalid one. No jax."""

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxserve.errors import CheckpointError
from jaxserve.loading.bounds import MAX_INTEGER, MAX_NUMBER, MAXIMA, UNBOUNDED, is_within
from jaxserve.loading.model_types import is_unknown
from jaxserve.loading.multimodal import text_fields


class _Kind(NamedTuple):
    """The values that a field may have: a description, and a test."""

    words: str
    fits: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)


def _is_token_id(value: Any) -> bool:
    return _is_integer(value) and abs(value) <= MAX_INTEGER


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list_of(values: Any, fits: Callable[[Any], bool]) -> bool:
    return isinstance(values, list) and all(map(fits, values))


def _is_template(value: Any) -> bool:
    """Return true for a text, or several by name: in an object, or as objects with "name" and "template"."""
    if isinstance(value, list):
        return all(isinstance(each, dict) and {"name", "template"} <= each.keys() for each in value)
    return all(map(_is_text, value.values())) if isinstance(value, dict) else isinstance(value, str)


def _is_token(value: Any) -> bool:
    """Return true for a text, or for an object that also says how the token is matched."""
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _is_tokens_by_id(values: Any) -> bool:
    return _is_object(values) and all(key.isdecimal() and _is_token(value) for key, value in values.items())


ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""What special tokens are for, as tokenizer_config.json names it; a model may have others of its own."""

_TEXT = _Kind("a text", _is_text)
_FLAG = _Kind("true or false", lambda value: isinstance(value, bool))
_TOKEN = _Kind("a token", _is_token)
_TEXTS = _Kind("a list of texts", lambda value: _is_list_of(value, _is_text))
_OBJECT = _Kind("an object", _is_object)
_TOKEN_IDS = _Kind(
    "a token id or a list of them", lambda value: _is_token_id(value) or _is_list_of(value, _is_token_id)
)
_TOKENS = _Kind("a list of tokens", lambda value: _is_list_of(value, _is_token))
_NAMED_TOKENS = _Kind(
    "a list of tokens or an object of them",
    lambda value: _is_list_of(list(value.values()) if _is_object(value) else value, _is_token),
)

_KINDS = {
    "config.json": {
        "architectures": _TEXTS,
        "auto_map": _OBJECT,
        "dtype": _TEXT,
        "eos_token_id": _TOKEN_IDS,
        "id2label": _OBJECT,
        "label2id": _OBJECT,
        "layer_types": _TEXTS,
        "model_type": _TEXT,
        "num_labels": _Kind("an integer", _is_integer),
        "quantization_config": _OBJECT,
        "rope_parameters": _OBJECT,
        "rope_scaling": _OBJECT,
        "torch_dtype": _TEXT,
    },
    "generation_config.json": {"eos_token_id": _TOKEN_IDS},
    "special_tokens_map.json": {
        **dict.fromkeys(ROLES, _TOKEN),
        "additional_special_tokens": _NAMED_TOKENS,
        "extra_special_tokens": _NAMED_TOKENS,
    },
    "tokenizer_config.json": {
        **dict.fromkeys(ROLES, _TOKEN),
        "add_bos_token": _FLAG,
        "add_eos_token": _FLAG,
        "added_tokens_decoder": _Kind("an object of tokens by id", _is_tokens_by_id),
        "additional_special_tokens": _NAMED_TOKENS,
        "auto_map": _Kind(
            "an object or a list of two",
            lambda value: len(value) == 2 if isinstance(value, list) else _is_object(value),
        ),
        "chat_template": _Kind("a text or a list of objects with name and template", _is_template),
        "extra_special_tokens": _NAMED_TOKENS,
        "fix_mistral_regex": _FLAG,
        "init_inputs": _Kind("a list", lambda value: isinstance(value, list)),
        "model_input_names": _TEXTS,
        "model_specific_special_tokens": _NAMED_TOKENS,
        "padding_side": _TEXT,
        "split_special_tokens": _FLAG,
        "tokenizer_class": _TEXT,
        "truncation_side": _TEXT,
    },
}
"""Fields, by file, that are not single numbers or flags and are read here or by transformers; null is always valid.

The numbers and flags of a config.json are checked by `models.hf_config`.
"""


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises CheckpointError, naming the file, if it is missing or holds no object, and naming the field, if one of
    config.json, generation_config.json, special_tokens_map.json or tokenizer_config.json has a value of the wrong type.
    The fields of a config.json of an unknown model type are not judged: who serves it refuses the type.
    """
    fields = read_json(path)
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {fields!r:.100}")
    _check_fields(fields, path)
    return fields


def read_config(path: pathlib.Path) -> dict[str, Any]:
    """Return the fields of the config.json of a model directory, or of the language model that it describes among
    others. Raises CheckpointError as `read_object` does.
    """
    fields = read_object(path)
    try:
        text = text_fields(fields)
    except CheckpointError as error:
        raise CheckpointError(f"{path.parent}/{error}") from error
    if text is not fields:
        _check_fields(text, path)
    return text


def _check_fields(fields: Mapping[str, Any], path: pathlib.Path) -> None:
    if path.name == "config.json" and is_unknown(fields):
        return
    for name, kind in _KINDS.get(path.name, {}).items():
        _check(fields, name, kind, path)
    if path.name == "config.json":
        _check_numbers(fields, path)


def _check_numbers(fields: Mapping[str, Any], path: pathlib.Path, prefix: str = "") -> None:
    """Raise CheckpointError for a number that is not finite or beyond its bound, however deeply it is nested."""
    for name, value in fields.items():
        if name in UNBOUNDED:
            continue
        maximum = MAXIMA.get(name, MAX_NUMBER)
        for each in value if isinstance(value, list) else (value,):
            if isinstance(each, dict):
                _check_numbers(each, path, f"{prefix}{name}.")
            elif isinstance(each, int | float) and not is_within(each, maximum):
                raise CheckpointError(
                    f"{path}: {prefix}{name} must be finite and at most {maximum:.10g}, got {each!r:.100}"
                )


def read_json(path: pathlib.Path) -> Any:
    """Return the contents of a JSON file. Raises CheckpointError, naming the file, if it is missing or no JSON."""
    try:
        text = path.read_text(encoding="utf-8")
        if not text.strip():
            raise CheckpointError(f"cannot read {path}: it is empty")
        return json.loads(text)
    except FileNotFoundError:
        raise CheckpointError(f"no {path.name} in {path.parent}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: it is no JSON ({error})") from error


def _check(fields: Mapping[str, Any], name: str, kind: _Kind, path: pathlib.Path) -> None:
    value = fields.get(name)
    if value is not None and not kind.fits(value):
        raise CheckpointError(f"{path}: {name} must be {kind.words}, got {value!r:.100}")


def eos_token_ids(fields: Mapping[str, Any], path: pathlib.Path) -> tuple[int, ...]:
    """Return `eos_token_id` of the file at `path`: none, one or a list. Raises CheckpointError, naming the file."""
    _check(fields, "eos_token_id", _TOKEN_IDS, path)
    value = fields.get("eos_token_id")
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)
