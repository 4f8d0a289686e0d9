"""Fields of other servers' requests and of vLLM's SamplingParams that nothing here follows, and what to do instead.

Requests over HTTP (`server.protocol.fields`) and SamplingParams in Python are refused by the same words.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxserve.errors import InvalidRequest

EMPTY: tuple[Any, ...] = (None, False, "", [], {})
UNLESS_NULL = (None,)


class Refused(NamedTuple):
    """The field is refused with the hint `word`, which says what to write instead, unless its value is `neutral`: one
    that asks for nothing.
    """

    word: str = ""
    neutral: Sequence[Any] = EMPTY

    def is_neutral(self, value: object) -> bool:
        """Return true if a value asks for nothing. False is distinct from 0, and 1 from 1.0."""
        return any(type(value) is type(neutral) and value == neutral for neutral in self.neutral)


def refuse(name: str, cell: Refused, value: object) -> None:
    """Raise InvalidRequest, naming the field, unless the value asks for nothing."""
    if not cell.is_neutral(value):
        raise InvalidRequest(
            f"{name} is not supported{cell.word and ': '}{cell.word}", param=name, code="unsupported_parameter"
        )


CONSTRAINTS = (
    *("grammar", "grammar_string", "ebnf", "regex", "json_schema", "json_object", "structural_tag"),
    *("choice", "choices", "format", "response_schema", "output_schema"),
    *("guided_json", "guided_json_object", "guided_regex", "guided_choice", "guided_grammar"),
    *("guided_decoding", "guided_decoding_backend", "guided_whitespace_pattern"),
)
"""Other servers' names for structured_outputs."""

CONSTRAINT = Refused(
    "write structured_outputs, such as {'json': ...}, {'regex': ...} or {'grammar': ...}", (None, False, "", [])
)  # {} is excluded: it is a schema that allows anything

EVERYWHERE: Mapping[str, Refused] = {
    **dict.fromkeys(CONSTRAINTS, CONSTRAINT),
    "logits_processors": Refused(),
    "vllm_xargs": Refused(),
    "repetition_detection": Refused(),
}
"""Fields that neither requests nor SamplingParams have."""

IN_PYTHON: Mapping[str, Refused] = {
    **EVERYWHERE,
    "use_beam_search": Refused("LLM.beam_search"),
    "length_penalty": Refused("it is of BeamSearchParams", (None, 1, 1.0)),
    "early_stopping": Refused("it is of BeamSearchParams"),
    "extra_args": Refused(),
    "flat_logprobs": Refused("logprobs are a list of dicts"),
    "max_completion_tokens": Refused("write max_tokens"),
    "max_new_tokens": Refused("write max_tokens"),
    "output_kind": Refused("generate returns whole texts; stream and AsyncLLM yield what is new", UNLESS_NULL),
    "prompt_logprob_start": Refused("prompt_logprobs are those of the whole prompt", (None, 0)),
    "prompt_logprob_token_ids": Refused("prompt_logprobs are those of the most likely tokens"),
    "response_format": Refused("write structured_outputs", (None, {"type": "text"})),
    "routed_experts_prompt_start": Refused("experts are not returned", (None, 0)),
    "skip_reading_prefix_cache": Refused("enable_prefix_caching=False is an option of LLM"),
    "stream_interval": Refused("every token is yielded when it is there", (None, 1)),
    "thinking_token_budget": Refused("only the server reads thoughts", (None, -1)),
    "top_logprobs": Refused("write the number as logprobs"),
    "trace_decode_token_ids": Refused(),
    "truncate_prompt_tokens": Refused("give the token ids that are left as the prompt", UNLESS_NULL),
}
"""Fields that only the SamplingParams of vLLM, or only requests, have."""

WITHOUT_EFFECT = frozenset({"output_text_buffer_length", "skip_clone", "spaces_between_special_tokens"})
"""Fields of vLLM's SamplingParams that change nothing here."""


def without_foreign(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of SamplingParams without those of vLLM's that ask for nothing.

    Raises InvalidRequest, naming the field, for one that is not followed.
    """
    taken = {}
    for name, value in fields.items():
        cell = CONSTRAINT if name.startswith("guided_") else IN_PYTHON.get(name)
        if cell is not None:
            refuse(name, cell, value)
        elif name == "best_of" and value not in (None, fields.get("n", 1)):
            raise InvalidRequest("best_of must be equal to n", param=name)
        elif name != "best_of" and name not in WITHOUT_EFFECT:
            taken[name] = value
    return taken
