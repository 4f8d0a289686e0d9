"""Fields of generation_config.json that change what transformers generates, and that are not followed here. No jax."""

import logging
import pathlib
from collections.abc import Mapping
from typing import Any

from jaxserve.loading.json_files import read_object

logger = logging.getLogger(__name__)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), ([], {})),
    **dict.fromkeys(("force_words_ids", "constraints", "stop_strings"), ([],)),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_new_tokens", "min_length"), (0,)),
    **dict.fromkeys(("encoder_repetition_penalty", "typical_p", "guidance_scale"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "penalty_alpha", "diversity_penalty"), (0,)),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("top_h", "max_time", "dola_layers", "watermarking_config"), ()),
    **dict.fromkeys(("token_healing", "early_stopping"), (False,)),
    "do_sample": (True,),
    "max_length": (20,),
}
"""Values, besides null, with which a field says nothing."""


def not_followed(config: Mapping[str, Any]) -> list[str]:
    """Return the fields of a generation_config.json that transformers would follow and nobody does here, with their
    values.
    """
    said = {name: config[name] for name in NEUTRAL if config.get(name) is not None}
    if config.get("max_new_tokens") is not None:  # which counts instead
        said.pop("max_length", None)
    return [f"{name} {value!r:.100}" for name, value in said.items() if value not in NEUTRAL[name]]


def log_what_is_not_followed(model: str | pathlib.Path) -> None:
    """Log a model directory's recommendations for sampling that are not followed, in one line."""
    path = pathlib.Path(model) / "generation_config.json"
    if path.is_file() and (found := not_followed(read_object(path))):
        logger.warning("%s: not followed: %s; requests may say what they want", path, ", ".join(found))
