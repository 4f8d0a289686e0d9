"""Rerankers: which files say that a model scores pairs of texts, and how a pair becomes a prompt. No jax.

A causal model that answers "yes" or "no" is one if config.json has `classifier_from_token` (vLLM's form), or if
modules.json has a LogitScore (that of sentence-transformers). Models with a classification head are in
`loading.classifier`.
"""

import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxserve.errors import CheckpointError
from jaxserve.loading.gguf import GGUFFile
from jaxserve.loading.json_files import read_object
from jaxserve.loading.reranker import SIGMOID, Reranker
from jaxserve.loading.sentence_transformers import RERANKER_MODULES, find_module
from jaxserve.loading.torch_activations import read_activation, softmax

TWO_WAY = "from_2_way_softmax"

QWEN3_PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
QWEN3_SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
QWEN3_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class PairTemplate(NamedTuple):
    """A chat template for pairs, which come as messages of the roles "query" and "document", and its variables."""

    template: str | None
    variables: Mapping[str, Any]


def read_reranker(path: str | pathlib.Path, fields: Mapping[str, Any]) -> Reranker | None:
    """Return how a model with the config `fields` scores pairs by its next token, None if it does not.

    Raises CheckpointError, naming the field that is wrong or not supported.
    """
    path = pathlib.Path(path)
    config = path if path.is_file() else path / "config.json"
    is_qwen3 = fields.get("is_original_qwen3_reranker") is True
    tokens, method = fields.get("classifier_from_token"), fields.get("method")
    if tokens is None and is_qwen3:
        tokens = ["no", "yes"]
    folder = None if path.is_file() else find_module(path, RERANKER_MODULES)
    if tokens is not None:
        if method not in (None, TWO_WAY):
            raise CheckpointError(f"{config}: method {method!r:.100} is not supported, only {TWO_WAY!r}")
        if not isinstance(tokens, list) or len(tokens) != 2 or not all(type(token) in (str, int) for token in tokens):
            raise CheckpointError(
                f"{config}: classifier_from_token must be two tokens, for no and for yes, got {tokens!r:.100}"
            )
        no, yes = tokens
    elif folder is not None:
        file = folder / "config.json"
        module = read_object(file)
        no, yes = (module.get(name) for name in ("false_token_id", "true_token_id"))
        if type(no) is not int or type(yes) is not int:
            raise CheckpointError(f"{file}: false_token_id and true_token_id must be token ids, got {no!r} and {yes!r}")
        is_qwen3 = fields.get("model_type") == "qwen3"
    else:
        return None
    vocab_size = fields.get("vocab_size")
    for token in (no, yes):
        if isinstance(token, int) and not 0 <= token < (vocab_size if isinstance(vocab_size, int) else math.inf):
            raise CheckpointError(
                f"{config}: the token {token} of a reranker is outside the vocabulary of {vocab_size}"
            )
    activation = named_activation(path, fields) or SIGMOID
    if read_activation(activation, field="activation_fn") is softmax:
        activation = SIGMOID  # the softmax of one logit would be 1
    return Reranker(no=no, yes=yes, activation=activation, is_qwen3=is_qwen3)


def named_activation(path: pathlib.Path, fields: Mapping[str, Any]) -> Any:
    """Return the activation of scores that config_sentence_transformers.json or config.json names, or None."""
    file = path / "config_sentence_transformers.json"
    own = fields.get("sentence_transformers")
    candidates = (
        read_object(file).get("activation_fn") if file.is_file() else None,
        own.get("activation_fn") if isinstance(own, Mapping) else None,
        fields.get("sbert_ce_default_activation_function"),
    )
    return next((name for name in candidates if name is not None), None)


def has_pair_roles(template: str) -> bool:
    """Return true if a chat template reads messages of the roles "query" and "document"."""
    return all(re.search(rf"[\"']{role}[\"']", template) for role in ("query", "document"))


def read_pair_template(path: str | pathlib.Path) -> PairTemplate:
    """Return the template for pairs that a model has besides that for conversations. Raises CheckpointError."""
    path = pathlib.Path(path)
    if path.is_file():
        metadata = GGUFFile(path).metadata
        return PairTemplate(_first_for_pairs({"rerank": metadata.get("tokenizer.chat_template.rerank")}, None), {})
    file = path / "sentence_bert_config.json"
    options = (read_object(file).get("processing_kwargs") or {}) if file.is_file() else {}
    variables = dict(options.get("chat_template") or {})
    named: dict[str, Any] = {}
    if (path / "tokenizer_config.json").is_file():
        own = read_object(path / "tokenizer_config.json").get("chat_template")
        named |= {each["name"]: each["template"] for each in own} if isinstance(own, list) else {}
    for each in sorted((path / "additional_chat_templates").glob("*.jinja")):
        named[each.stem] = each.read_text(encoding="utf-8")
    return PairTemplate(_first_for_pairs(named, variables.pop("chat_template", None)), variables)


def _first_for_pairs(named: Mapping[str, Any], wanted: Any) -> str | None:
    """Return the template of the name `wanted`, or the text of it, or without it the first one for pairs."""
    if isinstance(wanted, str):
        return named.get(wanted, wanted)
    return next((text for text in named.values() if isinstance(text, str) and has_pair_roles(text)), None)
