"""Reads the tokenizer of a model directory. No jax.

tokenizer.json is the tokenizer, whatever class tokenizer_config.json names; the companions say which tokens are
special, what is added to texts, and how a chat is rendered. Only where there is no tokenizer.json (sentencepiece,
tiktoken, a vocabulary with merges) `transformers` makes one, which takes seconds to import.
"""

import dataclasses
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, models

from jaxserve.errors import CheckpointError
from jaxserve.loading.affixes import AddedByOption, apply_options
from jaxserve.loading.json_files import ROLES, read_object
from jaxserve.loading.mistral_pattern import follow_mistral_pattern

logger = logging.getLogger(__name__)

# Without one of these, transformers would build an empty tokenizer from the model's class name.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")

# The files of a directory that belong to its tokenizer.
_JSON_FILES = (
    *("config.json", "tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json"),
    "vocab.json",
)

_TOKEN_FIELDS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """What the files of a directory say.

    Attributes:
        special_tokens: tokens by what they are for, such as bos_token; templates know them by these names.
        chat_templates: chat templates by name; the usual one is "default".
        response_template: how an answer is to be read (transformers 5.13 and later), or None.
    """

    backend: Tokenizer
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]
    response_template: Any


def read_tokenizer_files(path: Path) -> TokenizerFiles:
    """Read the tokenizer of a model directory. Raises CheckpointError, naming the faulty file if it is known."""
    if not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise CheckpointError(f"no tokenizer in {path}: expected one of {', '.join(_TOKENIZER_FILES)}")
    config, model = _read_if_there(path / "tokenizer_config.json"), _read_if_there(path / "config.json")
    if not (path / "tokenizer.json").is_file():
        return _read_through_transformers(path)
    try:
        backend = Tokenizer.from_file(str(path / "tokenizer.json"))
        special = _add_special_tokens(backend, _SpecialTokens(path, config), model)
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises no other type
        raise _unreadable(path, error) from error
    backend.encode_special_tokens = bool(config.get("split_special_tokens"))
    _report_superseded(backend, path, config)
    _apply_options(backend, path, config, special)
    follow_mistral_pattern(backend, path, is_fixed=config.get("fix_mistral_regex"), model=model)
    return TokenizerFiles(
        backend=backend,
        special_tokens=special,
        chat_templates=_chat_templates(path, config.get("chat_template")),
        response_template=config.get("response_template"),
    )


class _SpecialTokens:
    """The tokens that the companions of tokenizer.json name.

    Attributes:
        by_id: tokens to be added, by id.
        by_role: the token for each purpose that the files name, bos_token and the like.
        others: tokens without a purpose.
        is_old: true for files of a transformers before 4.34, in which tokenizer.json wins over added_tokens.json.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]):
        self.is_old = config.get("added_tokens_decoder") is None
        mapped = _read_if_there(path / "special_tokens_map.json") if self.is_old else {}
        fields = {**config, **mapped}
        added = fields.get("added_tokens_decoder") or {}
        self.by_id = {int(token_id): _as_token(token) for token_id, token in added.items()}
        known = {token.content: token for token in self.by_id.values()}
        named = dict(fields.get("model_specific_special_tokens") or {})
        extra, old = (fields.get(f"{name}_special_tokens") or () for name in ("extra", "additional"))
        listed: list[Any] = []
        for each in (extra,) if extra and not isinstance(extra, dict) else (extra, old):
            if isinstance(each, dict):
                named |= each
            else:
                listed.extend(each)
        roles = dict.fromkeys(ROLES) | {
            name: value
            for name, value in fields.items()
            if name in ROLES
            or (
                name.endswith("_token")
                and (isinstance(value, str) or _is_typed(value) or (name in mapped and isinstance(value, dict)))
            )
        }
        self.by_role = {
            name: known.get(token.content, token)
            for name, value in (roles | named).items()
            if value is not None and (token := _as_token(value, special=True))
        }
        self.others = [_as_token(token, special=not _is_typed(token)) for token in listed]
        if self.is_old:
            special = {token.content for token in (*self.by_role.values(), *self.others)}
            self.by_id |= {
                token_id: AddedToken(token, normalized=token not in special, special=token in special)
                for token, token_id in _read_if_there(path / "added_tokens.json").items()
            }


def _add_special_tokens(backend: Tokenizer, named: _SpecialTokens, model: Mapping[str, Any]) -> dict[str, str]:
    """Add what tokenizer.json lacks; return the token for each purpose."""
    there = backend.get_added_tokens_decoder()
    if not named.by_role and not named.others:  # GPT-2 has this in no other file
        named.by_role |= {
            f"{name}_token": there[token_id]
            for name in ("bos", "eos")
            if isinstance(token_id := model.get(f"{name}_token_id"), int)
            and token_id in there
            and there[token_id].special
        }
    by_id = named.by_id | (there if named.is_old else {})
    missing = [token for _, token in sorted(by_id.items())]
    contents = {token.content for token in (*there.values(), *missing)}
    roles = {token.content for token in named.by_role.values()}
    for token in missing:
        token.special = token.special or token.content in roles
    for token in (*named.by_role.values(), *named.others):
        if token.content not in contents:
            contents.add(token.content)
            missing.append(token)
    backend.add_tokens(missing)
    if moved := [token.content for i, token in named.by_id.items() if backend.token_to_id(token.content) != i]:
        logger.warning(
            "tokenizer_config.json gives %d added tokens, such as %r, other ids than tokenizer.json, which is followed",
            len(moved),
            moved[0],
        )
    return {name: token.content for name, token in named.by_role.items()}


def _apply_options(backend: Tokenizer, path: Path, config: Mapping[str, Any], special: Mapping[str, str]) -> None:
    """Follow add_bos_token and add_eos_token of tokenizer_config.json."""
    options = {}
    for name in ("bos", "eos"):
        token, is_added = special.get(f"{name}_token"), config.get(f"add_{name}_token")
        if is_added and token is None:
            logger.warning("%s/tokenizer_config.json: add_%s_token has no effect without %s_token", path, name, name)
        options[name] = AddedByOption(None if token is None else backend.token_to_id(token), is_added)
    apply_options(backend, **options)


def _report_superseded(backend: Tokenizer, path: Path, config: Mapping[str, Any]) -> None:
    """Log what tokenizer_config.json says and tokenizer.json does not do."""
    wants_space = config.get("add_prefix_space")
    if wants_space is not None and bool(wants_space) != _adds_space(backend):
        logger.warning("%s/tokenizer_config.json: add_prefix_space contradicts tokenizer.json, which is followed", path)
    is_forced = config.get("clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")
    if config.get("clean_up_tokenization_spaces") and (is_forced or not isinstance(backend.model, models.BPE)):
        logger.warning(
            "%s/tokenizer_config.json: clean_up_tokenization_spaces is not followed: a text keeps the spaces before "
            "punctuation that the model writes",
            path,
        )


def _adds_space(backend: Tokenizer) -> bool:
    """Return true if a space is put before a text that has none."""
    for part in (backend.normalizer, backend.pre_tokenizer):
        state = {} if part is None else json.loads(part.__getstate__())
        for step in state.get("normalizers", state.get("pretokenizers", [state])):
            match step:
                case {"type": "Prepend"} | {"type": "ByteLevel", "add_prefix_space": True}:
                    return True
                case {"type": "Metaspace"}:
                    return step.get("prepend_scheme", "always") != "never"
    return False


def _is_typed(value: Any) -> bool:
    """Return true for an object that says that it is a token, as those of tokenizer_config.json do."""
    return isinstance(value, dict) and "__type" in value


def _as_token(value: Any, *, special: bool = False) -> AddedToken:
    """Return a token of a JSON file: its text, or an object that also says how it is matched."""
    if isinstance(value, str):
        return AddedToken(value, special=special)
    fields: dict[str, Any] = {name: value[name] for name in _TOKEN_FIELDS if name in value}
    if special:
        fields["special"] = True
    return AddedToken(**fields)


def _chat_templates(path: Path, given: Any) -> dict[str, str]:
    """Return the chat templates by name: those of files, then those of `given`, the field of tokenizer_config.json."""
    templates = dict(_templates_of_files(path))
    if isinstance(given, list):
        given = {each["name"]: each["template"] for each in given}
    elif isinstance(given, str):
        given = {"default": given}
    return {**(given or {}), **templates}


def _templates_of_files(path: Path) -> Iterator[tuple[str, str]]:
    files = {file.stem: file for file in sorted((path / "additional_chat_templates").glob("*.jinja"))}
    for name, file in {**files, "default": path / "chat_template.jinja"}.items():
        if file.is_file():
            try:
                yield name, file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise CheckpointError(f"cannot read {file}: {error}") from error


def _read_through_transformers(path: Path) -> TokenizerFiles:
    auto_tokenizer = _import_transformers().AutoTokenizer
    try:
        tokenizer = auto_tokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    # transformers lets anything through: json errors, tokenizers' bare Exception, KeyError
    except Exception as error:
        raise _unreadable(path, error) from error
    if not getattr(tokenizer, "is_fast", False):
        raise CheckpointError(f"the tokenizer in {path} has no tokenizer.json form; convert it first")
    return TokenizerFiles(
        backend=tokenizer.backend_tokenizer,
        special_tokens=tokenizer.special_tokens_map,
        chat_templates=_chat_templates(path, tokenizer.chat_template),
        response_template=getattr(tokenizer, "response_template", None),
    )


def _read_if_there(file: Path) -> dict[str, Any]:
    return read_object(file) if file.is_file() else {}


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a directory whose tokenizer could not be loaded, naming the faulty file if possible."""
    for name in _JSON_FILES:
        try:
            _read_if_there(path / name)
        except CheckpointError as broken:
            return broken
    config = path / "config.json"
    if config.is_file() and not (path / "tokenizer.json").is_file():
        try:
            _import_transformers().AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except Exception as wrong:  # it lets anything through here too
            return CheckpointError(f"cannot read {config}: {first_line(wrong)}")
    return CheckpointError(f"cannot read the tokenizer in {path}: {first_line(error)}")


def _import_transformers() -> Any:
    """Import transformers without its warning that PyTorch is missing, which is not used here."""

    def is_no_advice(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    transformers_logger = logging.getLogger("transformers")
    transformers_logger.addFilter(is_no_advice)
    try:
        import transformers
    finally:
        transformers_logger.removeFilter(is_no_advice)
    return transformers


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, with the second if the first ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]
