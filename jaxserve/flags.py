"""Turn dataclass and struct fields into command-line flags, and parsed flags back into objects. Used by `cli` and
`bench`.

A flag that is not given is absent from the namespace, so that defaults have one source: the field.
"""

import argparse
import dataclasses
import difflib
import json
import os
import re
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import configargparse
import msgspec

from jaxserve import vllm_flags
from jaxserve.request import SamplingParams
from jaxserve.vllm_flags import Harmless, Refused

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?", re.IGNORECASE)
_COUNT = re.compile(r"([+-]?\d+(?:\.\d+)?)\s*([kKmMgG]?)")
_COUNT_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_METAVARS = {int: "N", float: "X", str: "TEXT"}

MAX_CHOICES_LENGTH = 72
"""Most characters of a flag's choices that the help has beside the flag; more are listed by one command only."""

VARIABLES = "JAXSERVE_"
"""Prefix of environment variables that set options."""

OTHER_VARIABLES = frozenset({"JAXSERVE_TEST_DATA"})
"""Variables with this prefix that set no option."""

_KUBERNETES = re.compile(r"JAXSERVE_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_\w+)")
"""Variables that Kubernetes sets in pods beside a Service named jaxserve; JAXSERVE_PORT is tcp://... then."""


class Parser(configargparse.ArgumentParser):
    """An argument parser whose `--help GROUP` prints one group of flags. Abbreviated flags are not accepted.

    With `has_settings`, options may also be set in a YAML file (`--config FILE`) and in environment variables
    (`JAXSERVE_MAX_NUM_SEQS`). The command line overrides the environment, and the environment overrides the file.
    """

    def __init__(self, *, prog: str, usage: str, description: str, has_settings: bool = False):
        super().__init__(
            prog=prog,
            usage=f"{prog} {usage}",
            description=description,
            add_help=False,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
            auto_env_var_prefix=VARIABLES if has_settings else None,
            add_env_var_help=False,
            add_config_file_help=False,
            config_file_parser_class=configargparse.YAMLConfigFileParser,
        )
        self.has_settings = has_settings
        self.groups: dict[str, list[argparse.Action]] = {}
        self._containers: dict[str, argparse._ArgumentGroup] = {}
        self.add_argument("-h", "--help", nargs="?", action=_Help, metavar="GROUP", help="print this, or one group")
        if has_settings:
            self.add_argument(
                "--config",
                is_config_file=True,
                metavar="FILE",
                help="YAML file of options, by the names of their flags",
            )
        self.set_defaults(parser=self)

    def get_possible_config_keys(self, action: argparse.Action) -> list[str]:
        """Return the names that an option may have in a file: with hyphens, or with underscores."""
        keys = super().get_possible_config_keys(action)
        return keys + [key.replace("-", "_") for key in keys]

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Sequence[str] | None = None, namespace: Any = None, **options: Any
    ) -> Any:
        """Parse as argparse does. Variables that Kubernetes sets are no options."""
        options.setdefault("env_vars", _options_in(os.environ))
        return super().parse_known_args(args, namespace, **options)

    def variables(self) -> dict[str, str]:
        """Return the environment variables of the options of all commands. Each maps to the one that sets the option,
        itself or that of the flag's first name, or to an empty text if no help shows the flag.
        """
        commands = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]  # pyright: ignore[reportPrivateUsage]
        found = {} if not self.has_settings else dict(self._variables())
        for parser in (parser for action in commands for parser in action.choices.values()):
            found |= parser.variables()
        return found

    def _variables(self) -> Iterator[tuple[str, str]]:
        for action in self._actions:
            if not isinstance(action, _Help) and not action.is_config_file_arg:  # pyright: ignore[reportAttributeAccessIssue]
                names = [name for name in action.option_strings if name.startswith("--")]
                is_shown = action.help != argparse.SUPPRESS
                yield from ((_variable(name), _variable(names[0]) if is_shown else "") for name in names)
        for name, meant in vllm_flags.RENAMED.items():
            yield _variable(name), _variable(meant)

    def add_flag(self, group: str, *names: str, **options: Any) -> None:
        """Call `add_argument` on the group with this title, which is created when it is first named."""
        if group not in self.groups:
            self.groups[group] = []
            self._containers[group] = self.add_argument_group(group)
        self.groups[group].append(self._containers[group].add_argument(*names, **options))

    def command(self, name: str) -> "Parser":
        """Return the parser of a command. Raises KeyError if there is none of that name."""
        (commands,) = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]  # pyright: ignore[reportPrivateUsage]
        return commands.choices[name]

    def shown(self) -> list[argparse.Action]:
        """Return the flags that the help shows."""
        return [action for action in self._actions if action.option_strings and action.help != argparse.SUPPRESS]

    def add_known_flags(self, flags: Mapping[str, Harmless | Refused]) -> None:
        """Accept or refuse flags of vLLM by a table of `vllm_flags`. They are not shown in the help."""
        for name, row in flags.items():
            if name not in self._option_string_actions:
                self.add_argument(name, action=_Known, nargs=row.nargs, row=row, help=argparse.SUPPRESS)

    def refuse(self, arguments: Sequence[str]) -> NoReturn:
        """End with this command's usage and an error that names arguments which it does not know."""
        texts = []
        for argument in arguments:
            flag = argument.split("=")[0]
            if not flag.startswith("-"):
                texts.append(f"unexpected argument {argument!r}")
            elif (verdict := vllm_flags.verdict(flag)) is not None:
                texts.append(f"{flag} is a flag of vLLM's server: {verdict}")
            else:
                texts.append(f"unknown flag {flag}{self.did_you_mean(flag)}")
                break  # what follows may be its value
        self.error("; ".join(texts))

    def did_you_mean(self, flag: str) -> str:
        """Return a question that names the flag nearest to an unknown one, or an empty text."""
        shown = [name for action in self.shown() for name in action.option_strings]
        near = difflib.get_close_matches(flag, shown, n=1, cutoff=0.7)
        return f", did you mean {near[0]}?" if near else ""


class _Known(argparse.Action):
    """A flag of vLLM: one line on standard error where it is harmless, an error where it is not."""

    def __init__(self, *args: Any, row: Harmless | Refused, nargs: Any, **kwargs: Any):
        super().__init__(*args, nargs=None if nargs == 1 else nargs, **(kwargs | {"default": argparse.SUPPRESS}))
        self._row = row

    def __call__(
        self, parser: argparse.ArgumentParser, _namespace: Any, values: Any, option: str | None = None
    ) -> None:
        assert option is not None
        value = values if isinstance(values, str) else None
        text = f"{option}: {vllm_flags.verdict(option, value)}"
        if isinstance(self._row, Refused) or (value is not None and not self._row.accepts(value)):
            parser.error(text)
        print(f"jaxserve: {text}", file=sys.stderr)  # noqa: T201


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
        if words := field.metadata.get("words"):
            options["type"] = _word_or(words, options["type"])
        if advice := vllm_flags.VALUES.get(field.name):
            options["type"] = _advised(advice, options["type"])
        if field.metadata.get("many"):
            options |= {"action": "extend", "nargs": "+"}
        default = defaults.get(field.name, field.default)
        if is_size and isinstance(default, int):
            default = f"{default // 2**20}MiB"
        text = _with_default(field.metadata["help"], default)
        if len(choices := ", ".join(options.get("choices", ()))) > MAX_CHOICES_LENGTH:
            options["metavar"] = "NAME"
            text += f"; names: {choices}" if lists_names else "; jaxserve parse --help lists the names"
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


def unknown_variables(environment: Mapping[str, str], known: Mapping[str, str]) -> list[str]:
    """Return a sentence about each variable with our prefix that sets nothing, with the one that may be meant.

    `known` is what `Parser.variables` returns.
    """
    sentences = []
    for name in sorted(_options_in(environment)):
        if not name.startswith(VARIABLES) or name in OTHER_VARIABLES or known.get(name) in (name, ""):
            continue
        names = {meant.removeprefix(VARIABLES): meant for meant in known.values() if meant}
        near = difflib.get_close_matches(name.removeprefix(VARIABLES), names, n=1, cutoff=0.7)
        meant = known.get(name) or (names[near[0]] if near else None)
        question = "" if meant is None else f", did you mean {meant}?"
        sentences.append(f"the environment variable {name} sets no option{question}")
    return sentences


def _options_in(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without what Kubernetes sets for a Service named jaxserve."""
    return {
        name: value
        for name, value in environment.items()
        if not _KUBERNETES.fullmatch(name) and not (name == f"{VARIABLES}PORT" and value.startswith("tcp://"))
    }


def _variable(name: str) -> str:
    return VARIABLES + name.strip("-").replace("-", "_").upper()


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


def _advised(advice: Mapping[str, str], parse: Any) -> Any:
    """Return a parser of a flag's value that says what to do instead of some values."""

    def value(text: str) -> Any:
        if text in advice:
            raise argparse.ArgumentTypeError(f"{text!r}: {advice[text]}")
        return parse(text)

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
    if origin is Mapping:
        return options | {"type": _id_map, "metavar": "JSON"}
    if origin is Sequence:
        (item,) = typing.get_args(hint)
        return options | {"action": "append", "type": item, "metavar": _METAVARS[item]}
    return options | {"type": parse_count if hint is int else hint, "metavar": _METAVARS[hint]}


def _id_map(text: str) -> dict[int, float]:
    try:
        return {int(key): float(value) for key, value in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise argparse.ArgumentTypeError(f'{text!r} is not JSON such as {{"15": -100}}') from error
