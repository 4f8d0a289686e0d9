"""The grammar of a whole answer: thoughts, then words, calls, or both, as a request asks for it."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.answers.forcing.writer import any_text, call_rules, literal, message_rules, thought_rules
from jaxserve.answers.syntaxes import harmony
from jaxserve.answers.syntaxes.syntax import Calls, Channels, Thoughts
from jaxserve.answers.tools.tool import Tool
from jaxserve.structured.grammar import Limit, compose, lark_grammar, limited
from jaxserve.tokenizer import Tokenizer


class _Start(NamedTuple):
    """The beginning of an answer in a grammar; each part is put before what follows it.

    Attributes:
        rules: the rules that the other parts refer to.
        free: thoughts, if there are any.
        none: the beginning without thoughts.
        opening: what opens thoughts; "" if they are already open.
        thoughts: thoughts to their end, without what opens them.
        closing: the end of thoughts, and what follows it.
    """

    rules: str = ""
    free: str = ""
    none: str = ""
    opening: str = ""
    thoughts: str = ""
    closing: str = ""


class Forcing:
    """Makes the grammars that the answers of one model must follow."""

    def __init__(
        self, tokenizer: Tokenizer, calls: Calls, thoughts: Thoughts | None, *, knows_tools: bool, vocab_size: int
    ):
        """Initialize with how calls and thoughts are written (thoughts None: not at all, or as messages).

        `knows_tools`: the model itself writes calls so. Only tokens below `vocab_size` are sampled.
        """
        self._tokenizer = tokenizer
        self._calls = calls
        self._thoughts = thoughts
        self._knows_tools = knows_tools
        self._vocab_size = vocab_size
        self._has_channels = isinstance(calls.arguments, Channels)

    def follows_strict(self, tools: Sequence[Tool]) -> bool:
        """Return whether one of the tools is strict, and a call of it that nothing forces can be held to its schema:
        where a single token begins every call, and no other text.
        """
        return self._knows_tools and self._trigger is not None and any(tool.is_strict for tool in tools)

    @property
    def _trigger(self) -> str | None:
        """The mark that begins every call, where that is one token, and calls are written in no other way."""
        opening = "<|channel|>" if self._has_channels else self._calls.section[0] or self._calls.call[0]
        if self._calls.is_bare:
            return None
        parts = self._tokenizer.split_at_added_tokens(opening)
        return opening if parts and isinstance(parts[0], int) else None

    def grammar(
        self,
        tools: Sequence[Tool],
        *,
        is_open: bool,
        must_call: bool,
        is_parallel: bool,
        answer: str | None,
        budget: int | None = None,
        may_think: bool = True,
        continues_message: bool = False,
    ) -> str:
        """Return the grammar of an answer: calls of these tools, or what the grammar text `answer` describes, or one of
        the two; "" if anything is allowed. The parameters of constrained tools come from `arguments_schema`.

        Without either, words are free, and so are calls except those of strict tools (`follows_strict`). Thoughts are
        free, or end after `budget` tokens. Unless the answer `may_think`, its grammar has no thoughts; that alone needs
        no grammar, as the template has told the model. If the answer `continues_message`, it begins inside the message
        of its words, without the header of a new one. Raises InvalidRequest, naming the field, if the tools together
        are too long.
        """
        is_free = answer is None and not must_call
        is_strict = is_free and self.follows_strict(tools)
        if is_free and budget is None and not is_strict:
            return ""
        if not may_think:
            budget = 0
        if answer is not None and not must_call and self._has_channels and continues_message:
            return answer
        if answer is not None and not tools and self._thoughts is None and not self._has_channels:
            return answer
        rules, bodies = [], []
        if tools and (is_strict or self._has_channels or not is_free):
            rules.append(call_rules(self._calls, tools, spell=self._spell, is_parallel=is_parallel, is_free=is_free))
            bodies.append("calls")
        if answer is not None:
            bodies.append("final" if self._has_channels else "@answer")
        if self._has_channels:
            rules.append(message_rules(self._spell, "HARMONY_TEXT" if answer is None else "@answer"))
            bodies += ["final"] if is_free else []
        elif is_free:
            rules.append(self._word_rules(tools, is_strict=is_strict, is_limited=budget is not None))
            bodies = ["words calls?" if is_strict else "words"]
        if self._has_channels:
            start = self._channel_start(is_free=is_free, is_limited=budget is not None)
        else:
            start = self._start(tools, is_open=is_open)
        rules.append(start.rules)

        def text(before: str) -> str:
            lark = "\n".join([f"start: {before}({' | '.join(bodies)})", *rules])
            return lark_grammar(lark, param="tools") if answer is None else compose(answer, lark)

        if budget is None:
            return text(start.free)
        if budget == 0:
            return text(start.closing if is_open else start.none)
        # A token may hold the end of the opening and what follows.
        opening = f"start: ({start.opening}) ANY\nANY: {any_text()}"
        limit = Limit(
            budget,
            opening=lark_grammar(opening, param="tools") if start.opening else "",
            during=lark_grammar(f"start: {start.thoughts}\n{start.rules}", param="tools"),
            after=text(start.closing),
        )
        return limited(text(start.free), limit)

    def _start(self, tools: Sequence[Tool], *, is_open: bool) -> "_Start":
        """Return the beginning of an answer if thoughts are between marks."""
        thoughts = self._thoughts
        if thoughts is None:
            return _Start()
        return _Start(
            rules=thought_rules(
                thoughts, spell=self._spell, endings=self._calls.openings if tools and thoughts.calls_end else ()
            ),
            free="rest SPACES " if is_open else "(thoughts SPACES)? ",
            opening="" if is_open else " | ".join(self._spell(opening.strip()) for opening in thoughts.opening),
            thoughts="rest",
            closing=f"{self._spell(thoughts.closing[0].strip())} SPACES ",
        )

    def _channel_start(self, *, is_free: bool, is_limited: bool) -> "_Start":
        """Return the beginning of an answer if thoughts are messages. If they are limited, there is at most one."""
        before = "preamble* " if is_free else ""
        free = "(analysis | preamble)* " if is_free else "analysis* "
        return _Start(
            rules="HARMONY_TEXT: /(.|\\n)*/",
            free=f"analysis? {before}" if is_limited else free,
            none=before,
            opening=self._spell("<|channel|>analysis<|message|>"),
            thoughts=f"HARMONY_TEXT {self._spell(harmony.END)}",
            closing=f"{self._spell(f'{harmony.END}{harmony.START}assistant')} {before}",
        )

    def _word_rules(self, tools: Sequence[Tool], *, is_strict: bool, is_limited: bool) -> str:
        """Return rules whose `words` are the text that an answer may contain. If thoughts are limited, no more may
        begin in it.
        """
        trigger = self._calls.openings if is_strict else []
        thoughts = self._thoughts
        if not is_limited or thoughts is None:
            return f"words: TEXT\nTEXT: {any_text(without=trigger)}"
        if tools or thoughts.reopens or any(thoughts.answer):
            text = any_text(without=[*trigger, *thoughts.opening])
        else:
            text = any_text(without=trigger, beginning=thoughts.opening)
        hidden = self._special_token_ids(but=[*thoughts.opening, *trigger])
        tokens = f" (<[{','.join(map(str, hidden))}]> TEXT)*" if hidden else ""
        return f"words: TEXT{tokens}\nTEXT: {text}"

    def _special_token_ids(self, *, but: Sequence[str]) -> list[int]:
        """Return the special tokens that the model may draw, without those in the texts `but`."""
        left_out = {part for text in but for part in self._tokenizer.split_at_added_tokens(text)}
        return [i for i in sorted(self._tokenizer.special_token_ids) if i < self._vocab_size and i not in left_out]

    def _spell(self, text: str) -> str:
        """Write a text in a grammar: added tokens as tokens, all else as text."""
        parts = self._tokenizer.split_at_added_tokens(text)
        return " ".join(f"<[{part}]>" if isinstance(part, int) else literal(part) for part in parts)
