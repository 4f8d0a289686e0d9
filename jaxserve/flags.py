"""Turn dataclass and struct fields into command-line flags, and parsed flags back into objects. Used by `cli` and
`bench`.

A flag that is not given is absent from the namespace, so that defaults have one source: the field.
"""

import argparse
import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from jaxserve.request import SamplingParams

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?", re.IGNORECASE)
_METAVARS = {int: "N", float: "X", str: "TEXT"}


class Parser(argparse.ArgumentParser):
    """An argument parser whose `--help GROUP` prints one group of flags. Abbreviated flags are not accepted."""

    def __init__(self, *, prog: str, usage: str, description: str):
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage}",
            description=description,
            add_help=False,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
        )
        self.groups: dict[str, list[argparse.Action]] = {}
        self._containers: dict[str, argparse._ArgumentGroup] = {}
        self.add_argument("-h", "--help", nargs="?", action=_Help, metavar="GROUP", help="print this, or one group")

    def add_flag(self, group: str, *names: str, **options: Any) -> None:
        """Call `add_argument` on the group with this title, which is created when it is first named."""
        if group not in self.groups:
            self.groups[group] = []
            self._containers[group] = self.add_argument_group(group)
        self.groups[group].append(self._containers[group].add_argument(*names, **options))


class _Help(argparse.Action):
    def __call__(self, parser: Any, _namespace: Any, values: Any, _option: str | None = None) -> None:
        if values is None:
            parser.print_help()
        elif values in parser.groups:
            formatter = parser.formatter_class(parser.prog)
            formatter.start_section(values)
            formatter.add_arguments(parser.groups[values])
            formatter.end_section()
            print(formatter.format_help().strip())  # noqa: T201
        else:
            parser.error(f"no group {values!r} of flags; there are: {', '.join(parser.groups)}")
        parser.exit()


def add_config_flags(
    parser: Parser, config: type[Any], *, defaults: Mapping[str, Any] | None = None, only: Sequence[str] | None = None
) -> None:
    """Add a flag for each field of a config dataclass, to the groups in their metadata.

    `defaults` are values that this command uses instead of the field's own. `only` names the fields; None means all.
    """
    defaults = defaults or {}
    parser.set_defaults(**defaults)
    hints = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if only is not None and field.name not in only:
            continue
        names = [_flag(field.name)] + [alias for alias in [field.metadata["alias"]] if alias]
        is_size = field.metadata["is_size"]
        options = _size_options() if is_size else _options(hints[field.name])
        default = defaults.get(field.name, field.default)
        if is_size and isinstance(default, int):
            default = f"{default // 2**20}MiB"
        text = _with_default(field.metadata["help"], default)
        parser.add_flag(field.metadata["group"], *names, dest=field.name, help=text, **options)


def add_sampling_flags(parser: Parser, group: str, texts: Mapping[str, str]) -> None:
    """Add a flag for each field of SamplingParams named in `texts`, which maps it to its help."""
    fields = {field.name: field for field in msgspec.structs.fields(SamplingParams)}
    hints = typing.get_type_hints(SamplingParams)
    for name, text in texts.items():
        options = _options(hints[name])
        parser.add_flag(group, _flag(name), dest=name, help=_with_default(text, fields[name].default), **options)


def given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return the flags among `names` that were given on the command line, with their values."""
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


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
        return options | {"choices": typing.get_args(hint)}
    if origin is Mapping:
        return options | {"type": _id_map, "metavar": "JSON"}
    if origin is Sequence:
        (item,) = typing.get_args(hint)
        return options | {"action": "append", "type": item, "metavar": _METAVARS[item]}
    return options | {"type": hint, "metavar": _METAVARS[hint]}


def _id_map(text: str) -> dict[int, float]:
    try:
        return {int(key): float(value) for key, value in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise argparse.ArgumentTypeError(f'{text!r} is not JSON such as {{"15": -100}}') from error
