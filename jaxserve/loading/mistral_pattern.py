"""The faulty pattern with which many tokenizer.json files of Mistral's models split texts. No jax."""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, pre_tokenizers

logger = logging.getLogger(__name__)

_MODEL_TYPES = ("mistral", "mistral3", "voxtral", "ministral", "pixtral")

_MIN_VOCABULARY = 100_000
"""Tokenizers with more tokens than this are byte-level ones; the smaller ones are sentencepiece's."""

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = "|".join(rf"[^\r\n\p{{L}}\p{{N}}]?{word}" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*"))
PATTERN = _WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How these models split texts."""


def follow_mistral_pattern(backend: Tokenizer, path: Path, *, is_fixed: bool | None, model: Mapping[str, Any]) -> None:
    """Repair a faulty pattern if `is_fixed` (fix_mistral_regex of tokenizer_config.json), else warn of it.

    Which files may have it is transformers' rule: `model`, the config.json, is one of Mistral's, or does not say what
    it is, and was written before version 5.
    """
    if (
        not model
        or model.get("model_type") not in (None, *_MODEL_TYPES)
        or _is_repaired(model.get("transformers_version"))
        or backend.get_vocab_size() <= _MIN_VOCABULARY
        or backend.pre_tokenizer is None
    ):
        return
    step = json.loads(backend.pre_tokenizer.__getstate__())
    steps = step["pretokenizers"] if step["type"] == "Sequence" else [step]
    if steps and steps[0].get("pattern") == {"Regex": PATTERN}:
        return
    if not is_fixed:
        if is_fixed is None:
            logger.warning(
                "%s/tokenizer.json splits texts by a faulty pattern, as many files of Mistral's models do: some texts "
                'get other tokens than in training. Set "fix_mistral_regex": true in tokenizer_config.json to repair',
                path,
            )
        return
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    current: Any = backend.pre_tokenizer
    if isinstance(current, pre_tokenizers.Sequence):
        current[0] = split
        backend.pre_tokenizer = current
    else:
        if isinstance(current, pre_tokenizers.Metaspace):
            current = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, current])


def _is_repaired(version: Any) -> bool:
    """Return true for a release of transformers from 5.0.0 on; its development versions came before."""
    match = re.match(r"(\d+)\.", version) if isinstance(version, str) else None
    return match is not None and int(match[1]) >= 5 and not re.match(r"5\.0\.0\D*(dev|rc|a|b)\d", version)
