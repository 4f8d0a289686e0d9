"""Read a command line as vLLM's users write it: the parser of all commands, and flags that are judged by `vllm_flags`.

All that is wrong with a command line is one error.
"""

import argparse
import collections
import contextlib
import difflib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import configargparse

from jaxserve import vllm_flags
from jaxserve.vllm_flags import Row, Verdict, said_of, sentences

_DOTTED = re.compile(r"(--[a-z][a-z0-9_-]*|-O|-[acs]c)(\.[\w-]+)+\+?")
"""A part of a flag whose value is JSON: short names are those of vLLM's configs. Other texts are values: -a.b."""

VARIABLES = "JAXSERVE_"
"""Prefix of environment variables that set options."""

OTHER_VARIABLES = frozenset({"JAXSERVE_TEST_DATA"})
"""Variables with this prefix that set no option."""

_KUBERNETES = re.compile(r"JAXSERVE_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_\w+)")
"""Variables that Kubernetes sets in pods beside a Service named jaxserve; JAXSERVE_PORT is tcp://... then."""


class _YamlFile(configargparse.YAMLConfigFileParser):
    """A YAML file of options. Objects become JSON, and `no-x: true` is `x: false`."""

    def parse(self, stream: Any) -> collections.OrderedDict[str, Any]:
        yaml, loader, _ = self._load_yaml()
        try:
            given = yaml.load(stream, Loader=loader)
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise configargparse.ConfigFileParserException(f"cannot read {stream.name}: {error}") from error
        given = {} if given is None else given  # it is empty, or all of it is comments
        if not isinstance(given, dict):
            raise configargparse.ConfigFileParserException(f"{stream.name} must hold options, such as max-num-seqs: 4")
        options: dict[str, Any] = {}
        for name, value in given.items():
            flag, *path = _in_our_spelling(f"--{str(name).lstrip('-')}").removeprefix("--").split(".")
            if flag.startswith("no-") and isinstance(value, bool):
                flag, value = flag.removeprefix("no-"), not value
            for key, entry in value.items() if isinstance(value, dict) and not path else [(None, value)]:
                if entry is not None or key is not None:
                    _put(options, [flag, *path, *([] if key is None else [str(key)])], entry)
        return collections.OrderedDict(
            (flag, json.dumps(value) if isinstance(value, dict) else value if isinstance(value, list) else str(value))
            for flag, value in options.items()
        )


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
            config_file_parser_class=_YamlFile,
        )
        self.has_settings = has_settings
        self._refusals: list[Verdict] = []
        self._complaints: list[str] = []
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
            meant, *_ = meant.split(".")
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

    def add_known_flags(self, flags: Mapping[str, Row]) -> None:
        """Accept or refuse flags of vLLM by a table of `vllm_flags`. They are not shown in the help."""
        for name, row in flags.items():
            if name in self._option_string_actions:
                continue
            names = [name, vllm_flags.SHORT[name]] if name in vllm_flags.SHORT else [name]
            options: dict[str, Any] = {
                "dest": argparse.SUPPRESS,
                "default": argparse.SUPPRESS,
                "help": argparse.SUPPRESS,
            }
            if row.nargs == 0:
                self.add_argument(*names, action=_KnownSwitch, row=row, **options)
            else:
                self.add_argument(
                    *names, action=_Known, nargs=None if row.nargs == 1 else row.nargs, row=row, **options
                )

    def hear(self, verdict: Verdict) -> None:
        """Keep what is refused for `check`; print one line about what needs nothing."""
        if verdict.is_refused:
            self._refusals.append(verdict)
        else:
            print(f"jaxserve: {verdict.option}: {verdict.text}", file=sys.stderr)  # noqa: T201

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Return the values of an argument as argparse does. A flag with a wrong value is left out, for `check`."""
        try:
            return super()._get_values(action, arg_strings)  # pyright: ignore[reportAttributeAccessIssue]
        except argparse.ArgumentError as error:
            if not action.option_strings:
                raise
            self._refusals.append(Verdict(str(error.message), True, f"argument {error.argument_name}"))
            return argparse.SUPPRESS

    def error(self, message: str) -> NoReturn:
        """End with this command's usage, and all that was refused before."""
        super().error("; ".join([*sentences(self._refusals), *self._complaints, message]))

    def check(self, unknown: Sequence[str], invalid: Sequence[str]) -> None:
        """End with this command's usage and one error if flags have been refused, or arguments are `unknown`.

        `invalid` are complaints about options, which belong to the same error.
        """
        for index, argument in enumerate(unknown):
            flag = argument.split("=")[0]
            if flag.startswith("-"):
                self._complaints.append(f"unknown flag {flag}{self.did_you_mean(flag)}")
            elif not index or not unknown[index - 1].startswith("-") or "=" in unknown[index - 1]:
                self._complaints.append(f"unexpected argument {argument!r}")
        if self._refusals or self._complaints:
            super().error("; ".join([*sentences(self._refusals), *self._complaints, *invalid]))

    def did_you_mean(self, flag: str) -> str:
        """Return a question that names the flag nearest to an unknown one, or an empty text."""
        shown = [name for action in self.shown() for name in action.option_strings]
        begun = {name[: len(flag) + 1]: name for name in reversed(shown)}  # --tensr begins --tensor-parallel-size
        names = begun | {name: name for name in shown}
        near = [name for name in shown if name.startswith(flag)] or [
            names[found] for found in difflib.get_close_matches(flag, names, n=1, cutoff=0.7)
        ]
        return f", did you mean {near[0]}?" if near else ""


class _Known(argparse.Action):
    """A flag of vLLM that takes values."""

    def __init__(self, *args: Any, row: Row, **options: Any):
        super().__init__(*args, **options)
        self._row = row

    def __call__(self, parser: Any, _namespace: Any, values: Any, option: str | None = None) -> None:
        assert option is not None
        parser.hear(said_of(option, True if values is None else values, self._row))


class _KnownSwitch(argparse.BooleanOptionalAction):
    """A flag of vLLM that is on or off."""

    def __init__(self, *args: Any, row: Row, **options: Any):
        super().__init__(*args, **options)
        self._row = row

    def __call__(self, parser: Any, _namespace: Any, _values: Any, option: str | None = None) -> None:
        assert option is not None
        parser.hear(said_of(option, not option.startswith("--no-"), self._row))


class Lists(argparse._AppendAction):  # pyright: ignore[reportPrivateUsage]
    """A flag that may be repeated, and takes a JSON list of texts, as vLLM does, for several at once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        """Add the texts to those that the flag has already."""
        texts = [values]
        if isinstance(values, str) and values.startswith("["):
            with contextlib.suppress(ValueError):
                texts = json.loads(values)
        for text in texts:
            super().__call__(parser, namespace, text, option)


class Merged(argparse.Action):
    """A flag whose JSON objects make one if it is repeated."""

    def __call__(self, _parser: Any, namespace: Any, values: Any, _option: str | None = None) -> None:
        """Add the fields to those that the flag has already."""
        setattr(namespace, self.dest, {**getattr(namespace, self.dest, {}), **values})


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


def arguments_of(argv: Sequence[str]) -> list[str]:
    """Return a command line in our spelling: `--max_num_seqs=4` is `--max-num-seqs=4`, and some flags have another
    name.

    vLLM's dotted flags become JSON: `--hf-overrides.rope_scaling.factor 4` is a part of `--hf-overrides`, and a `+` at
    the end of such a name adds to a list. What follows `--` are no flags.
    """
    arguments: list[str] = []
    objects: dict[str, dict[str, Any]] = {}
    end = argv.index("--") if "--" in argv else len(argv)
    rest = collections.deque(argv[:end])
    while rest:
        flag, equals, value = rest.popleft().partition("=")
        flag = _in_our_spelling(flag)
        if not _DOTTED.fullmatch(flag):
            arguments.append(flag + equals + value)
            continue
        flag, *path = flag.split(".")
        if not equals:
            value = rest.popleft() if rest and re.match(r"[^-]|-\d", rest[0]) else "true"
        _put(objects.setdefault(flag, {}), path, _json_or_text(value))
    return [*arguments, *(f"{flag}={json.dumps(fields)}" for flag, fields in objects.items()), *argv[end:]]


def _in_our_spelling(flag: str) -> str:
    if flag.startswith("--"):
        flag, dot, path = flag.partition(".")
        flag = flag.replace("_", "-") + dot + path
    return vllm_flags.RENAMED.get(flag, flag)


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _put(fields: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Put a value where a dotted name says."""
    name, *rest = path
    before = fields.get(name.removesuffix("+"))
    if rest:
        fields[name] = before if isinstance(before, dict) else {}
        _put(fields[name], rest, value)
    elif name.endswith("+"):
        fields[name.removesuffix("+")] = [*(before if isinstance(before, list) else []), value]
    else:
        fields[name] = value


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
