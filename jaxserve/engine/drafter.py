"""What an engine reads of a checkpoint that drafts, before it loads any weight."""

import json
import logging
import pathlib
from typing import Any, NamedTuple

import msgspec

from jaxserve.config import EngineConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.loading.builtin import naming, resolve_model
from jaxserve.loading.eagle3 import is_head, published_drafts, read_head
from jaxserve.loading.json_files import read_object
from jaxserve.loading.weights import load_config, naming_config
from jaxserve.models import get_family
from jaxserve.speculation import BY_CHECKPOINT, Speculation, parse_speculation

logger = logging.getLogger(__name__)


class DraftCheckpoint(NamedTuple):
    """How tokens are drafted, and by what."""

    speculation: Speculation | None = None
    path: str | None = None
    """A checkpoint of its own; None if there is none."""
    fields: dict[str, Any] | None = None
    """Its config.json."""


def read_drafter(config: EngineConfig, path: str, fields: dict[str, Any], *, progress: bool) -> DraftCheckpoint:
    """Find what drafts for the model at `path`, whose config.json has these fields. Raises
    CheckpointError, and ConfigError for a drafter that does not fit the model.
    """
    speculation = config.speculation
    if speculation is None:
        return DraftCheckpoint()
    shards = speculation.tensor_parallel_size
    if shards not in (None, config.tensor_parallel_size):
        raise ConfigError(
            f"speculative_config: draft_tensor_parallel_size must be tensor_parallel_size, "
            f"{config.tensor_parallel_size}, got {shards}: the drafter runs in the model's own steps"
        )
    if speculation.model is None:
        return DraftCheckpoint(speculation)
    with naming("speculative_config"):
        own = resolve_model(speculation.model, with_weights=config.load_format != "dummy", progress=progress)
    if speculation.method == "mtp":
        if own != path:
            raise ConfigError(
                f"speculative_config: model is {speculation.model!r}, but the method mtp uses a layer of the model "
                "itself"
            )
        return DraftCheckpoint(speculation)
    described = pathlib.Path(own) / "config.json"
    method = "eagle3" if described.is_file() and is_head(read_object(described)) else "draft_model"
    if speculation.method not in (BY_CHECKPOINT, method):
        raise ConfigError(
            f"speculative_config: method is {speculation.method}, but {speculation.model} is for the method {method}"
        )
    if not speculation.num_drafts:
        published = published_drafts(read_object(described)) if method == "eagle3" else None
        if published is None:
            raise ConfigError(
                f"speculative_config: num_speculative_tokens is missing, and {speculation.model} does not name a number"
            )
        logger.info("num_speculative_tokens is %d, as %s says", published, described)
        again = parse_speculation(config.speculative_config, published=published)
        assert again is not None
        speculation = again
    speculation = msgspec.structs.replace(speculation, method=method)
    if method == "eagle3":
        return DraftCheckpoint(speculation, own, read_head(own))
    own_fields = load_config(own)
    with naming_config(own):
        vocab_size = get_family(own_fields).config(own_fields).vocab_size
    wanted = get_family(fields).config(fields).vocab_size
    _check_vocabulary(own, vocab_size, config.tokenizer or path, wanted)
    return DraftCheckpoint(speculation, own, own_fields)


def _check_vocabulary(own: str, own_size: int, target: str, size: int) -> None:
    """Raise ConfigError unless both have the same tokens. The numbers of ids may differ by what pads them."""
    tokens, own_tokens = _tokens(target), _tokens(own)
    if tokens is None or own_tokens is None:
        if own_size != size:
            raise ConfigError(
                f"speculative_config: model {own} has a vocabulary of {own_size} tokens, but the model that it drafts "
                f"for has {size}"
            )
    elif tokens != own_tokens:
        raise ConfigError(
            f"speculative_config: model {own} has another vocabulary than the model that it drafts for: their "
            "tokenizers differ"
        )


def _tokens(path: str) -> Any:
    """Return the tokens of a directory's tokenizer, None if it has no tokenizer.json."""
    file = pathlib.Path(path) / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return json.loads(file.read_text())["model"]["vocab"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} has no vocabulary: {error}") from error
