"""Which texts a grammar allows, over tokens of one byte each."""

from llguidance import LLMatcher, LLTokenizer

from jaxserve.structured.grammar import parser_limits

BYTES = LLTokenizer("byte")


def matcher(grammar):
    return LLMatcher(BYTES, grammar, log_level=0, limits=parser_limits(grammar))


def passes(grammar, text):
    data = list(text.encode())
    one = matcher(grammar)
    return one.try_consume_tokens(data) == len(data) and one.is_accepting()
