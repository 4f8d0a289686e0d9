"""How much parsing work a grammar may need per step: common grammars have enough, those that slow everyone down end
early.
"""

import functools

import pytest
from llguidance import LLMatcher
from tiny_model import ascii_tokenizer

from jaxserve.sampling_params import StructuredOutputs
from jaxserve.structured.grammar import ANSWER, MAX_OWN_ITEMS_IN_ROW, compose, make_grammar, parser_limits
from jaxserve.structured.vocabulary import grammar_tokenizer

AMBIGUOUS = StructuredOutputs(grammar='start: s\ns: s s s | s s | "a" | ')


@functools.cache
def vocabulary():
    return grammar_tokenizer(ascii_tokenizer(), vocab_size=100)


def follow(text, output):
    """Return how many characters of `output` the grammar accepts, and the error after them."""
    matcher = LLMatcher(vocabulary(), text, log_level=0, limits=parser_limits(text))
    for position, character in enumerate(output):
        matcher.compute_bitmask()
        if matcher.is_error() or not matcher.consume_token(ord(character) - 0x20):
            return position, matcher.get_error()
    return len(output), ""


@pytest.mark.parametrize(
    "text",
    [make_grammar(AMBIGUOUS), compose(make_grammar(AMBIGUOUS), f'start: "a" @{ANSWER}')],
    ids=["alone", "behind something else"],
)
def test_an_ambiguous_grammar_ends_early(text):
    position, error = follow(text, "a" * 300)
    assert 50 < position < 120
    assert f"max is {MAX_OWN_ITEMS_IN_ROW}" in error


OPTIONAL = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(400)}}


@pytest.mark.parametrize(
    ("wish", "output"),
    [
        ({"json": OPTIONAL}, '{"p7":null,"p399":null}'),
        ({"json": {"anyOf": [OPTIONAL, {"type": "array", "items": OPTIONAL}]}}, '[{"p0":null},{"p399":null}]'),
        ({"json": {"anyOf": [{"const": [i]} for i in range(1000)]}}, "[999]"),
        ({"choice": [f"{i} is {i * i}" for i in range(1500)]}, "1499 is 2247001"),
        ({"grammar": "start: " + "|".join(f'"{i}" "!"' for i in range(400))}, "399!"),
        ({"grammar": 'start: item "," start | item\nitem: /[a-z]/'}, "a," * 450),
        ({"grammar": 'root ::= [a-z] "," root | [a-z]'}, "a," * 450),
        ({"grammar": 'start: start "," item | item\nitem: /[a-z]/'}, "a," * 2000),
        ({"grammar": 'start: item ("," item)*\nitem: /[a-z]/'}, "a," * 2000),
        ({"grammar": 'start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]/'}, "1+(2*3)*" * 30),
    ],
    ids=range(10),
)
def test_what_people_write_has_room(wish, output):
    assert follow(make_grammar(StructuredOutputs(**wish)), output) == (len(output), "")
