"""The grammar engine and the tokenizer agree: every token that a mask allows can be consumed, and spells the text."""

import random
import re

import numpy as np
import pytest
import tiny_tokenizer
from llguidance import LLMatcher
from tiny_model import ascii_tokenizer, write

from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import StructuredOutputs
from jaxserve.structured.grammar import make_grammar
from jaxserve.structured.vocabulary import grammar_tokenizer
from jaxserve.tokenizer import Tokenizer


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece", "tiny_model", "ascii"])
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    match request.param:
        case "byte_level":
            return Tokenizer.load(tiny_tokenizer.byte_level(folder))
        case "sentencepiece":
            return Tokenizer.load(tiny_tokenizer.sentencepiece(folder))
        case "tiny_model":
            return Tokenizer.load(write(folder))
        case _:
            return ascii_tokenizer()


def allowed_ids(matcher, vocab_size):
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return np.flatnonzero(bits[:vocab_size]).tolist()


# (the constraint, what the text must match); some marks are added tokens of some of the tokenizers.
WISHES = [
    (StructuredOutputs(choice=["<tool_call>", "<|tool|> <think>", "Once upon a time"]), None),
    (StructuredOutputs(choice=["<|im_end|> is no end"]), None),
    (StructuredOutputs(json={"const": "</s><|tool|>"}), '"</s><|tool|>"'),
    (
        StructuredOutputs(
            json={"type": "object", "properties": {"<think>": {"const": " the end"}}, "required": ["<think>"]}
        ),
        None,
    ),
    (StructuredOutputs(regex="[a-e]{3}( upon)+"), "[a-e]{3}( upon)+"),
    (StructuredOutputs(grammar='start: "a" start "b" | " the"'), None),
]


@pytest.mark.parametrize(("wish", "pattern"), WISHES, ids=range(len(WISHES)))
@pytest.mark.parametrize("seed", range(5))
def test_every_token_that_may_come_can_come(tokenizer, wish, pattern, seed):
    vocab_size = tokenizer.vocab_size + 9
    matcher = LLMatcher(grammar_tokenizer(tokenizer, vocab_size=vocab_size), make_grammar(wish))
    rng, output = random.Random(seed), []
    while len(output) < 200:
        allowed = allowed_ids(matcher, vocab_size)
        assert allowed, matcher.get_error()
        ends = set(allowed) & set(tokenizer.eos_token_ids)
        assert bool(ends) == matcher.is_accepting()
        for token_id in allowed:
            assert token_id in tokenizer.eos_token_ids or token_id not in tokenizer.special_token_ids
            assert matcher.deep_copy().consume_token(token_id), token_id
        output.append(min(ends) if ends and rng.random() < 0.5 else rng.choice(allowed))
        if output[-1] in tokenizer.eos_token_ids:
            break
        assert matcher.consume_token(output[-1])
    text = b"".join(map(tokenizer.token_bytes, output[:-1])).decode()
    if wish.choice is not None:
        assert text in wish.choice
    elif pattern is not None:
        assert re.fullmatch(re.escape(pattern) if wish.json else pattern, text)


def test_a_model_with_fewer_logits_than_tokens(tokenizer):
    vocab_size = tokenizer.vocab_size - 3
    if min(tokenizer.eos_token_ids) >= vocab_size:
        with pytest.raises(InvalidRequest, match="end-of-text"):
            grammar_tokenizer(tokenizer, vocab_size=vocab_size)
    else:
        assert grammar_tokenizer(tokenizer, vocab_size=vocab_size).vocab_size == vocab_size


def test_several_tokens_end_a_text(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path))
    assert len(tokenizer.eos_token_ids) == 2
    compiled = grammar_tokenizer(tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=[3])
    matcher = LLMatcher(compiled, make_grammar(StructuredOutputs(choice=["a"])))
    (a,) = tokenizer.encode("a")
    assert matcher.consume_token(a)
    assert allowed_ids(matcher, tokenizer.vocab_size) == sorted({*tokenizer.eos_token_ids, 3})
