"""How the served model writes thoughts and tool calls: chosen by the operator, or read off its chat template."""

import re
from collections.abc import Sequence
from typing import Literal

from jaxserve.request import StructuredOutputs
from jaxserve.server.parsing.answer import AnswerParser
from jaxserve.server.parsing.deepseek import DeepSeekParser
from jaxserve.server.parsing.harmony import HarmonyParser
from jaxserve.server.parsing.hermes import HermesParser
from jaxserve.server.parsing.llama3_json import Llama3JsonParser
from jaxserve.server.parsing.mistral import MistralParser
from jaxserve.server.parsing.reasoning import CLOSE, OPEN, ReasoningCounter, ThinkParser, is_open
from jaxserve.server.parsing.tagged import Glm45Parser, Qwen3CoderParser
from jaxserve.server.parsing.tools import Tool, ToolParser, literal
from jaxserve.structured.grammar import compose, lark_grammar, make_grammar
from jaxserve.tokenizer import Tokenizer

TOOL_PARSERS: dict[str, type[ToolParser]] = {
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "mistral": MistralParser,
    "deepseek_v3": DeepSeekParser,
    "gpt_oss": HarmonyParser,
    "qwen3_coder": Qwen3CoderParser,
    "glm45": Glm45Parser,
}

Thoughts = Literal["think", "harmony"]
REASONING_PARSERS: dict[str, Thoughts] = {"deepseek_r1": "think", "qwen3": "think", "gpt_oss": "harmony"}

# What a template must hold, and must not, for its syntax to be known.
_TOOL_SIGNS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "hermes": (("<tool_call>", '"arguments'), ("<function=", "<arg_key>")),
    "llama3_json": (("<|start_header_id|>", '"parameters": '), ("<tool_call>",)),
    "mistral": (("[TOOL_CALLS]",), ()),
    "deepseek_v3": (("<｜tool▁calls▁begin｜>",), ()),  # noqa: RUF001
    "gpt_oss": (("<|channel|>commentary",), ()),
    "qwen3_coder": (("<tool_call>", "<function=", "<parameter="), ()),
    "glm45": (("<tool_call>", "<arg_key>", "<arg_value>"), ()),
}

_ANY_OBJECT = {"type": "object"}


class Syntax:
    """One model's syntax: makes the parser of an answer, and the grammar that it must follow if there is one."""

    def __init__(self, tokenizer: Tokenizer, *, tool_call_parser: str = "auto", reasoning_parser: str = "auto"):
        """The names are keys of TOOL_PARSERS and REASONING_PARSERS, "auto" or "none"."""
        self.template = tokenizer.chat_template or ""
        self._tokenizer = tokenizer
        calls = _infer_tools(self.template) if tool_call_parser == "auto" else tool_call_parser
        thoughts = _infer_reasoning(self.template) if reasoning_parser == "auto" else reasoning_parser
        if "gpt_oss" in (calls, thoughts):  # its channels carry both
            calls = thoughts = "gpt_oss"
        self.thoughts = REASONING_PARSERS.get(thoughts)
        # Where nothing is known, forced calls are written in the most common syntax.
        self.tool_parser = TOOL_PARSERS.get(calls, HermesParser)
        self.knows_tools = calls != "none"

    def visible_special_tokens(self, tools: Sequence[Tool]) -> frozenset[int]:
        """Special tokens that the parser of an answer must see in its text."""
        markers = (OPEN, CLOSE) if self.thoughts == "think" else ()
        if tools or self.thoughts == "harmony":
            markers += self.tool_parser.markers
        ids = [self._tokenizer.special_token_id(marker) for marker in markers]
        return frozenset(token_id for token_id in ids if token_id is not None)

    def parser(self, prompt: str, tools: Sequence[Tool], *, max_calls: int | None) -> AnswerParser | None:
        """The parser of one answer to `prompt`; None if the text is the answer."""
        thoughts = ThinkParser(is_open=is_open(prompt)) if self.thoughts == "think" else None
        has_calls = bool(tools) or self.thoughts == "harmony"
        calls = self.tool_parser({tool.name: tool.parameters for tool in tools}) if has_calls else None
        if thoughts is None and calls is None:
            return None
        return AnswerParser(thoughts=thoughts, calls=calls, max_calls=max_calls if tools else 0)

    def reasoning_counter(self, prompt: str) -> ReasoningCounter | None:
        """What counts the tokens of the thoughts in an answer to `prompt`; None if there are none."""
        if self.thoughts is None:
            return None
        thoughts = HarmonyParser({}) if self.thoughts == "harmony" else ThinkParser(is_open=is_open(prompt))
        tokenizer = self._tokenizer
        return ReasoningCounter(
            thoughts, token_text=tokenizer.token_text, special_token_ids=tokenizer.special_token_ids
        )

    def follows_strict(self, tools: Sequence[Tool]) -> bool:
        """Whether one of the tools is strict, and a call of it that nothing forces can be held to its schema: where a
        single token begins every call, and no other text.
        """
        trigger = self.tool_parser.trigger
        is_certain = self.knows_tools and trigger is not None and self._tokenizer.added_token_id(trigger) is not None
        return is_certain and any(tool.is_strict for tool in tools)

    def grammar(
        self,
        prompt: str,
        tools: Sequence[Tool],
        *,
        must_call: bool,
        is_parallel: bool,
        wish: StructuredOutputs | None,
    ) -> str:
        """What the answer to `prompt` must be: calls of these tools, or the `wish`, or one of them; "" is anything.

        Without either, words are free, and so are calls, but those of strict tools (`follows_strict`). Thoughts are
        free in any case. Raises InvalidRequest, naming the field, for a wish that is not supported.
        """
        has_answer = wish is not None and not must_call
        is_free = wish is None and not must_call
        if is_free:
            if not self.follows_strict(tools):
                return ""
            tools = [tool if tool.is_strict else tool._replace(parameters=_ANY_OBJECT) for tool in tools]
        if wish is not None and not tools and self.thoughts is None:
            return make_grammar(wish)
        rules, bodies = [], []
        if tools:
            is_parallel = is_parallel and self.tool_parser.is_parallel
            rules.append(
                self.tool_parser.rules(tools, template=self.template, spell=self._spell, is_parallel=is_parallel)
            )
            bodies.append("calls")
        if has_answer:
            bodies.append("final" if self.thoughts == "harmony" else "@answer")
        before = ""
        if self.thoughts == "harmony":
            rules.append(HarmonyParser.message_rules(self._spell, "@answer" if has_answer else "HARMONY_TEXT"))
            before = "(analysis | preamble)* " if is_free else "analysis* "
            bodies += ["final"] if is_free else []
        elif self.thoughts == "think":
            rules.append(self._thought_rules())
            before = "thoughts SPACES " if is_open(prompt) else f"({self._spell(OPEN)} thoughts SPACES)? "
        if is_free and self.thoughts != "harmony":
            rules.append(f"WORDS: /(.|\\n)*/ & ~/(.|\\n)*{re.escape(self.tool_parser.trigger or '')}(.|\\n)*/")
            bodies = ["WORDS calls?"]
        lark = "\n".join([f"start: {before}({' | '.join(bodies)})", *rules])
        return compose(wish, lark) if wish is not None and has_answer else lark_grammar(lark, param="tools")

    def _thought_rules(self) -> str:
        """Thoughts end with the first text that reads like their end, or with a special token: that is no text."""
        close = self._tokenizer.special_token_id(CLOSE)
        rule = f"thoughts[suffix={literal(CLOSE)}]: THOUGHTS" if close is None else f"thoughts: THOUGHTS <[{close}]>"
        return f"{rule}\nTHOUGHTS: /(.|\\n)*/\nSPACES: /[ \\n]{{0,4}}/"

    def _spell(self, marker: str) -> str:
        token_id = self._tokenizer.added_token_id(marker)
        return literal(marker) if token_id is None else f"<[{token_id}]>"


def _infer_tools(template: str) -> str:
    """The one syntax whose signs a template shows; "none" if there is none, or more than one."""
    found = [
        name
        for name, (signs, others) in _TOOL_SIGNS.items()
        if all(sign in template for sign in signs) and not any(sign in template for sign in others)
    ]
    return found[0] if len(found) == 1 else "none"


def _infer_reasoning(template: str) -> str:
    if "<|channel|>analysis" in template:
        return "gpt_oss"
    if CLOSE in template and "<response>" not in template:
        return "qwen3"
    return "none"
