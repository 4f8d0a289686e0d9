"""Turn dataclass and struct fields into command-line flags, and parsed flags back into objects. Used by `cli` and
`bench`.

A flag that is not given is absent from the namespace, so that defaults have one source: the field.
"""

import argparse
import dataclasses
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from jaxserve import vllm_flags
from jaxserve.arguments import Lists, Merged, Parser
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.sampling_params import PARAMETERS, SamplingParams, StructuredOutputs
from jaxserve.vllm_flags import NotTaken, Row, said_of

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?", re.IGNORECASE)
_COUNT = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*([kKmMgG]?)")
_COUNT_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_METAVARS = {int: "N", float: "X", str: "TEXT"}

MAX_CHOICES_LENGTH = 72
"""Most characters of a flag's choices that the help has beside the flag; more are listed by one command only."""


def add_config_flags(
    parser: Parser,
    config: type[Any],
    *,
    defaults: Mapping[str, Any] | None = None,
    only: Sequence[str] | None = None,
    lists_names: bool = False,
) -> None:
    """Add a flag for each field of a config dataclass, to the groups in their metadata.

    `defaults` are values that this command uses instead of the field's own. `only` names the fields; None means all.
    With `lists_names` the help has the choices of flags with many of them, too.
    """
    defaults = defaults or {}
    parser.set_defaults(**defaults)
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if only is not None and field.name not in only:
            continue
        names = [_flag(field.name), *field.metadata["aliases"]]
        is_size = field.metadata["is_size"]
        options = _size_options() if is_size else _options(hints[field.name])
        choices = ", ".join(options.get("choices", ()))
        if words := field.metadata.get("words"):
            options["type"] = _word_or(words, options["type"])
        if words and choices:  # the help has the choices, and not the words
            options |= {"choices": [*options["choices"], *words], "metavar": f"{{{choices.replace(' ', '')}}}"}
        if values := vllm_flags.VALUES.get(field.name):
            options["type"] = _judged(parser, names[0], values, otherwise=options["type"], default=field.default)
        if options.get("action") == "append":
            is_long = bool(field.metadata.get("many"))
            options |= {"action": "extend", "nargs": "+"} if is_long else {"action": Lists}
        default = defaults.get(field.name, field.default)
        if is_size and isinstance(default, int):
            default = f"{default // 2**20}MiB"
        text = _with_default(field.metadata["help"], default)
        if len(choices) > MAX_CHOICES_LENGTH:
            options["metavar"] = "NAME"
            text += f"; names: {choices}" if lists_names else "; jaxserve parse --help lists the names"
        parser.add_flag(field.metadata["group"], *names, dest=field.name, help=text, **options)


def add_sampling_flags(parser: Parser, texts: Mapping[str, str], *, without: Sequence[str] = ()) -> None:
    """Add a flag for each sampling parameter that has one. `texts` are helps of this command's own."""
    hints = typing.get_type_hints(SamplingParams)
    for field in msgspec.structs.fields(SamplingParams):
        name, parameter = field.name, PARAMETERS[field.name]
        if parameter.group and name not in without:
            options = _options(hints[name])
            text = parameter.meaning + ("; repeatable" if options.get("action") == "append" else "")
            if parameter.hub:
                text += f"; default: the model's, else {field.default:g}"
            text = texts.get(name, _with_default(text, field.default))
            parser.add_flag(parameter.group, _flag(name), dest=name, help=text, **options)


def given(args: argparse.Namespace, names: Sequence[str] | Callable[..., Any]) -> dict[str, Any]:
    """Return the flags among `names` that have a value, with it. A function or dataclass stands for its parameters."""
    names = list(inspect.signature(names).parameters) if callable(names) else names
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def value_of(config: type[Any], name: str, text: str) -> Any:
    """Return the value of a field of a config dataclass that a text means as the field's flag; "true" and "false" are
    those of a switch. Raises ConfigError, naming the field.
    """
    metadata = config.__dataclass_fields__[name].metadata
    options = _size_options() if metadata.get("is_size") else _options(typing.get_type_hints(config)[name])
    words = metadata.get("words") or {}
    if options.get("action") is argparse.BooleanOptionalAction:
        options["type"], words = _no_switch, {"true": True, "false": False}
    try:
        value = _word_or(words, options["type"])(text)
    except (argparse.ArgumentTypeError, ValueError) as error:
        raise ConfigError(f"{name}: {error}") from None
    return [value] if options.get("action") == "append" else value


def _no_switch(text: str) -> Any:
    raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")


def parse_size(text: str) -> int:
    """Parse a size such as "4096", "512MiB" or "1.5GiB" into bytes.

    Suffixes are powers of 1024, with optional "i" and "B". Raises argparse.ArgumentTypeError for anything else.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 4096, 512MiB or 1.5GiB")
    number, suffix = match.groups()
    power = "BKMGT".index(suffix[0].upper()) if suffix else 0
    return int(float(number) * 1024**power)


def parse_count(text: str) -> int:
    """Return a whole number such as "4096", "8k" (8,000), "8K" (8,192) or "1.5M", as vLLM reads them.

    Raises argparse.ArgumentTypeError for anything else.
    """
    match = _COUNT.fullmatch(text.strip())
    number = float("nan") if match is None else float(match[1]) * _COUNT_FACTORS[match[2]]
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 4096, 8k (8000) or 8K (8192)")
    return int(text) if match is not None and not match[2] and "." not in text else int(number)


def _word_or(words: Mapping[str, Any], parse: Any) -> Any:
    """Return a parser of a flag's value that also accepts these words."""

    def value(text: str) -> Any:
        return words[text] if text in words else parse(text)

    return value


def _judged(parser: Parser, flag: str, values: Mapping[str, Row | NotTaken], *, otherwise: Any, default: Any) -> Any:
    """Return a parser of a flag's value that judges some values of vLLM. A harmless one means the default."""

    def value(text: str) -> Any:
        if text not in values:
            return otherwise(text)
        verdict = values[text].judge(text)
        if verdict.is_refused:
            raise argparse.ArgumentTypeError(verdict.text)
        parser.hear(said_of(f"{flag} {text}", text, values[text]))
        return default

    return value


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _with_default(text: str, default: Any) -> str:
    if isinstance(default, bool):
        default = "on" if default else "off"
    if default not in (None, "", ()) and "default:" not in text:
        text += f"; default: {default}"
    return text.replace("%", "%%")


def _size_options() -> dict[str, Any]:
    return {"type": parse_size, "metavar": "BYTES", "default": argparse.SUPPRESS}


def _options(hint: Any) -> dict[str, Any]:
    """Return the `add_argument` options that parse a value of this type. Sequences become flags that may be
    repeated.
    """
    options: dict[str, Any] = {"default": argparse.SUPPRESS}
    alternatives = [hint]
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        alternatives = [option for option in typing.get_args(hint) if option is not types.NoneType]
    hint = alternatives[0]
    origin = typing.get_origin(hint)
    if hint is bool:
        return options | {"action": argparse.BooleanOptionalAction}
    if origin is Literal:
        return options | {"type": str, "choices": typing.get_args(hint)}
    if origin is dict:
        return options | {"action": Merged, "type": parse_object, "metavar": "JSON"}
    if origin is Mapping:
        return options | {"type": _id_map, "metavar": "JSON"}
    if hint is StructuredOutputs:
        return options | {"type": _structured_outputs, "metavar": "JSON"}
    if origin is Sequence:
        (item,) = typing.get_args(hint)
        return options | {"action": "append", "type": item, "metavar": _METAVARS[item]}
    return options | {"type": parse_count if hint is int else hint, "metavar": _METAVARS[hint]}


def parse_object(text: str) -> dict[str, Any]:
    """Return a JSON object. Raises argparse.ArgumentTypeError for anything else."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r:.100} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.100} is not a JSON object")
    return value


def _structured_outputs(text: str) -> StructuredOutputs:
    try:
        return StructuredOutputs(**parse_object(text))
    except (InvalidRequest, TypeError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _id_map(text: str) -> dict[int, float]:
    try:
        return {int(key): float(value) for key, value in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise argparse.ArgumentTypeError(f'{text!r} is not JSON such as {{"15": -100}}') from error
