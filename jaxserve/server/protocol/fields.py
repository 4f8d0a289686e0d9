"""The table of request fields: which routes follow a field, and the message with which others refuse it.

Every field that some route knows has a row here; those of sampling parameters come from `PARAMETERS`. Requests are
checked against the table before they are decoded. The fields of `SamplingParams` and those that /v1/responses passes on
to a chat are taken from it, and docs/fields.md is generated from it. A field without a row is unknown: it is ignored,
counted, and logged once.
"""

import enum
import functools
from typing import Literal, NamedTuple, get_args

from jaxserve.sampling_params import PARAMETERS
from jaxserve.unsupported import CONSTRAINT, CONSTRAINTS, EMPTY, EVERYWHERE, UNLESS_NULL, Refused

Route = Literal["completions", "chat", "responses", "embeddings", "tokenize"]
ROUTES: tuple[Route, ...] = get_args(Route)


class Cell(enum.Enum):
    """What a route does with a field that it does not refuse."""

    FOLLOWED = "followed"
    NO_EFFECT = "no effect"
    """The field is known, but there is nothing on this route that it could change."""
    UNKNOWN = "unknown"


FOLLOWED, NO_EFFECT, UNKNOWN = Cell.FOLLOWED, Cell.NO_EFFECT, Cell.UNKNOWN


class Field(NamedTuple):
    """One row. With `is_sampling`, the field is passed to SamplingParams by the same name."""

    name: str
    meaning: str
    completions: Cell | Refused
    chat: Cell | Refused
    responses: Cell | Refused
    embeddings: Cell | Refused = NO_EFFECT
    tokenize: Cell | Refused = NO_EFFECT
    is_sampling: bool = False

    def cell(self, route: Route) -> Cell | Refused:
        """Return what `route` does with the field."""
        return getattr(self, route)


_NOT = Refused()
_NOT_EVENEMPTY = Refused(neutral=UNLESS_NULL)
_NEEDS_CHAT = Refused("only conversations have it, /v1/chat/completions and /v1/responses")
_NO_VECTOR = Refused("embeddings have nothing of the kind")
_ONLY_RESPONSES = Refused("only /v1/responses has it")
_WHOLE_TEXT = Refused("the whole text is tokenized", UNLESS_NULL)
_NO_BEAMS = Refused("/v1/completions and /v1/chat/completions have beam search", (None, False, 1, 1.0))
_ONE_ANSWER = Refused("a response has one answer", (None, 1))
_ANSWERS = (FOLLOWED, FOLLOWED, FOLLOWED)
_READERS = (*_ANSWERS, FOLLOWED)
_CONVERSATIONS = (_NEEDS_CHAT, FOLLOWED, FOLLOWED)


def _everywhere(name: str, meaning: str, cell: Refused = _NOT) -> Field:
    return Field(name, meaning, cell, cell, cell, cell, cell)


# fmt: off
FIELDS: tuple[Field, ...] = (
    # How tokens are chosen, and when an answer ends.
    *(
        Field(name, parameter.meaning, *_ANSWERS, is_sampling=True)
        for name, parameter in PARAMETERS.items()
        if parameter.is_field
    ),
    Field("max_tokens", "the answer ends after so many tokens", *_ANSWERS),
    Field("max_completion_tokens", "another name for max_tokens", *_ANSWERS),
    Field("max_output_tokens", "what /v1/responses calls max_tokens", Refused("write max_tokens"),
        Refused("write max_completion_tokens"), FOLLOWED),
    Field("n", "number of answers to a prompt", FOLLOWED, FOLLOWED, _ONE_ANSWER, is_sampling=True),
    Field("best_of", "must be equal to n", FOLLOWED, FOLLOWED, _ONE_ANSWER),
    *(
        Field(name, meaning, FOLLOWED, FOLLOWED, cell, cell, cell)
        for name, meaning, cell in (
            ("use_beam_search", "the answers are the n most likely ones that a search finds", _NO_BEAMS),
            ("length_penalty", "of beam search: a score is divided by the length to this power", _NO_BEAMS),
            ("early_stopping", "of beam search: true ends it when n answers are complete", _NO_BEAMS),
        )
    ),
    # What is returned.
    Field("stream", "send the answer piece by piece", *_ANSWERS, _NO_VECTOR, _WHOLE_TEXT._replace(neutral=EMPTY)),
    Field("stream_options", "usage at the end of a stream (a response always has it), or in each chunk", *_ANSWERS),
    Field("logprobs", "log probabilities of the answer's tokens: a number for completions, true for chats", FOLLOWED,
        FOLLOWED, Refused("write include: ['message.output_text.logprobs']", (None, False))),
    Field("top_logprobs", "that many most likely tokens beside each", Refused("write the number as logprobs", (None,)),
        FOLLOWED, FOLLOWED),
    Field("prompt_logprobs", "log probabilities of the prompt's tokens", FOLLOWED, FOLLOWED,
        Refused("a response has no prompt_logprobs", UNLESS_NULL)),
    Field("return_token_ids", "token ids beside the text", FOLLOWED, FOLLOWED, Refused("a response has no token ids")),
    Field("return_tokens_as_token_ids", "tokens of log probabilities are written as 'token_id:5'", *_ANSWERS),
    Field("echo", "begin the answer with the prompt; in a chat with the message that is continued", FOLLOWED, FOLLOWED,
        Refused("a response does not repeat its input")),
    Field("include_reasoning", "false: thoughts are counted, but not sent", Refused(_NEEDS_CHAT.word, (None, True)),
        FOLLOWED, FOLLOWED),
    Field("request_id", "last part of the answer's id; default: X-Request-Id", FOLLOWED, FOLLOWED,
        Refused("the server names its responses"), FOLLOWED),
    # The input.
    Field("model", "name of the model", *_READERS, FOLLOWED),
    Field("prompt", "text or token ids, or a list of them", FOLLOWED, UNKNOWN, Refused("stored prompts are OpenAI's"),
        UNKNOWN, FOLLOWED),
    Field("messages", "a conversation", UNKNOWN, FOLLOWED, UNKNOWN, FOLLOWED, FOLLOWED),
    Field("input", "what is answered or embedded", UNKNOWN, UNKNOWN, FOLLOWED, FOLLOWED, UNKNOWN),
    Field("instructions", "a system message before the input", Refused("write it into prompt"),
        Refused("write a message of the role 'system'"), FOLLOWED, Refused("write it into input"),
        Refused("write a message of the role 'system'")),
    Field("truncate_prompt_tokens",
        "read that many of the prompt's tokens; -1: as many as fit; BOS and EOS that the tokenizer adds stay",
        *_READERS, _WHOLE_TEXT),
    Field("truncation_side", "the side that is cut off: left (default) or right", *_READERS, _WHOLE_TEXT),
    Field("add_special_tokens", "put special tokens around the text; default: true, for chats false", *_READERS,
        FOLLOWED),
    Field("add_generation_prompt", "let the template begin an answer", Refused(_NEEDS_CHAT.word, (None, True)),
        FOLLOWED, FOLLOWED, FOLLOWED, FOLLOWED),
    Field("continue_final_message", "the answer continues the last message", *_CONVERSATIONS, FOLLOWED, FOLLOWED),
    Field("chat_template_kwargs", "variables of the chat template", *_CONVERSATIONS, FOLLOWED, FOLLOWED),
    Field("documents", "documents for the chat template", *_CONVERSATIONS, FOLLOWED, FOLLOWED),
    Field("verbosity", "low, medium or high, for the chat template", _NEEDS_CHAT, FOLLOWED,
        Refused("write text.verbosity"), _NO_VECTOR, FOLLOWED),
    _everywhere("chat_template", "jinja is the operator's: --chat-template", Refused("it is the operator's")),
    Field("priority", "requests of a lower number run earlier", *_READERS),
    Field("cache_salt", "prefixes are found again by requests with the same salt only", *_READERS),
    Field("suffix", "what comes behind the answer", _NOT, _NOT, _NOT),
    # Tools.
    Field("tools", "functions and custom tools that the model may call", *_CONVERSATIONS, _NO_VECTOR, FOLLOWED),
    Field("tool_choice", "none, auto, required, a function or custom tool, or allowed_tools",
        Refused(_NEEDS_CHAT.word, (None, "none", "auto")), FOLLOWED, FOLLOWED, NO_EFFECT, FOLLOWED),
    Field("parallel_tool_calls", "false: one call at most", NO_EFFECT, FOLLOWED, FOLLOWED),
    _everywhere("functions", "the old name of tools", Refused("write tools")),
    _everywhere("function_call", "the old name of tool_choice", Refused("write tool_choice", (None, "none", "auto"))),
    Field("web_search_options", "a tool of OpenAI's", _NOT_EVENEMPTY, _NOT_EVENEMPTY, _NOT_EVENEMPTY),
    Field("max_tool_calls", "a limit of OpenAI's own tools", UNKNOWN, UNKNOWN, NO_EFFECT, UNKNOWN, UNKNOWN),
    # Thoughts.
    Field("reasoning_effort", "none turns thinking off, any other on, where the template can", _NEEDS_CHAT, FOLLOWED,
        FOLLOWED, _NO_VECTOR, FOLLOWED),
    Field("thinking_token_budget", "thoughts end after so many tokens; 0: there are none", *_CONVERSATIONS,
        Refused(_NO_VECTOR.word, UNLESS_NULL), Refused("it changes no prompt", UNLESS_NULL)),
    Field("reasoning", "reasoning_effort as {'effort': ...}", *_CONVERSATIONS, _NO_VECTOR, FOLLOWED),
    *(
        _everywhere(name, "thinking is a variable of the chat template", Refused(word, UNLESS_NULL))
        for name, word in (
            ("enable_thinking", "write chat_template_kwargs: {'enable_thinking': ...}, or reasoning_effort"),
            ("thinking", "write chat_template_kwargs: {'thinking': ...}, or reasoning_effort"),
            ("thinking_budget", "write thinking_token_budget"),
        )
    ),
    # Constraints on the answer.
    Field("response_format", "text, json_object or json_schema", FOLLOWED, FOLLOWED,
        Refused("write text.format", (None, {"type": "text"}))),
    Field("structured_outputs", "what the answer must be: JSON of a schema, a regular expression, a grammar ...",
        *_ANSWERS),
    Field("text", "response_format and verbosity of /v1/responses", Refused("write response_format"),
        Refused("write response_format"), FOLLOWED, UNKNOWN, UNKNOWN),
    *(_everywhere(name, "other servers' name for structured_outputs", CONSTRAINT) for name in CONSTRAINTS),
    # Responses.
    Field("previous_response_id", "the turn before", _ONLY_RESPONSES, _ONLY_RESPONSES, FOLLOWED, UNKNOWN, UNKNOWN),
    Field("background", "answer without a connection", _ONLY_RESPONSES, _ONLY_RESPONSES, FOLLOWED, UNKNOWN, UNKNOWN),
    Field("include", "message.output_text.logprobs adds log probabilities", _ONLY_RESPONSES, _ONLY_RESPONSES, FOLLOWED,
        UNKNOWN, UNKNOWN),
    Field("truncation", "only disabled: what does not fit is refused", Refused("", (None, "disabled")),
        Refused("", (None, "disabled")), Refused("", (None, "disabled")), UNKNOWN, UNKNOWN),
    Field("conversation", "OpenAI's stored conversations", _NOT, _NOT, _NOT, UNKNOWN, UNKNOWN),
    Field("context_management", "OpenAI's compaction", _NOT, _NOT, _NOT, UNKNOWN, UNKNOWN),
    Field("store", "keep the response for later turns", NO_EFFECT, NO_EFFECT, FOLLOWED),
    Field("metadata", "up to 16 texts that come back", NO_EFFECT, NO_EFFECT, FOLLOWED),
    # For the operator, or without effect.
    *(
        Field(name, "comes back in a response", NO_EFFECT, NO_EFFECT, FOLLOWED)
        for name in ("user", "safety_identifier", "prompt_cache_key", "service_tier")
    ),
    *(
        Field(name, "changes nothing here", NO_EFFECT, NO_EFFECT, NO_EFFECT)
        for name in ("prompt_cache_retention", "client_metadata", "prediction", "spaces_between_special_tokens")
    ),
    # Vectors and token ids.
    *(
        Field(name, meaning, UNKNOWN, UNKNOWN, UNKNOWN, FOLLOWED, UNKNOWN)
        for name, meaning in (
            ("dimensions", "the first entries of the vector, where the model was trained for that"),
            ("encoding_format", "float, base64, bytes (one body, the header 'metadata' tells its parts) or bytes_only"),
            ("embed_dtype", "float32, float16, bfloat16, fp8_e4m3 or fp8_e5m2"),
            ("endianness", "of base64 and bytes: native, little or big"),
            ("pooling", "last, mean, cls, max, weightedmean or mean_sqrt_len, in place of the model's own"),
            ("prompt_name", "which prompt of config_sentence_transformers.json comes before the input"),
            ("normalize", "whether the vector has length 1"),
            ("use_activation", "another name for normalize"),
        )
    ),
    Field("padding", "only do_not_pad", UNKNOWN, UNKNOWN, UNKNOWN,
        Refused("inputs are never padded", (None, "do_not_pad")), UNKNOWN),
    Field("return_token_strs", "the tokens beside their ids", UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN, FOLLOWED),
    # Not supported by this server.
    _everywhere("logits_processors", "code in a request", EVERYWHERE["logits_processors"]),
    _everywhere("prompt_embeds", "a prompt as vectors"),
    _everywhere("audio", "sound"),
    _everywhere("modalities", "only text", Refused("there is only text", (None, ["text"], []))),
    _everywhere("media_io_kwargs", "options of images and sound"),
    _everywhere("mm_processor_kwargs", "options of images and sound"),
    _everywhere("kv_transfer_params", "KV from another server"),
    *(
        _everywhere(name, "fields within a field", Refused("write its fields into the request itself"))
        for name in ("extra_body", "nvext")
    ),
    _everywhere("vllm_xargs", "arguments of vLLM's plugins", EVERYWHERE["vllm_xargs"]),
    _everywhere("repetition_detection", "end repetitions", EVERYWHERE["repetition_detection"]),
)
# fmt: on

SAMPLING = tuple(field.name for field in FIELDS if field.is_sampling)
"""Names of the fields that are passed to SamplingParams unchanged."""

_BY_NAME = {field.name: field for field in FIELDS}


@functools.cache
def followed(route: Route) -> frozenset[str]:
    """Return the names of the fields that a route follows."""
    return frozenset(field.name for field in FIELDS if field.cell(route) is FOLLOWED)


@functools.cache
def known(route: Route) -> frozenset[str]:
    """Return the names of the fields that a route follows, refuses, or ignores on purpose."""
    return frozenset(field.name for field in FIELDS if field.cell(route) is not UNKNOWN)


def cell(route: Route, name: str) -> Cell | Refused:
    """Return what a route does with the field `name`; all of other servers' guided_... fields are refused."""
    field = _BY_NAME.get("guided_json" if name.startswith("guided_") else name)
    return UNKNOWN if field is None else field.cell(route)
