"""Requests with a grammar, in the engine's loop: greedy tokens equal those of full forward passes under the same masks,
whatever the engine does to be fast.
"""

import concurrent.futures
import json
import re
import threading

import msgspec
import numpy as np
import pytest
from depths import quick_first
from engine_harness import GREEDY, Model, Result, drain, prompts, request, run
from llguidance import LLMatcher, LLParserLimits
from tiny_model import ascii_tokenizer
from waiting import PATIENCE

from jaxserve.errors import InvalidRequest
from jaxserve.execution.programs.kinds import Draw, Forward
from jaxserve.execution.runner import PendingStep
from jaxserve.sampling_params import SamplingParams, StructuredOutputs
from jaxserve.structured.grammar import make_grammar
from jaxserve.structured.matchers import Matchers
from jaxserve.structured.vocabulary import grammar_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 5},
        "size": {"type": "integer", "minimum": -50, "maximum": 500},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "cc"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "size", "tags"],
    "additionalProperties": False,
}
WISHES = {
    "json": StructuredOutputs(json=SCHEMA),
    "regex": StructuredOutputs(regex="(ab|cd){2,6}-[0-9]{3}"),
    "choice": StructuredOutputs(choice=["yes", "no", "yesterday"]),
    "grammar": StructuredOutputs(grammar='start: "<" inner ">"\ninner: /[x-z]/ inner? | "(" inner ")"'),
}
GRAMMARS = {name: make_grammar(wish) for name, wish in WISHES.items()}


@pytest.fixture(scope="module")
def llama():
    return Model("llama_tied_llama3_rope")


@pytest.fixture(scope="module")
def tokenizer():
    return ascii_tokenizer()


@pytest.fixture
def start(llama, tokenizer):
    """Start an engine; all are closed at the end, their runner stays."""
    all_matchers = []

    def start(*, load=lambda: tokenizer, **options):
        all_matchers.append(Matchers(load, vocab_size=llama.vocab_size))
        return llama.engine(matchers=all_matchers[-1], **options)

    yield start
    for matchers in all_matchers:
        matchers.close()


(EOS,) = ascii_tokenizer().eos_token_ids


def asks(name, prompt, max_tokens, grammar, params=GREEDY, **fields):
    return request(name, prompt, max_tokens, params, grammar=grammar, stop_token_ids=frozenset([EOS]), **fields)


def naive(model, tokenizer, prompt, max_tokens, grammar):
    """Greedy tokens under a grammar, a full forward pass each."""
    matcher = LLMatcher(grammar_tokenizer(tokenizer, vocab_size=model.vocab_size), grammar)
    output = []
    while len(output) < max_tokens:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        logprobs = model.naive_logprobs([*prompt, *output])[-1]
        output.append(int(np.argmax(np.where(bits[: model.vocab_size], logprobs, -np.inf))))
        if output[-1] == EOS:
            break
        assert matcher.consume_token(output[-1])
    return output


@pytest.fixture(scope="module")
def asked(llama):
    """Return some requests with each kind of grammar, and some without a grammar."""
    kinds = [*GRAMMARS, *GRAMMARS, *GRAMMARS, "", "", ""]
    lengths = [1, 3, 5, 9, 17, 33, 40, 12, 7, 2, 25, 4, 6, 18, 1]
    return {
        f"{kind or 'free'}{i}": (prompt, 12 + 2 * i, GRAMMARS.get(kind, ""))
        for i, (kind, prompt) in enumerate(zip(kinds, prompts(llama, lengths), strict=True))
    }


@pytest.fixture(scope="module")
def expected(llama, tokenizer, asked):
    return {
        name: naive(llama, tokenizer, *job) if job[2] else llama.naive(job[0], job[1]) for name, job in asked.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    quick_first(
        [
            {"overlap": True},
            {"overlap": False},
            {"max_num_batched_tokens": 7},
            {"num_blocks": 30},
            {"max_num_seqs": 2, "enable_prefix_caching": False},
            {"kind": "static"},
        ]
    ),
    ids=["overlap", "no overlap", "chunks", "preemption", "few slots", "static"],
)
def test_tokens_equal_those_of_full_passes(start, asked, expected, options):
    engine = start(**options)
    free = [request(name, *job[:2]) for name, job in asked.items() if not job[2]]
    bound = [asks(name, *job) for name, job in asked.items() if job[2]]
    results = run(engine, bound + free)
    for name, (_, max_tokens, _) in asked.items():
        assert results[name].token_ids == expected[name], name
        finished = "stop" if results[name].token_ids[-1] == EOS else "length"
        assert results[name].finish_reason == finished
        assert finished == "stop" or len(results[name].token_ids) == max_tokens
    assert (engine.stats().num_preemptions > 0) == (options.get("num_blocks") == 30)
    assert engine.stats().num_waiting == 0


def test_a_prefix_hit_changes_nothing(start, llama, tokenizer):
    (prompt,) = prompts(llama, [21])
    engine = start()
    first = run(engine, [asks("a", prompt, 40, GRAMMARS["json"])])["a"]
    again = run(engine, [asks("b", prompt, 40, GRAMMARS["json"])])["b"]
    assert again.num_cached_tokens > 0 == first.num_cached_tokens
    assert first.token_ids == again.token_ids == naive(llama, tokenizer, prompt, 40, GRAMMARS["json"])


def test_siblings_differ_and_all_are_valid(start, llama, tokenizer):
    params = SamplingParams(temperature=20.0, n=6, logprobs=3)
    (prompt,) = prompts(llama, [9])
    requests = [asks(f"s{i}", prompt, 30, GRAMMARS["regex"], params, group_id="s0", seed=i) for i in range(6)]
    results = run(start(), requests)
    texts = [tokenizer.decode(result.token_ids[:-1]) for result in results.values()]
    assert len(set(texts)) > 1
    for result, text in zip(results.values(), texts, strict=True):
        assert result.finish_reason == "stop"
        assert re.fullmatch(WISHES["regex"].regex, text)
        assert len(result.logprobs) == len(result.token_ids)


class RecordedPrograms:
    """Compiled programs that note when they are started: F a forward pass, D a draw."""

    def __init__(self, programs, events):
        self._programs, self._events = programs, events

    def __getitem__(self, program):
        executable = self._programs[program]

        def start(*arguments):
            if isinstance(program, Forward | Draw):
                self._events.append(type(program).__name__[0])
            return executable(*arguments)

        return start

    def __getattr__(self, name):
        return getattr(self._programs, name)


@pytest.fixture
def events(llama, monkeypatch):
    """Record what happens in the engine, in order: programs that start, masks that are requested (m), and tokens of a
    step that are waited for (t).
    """
    events = []

    def record(owner, name, event):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **named: events.append(event) or original(*args, **named))

    monkeypatch.setattr(llama.runner, "steps", RecordedPrograms(llama.runner.steps, events))
    record(Matchers, "masks", "m")
    record(PendingStep, "token_ids", "t")
    return events


class TestOverlap:
    """The device has layers to run while the host finds out what may be drawn."""

    def test_a_forward_pass_starts_before_the_tokens_and_masks_that_its_draw_needs(self, start, events):
        result = run(start(), [asks("r", [1, 2], 8, GRAMMARS["json"])])["r"]
        assert result.finish_reason == "length"
        # For the mask, then to deliver them, the tokens of the previous step.
        assert "".join(events) == "FmD" + 7 * "FtmDt" + "t"

    def test_without_overlap_a_step_ends_before_the_next(self, start, events):
        run(start(overlap=False), [asks("r", [1, 2], 8, GRAMMARS["json"])])
        assert "".join(events) == 8 * "FmDt"

    def test_a_step_without_grammars_waits_for_nothing(self, start, events):
        run(start(), [request("free", [1, 2], 5)])
        assert "".join(events) == "FD" + 4 * "FDt" + "t"

    def test_a_first_mask_needs_no_token(self, start, events):
        """Whatever rows without a grammar are about to draw."""
        engine = start()
        engine.add([request("free", [1, 2], 20)])
        engine.step()
        add_compiled(engine, asks("r", [1, 2, 3], 4, GRAMMARS["json"]))
        events.clear()
        engine.step()
        assert "".join(events) == "FmDt"
        engine.step()
        assert "".join(events) == "FmDt" + "FtmDt"

    def test_a_chunk_that_draws_nothing_needs_no_mask(self, start, events):
        prompt = list(range(20))
        run(start(max_num_batched_tokens=8), [asks("r", prompt, 2, GRAMMARS["json"])])
        assert "".join(events) == "FD" + "FDt" + "FmDt" + "FtmDt" + "t"

    def test_a_grammar_that_ends_while_the_next_step_is_in_flight(self, start, llama, tokenizer, events):
        """Nothing of that step is handed out."""
        result = run(start(), [asks("r", [5], 40, GRAMMARS["choice"])])["r"]
        assert result.finish_reason == "stop"
        assert result.token_ids == naive(llama, tokenizer, [5], 40, GRAMMARS["choice"])
        assert events.count("D") == len(result.token_ids) + 1

    def test_a_request_of_the_same_name_does_not_get_the_tokens_in_flight(self, start, llama, tokenizer):
        engine = start()
        engine.add([request("free", [1, 2], 30)])
        add_compiled(engine, asks("r", [1, 2], 60, GRAMMARS["json"]))
        results = {"free": Result(), "r": Result()}
        for _ in range(4):
            for output in engine.step():
                results[output.request_id].add(output)
        engine.abort(["r"])
        results["r"] = Result()
        add_compiled(engine, asks("r", [7, 8, 9], 12, GRAMMARS["regex"]))
        drain(engine, results)
        assert results["r"].token_ids == naive(llama, tokenizer, [7, 8, 9], 12, GRAMMARS["regex"])


def add_compiled(engine, job):
    """Add a request that the next step finds with its grammar compiled."""
    engine.add([job])
    concurrent.futures.wait([entry.matchers for entry in engine._matchers._compiling], PATIENCE)


def decoded(tokenizer, result):
    return tokenizer.decode([i for i in result.token_ids if i not in tokenizer.eos_token_ids])


class TestOtherWishes:
    """Other constraints of a request give way where the grammar leaves no choice, and only there."""

    @pytest.fixture
    def write(self, start):
        engine = start()

        def write(grammar, params, max_tokens=20, stop=(), **fields):
            params = msgspec.structs.replace(params, temperature=0.0)
            job = request(
                "r", [3, 4], max_tokens, params, grammar=grammar, stop_token_ids=frozenset([EOS, *stop]), **fields
            )
            return run(engine, [job])["r"]

        return write

    def test_min_tokens_goes_on_while_the_grammar_can(self, write, tokenizer):
        grammar = make_grammar(StructuredOutputs(regex="[ab]{1,8}"))
        result = write(
            grammar, SamplingParams(min_tokens=5, max_tokens=None, logit_bias={tokenizer.eos_token_ids[0]: 100})
        )
        assert len(decoded(tokenizer, result)) == 5
        result = write(grammar, SamplingParams(min_tokens=15, max_tokens=None))
        assert len(decoded(tokenizer, result)) == 8
        assert result.finish_reason == "stop"

    def test_ignore_eos_ends_when_nothing_else_can_follow(self, write, tokenizer):
        result = write(
            make_grammar(StructuredOutputs(regex="[ab]{1,8}")),
            SamplingParams(ignore_eos=True, logit_bias={tokenizer.eos_token_ids[0]: 100}),
        )
        assert len(decoded(tokenizer, result)) == 8
        assert result.finish_reason == "stop"

    def test_allowed_tokens(self, write, tokenizer):
        (b,) = tokenizer.encode("b")
        allowed = SamplingParams(allowed_token_ids=[b], ignore_eos=True)
        assert decoded(tokenizer, write(make_grammar(StructuredOutputs(regex="[ab]{4}")), allowed)) == "bbbb"
        assert decoded(tokenizer, write(make_grammar(StructuredOutputs(regex="a[ab]a")), allowed)) == "aba"

    def test_bad_words_and_bias(self, write, tokenizer):
        (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
        grammar = make_grammar(StructuredOutputs(regex="[ab]{4}"))
        result = write(grammar, SamplingParams(logit_bias={a: 100}), bad_word_ids=((a, a),))
        assert decoded(tokenizer, result) == "abab"
        result = write(make_grammar(StructuredOutputs(regex="aaaa")), SamplingParams(), bad_word_ids=((a,), (b,)))
        assert decoded(tokenizer, result) == "aaaa"

    def test_a_stop_token_ends_it(self, write, tokenizer):
        (dash,) = tokenizer.encode("-")
        result = write(GRAMMARS["regex"], SamplingParams(), max_tokens=40, stop=[dash])
        assert result.finish_reason == "stop"
        assert result.stop_reason == dash

    def test_repetition_penalty(self, write, tokenizer):
        result = write(GRAMMARS["choice"], SamplingParams(repetition_penalty=5.0, presence_penalty=2.0))
        assert decoded(tokenizer, result) in WISHES["choice"].choice


def assert_refused(result, message):
    error = result.refusal.error()
    assert result.finish_reason == "error"
    assert message in result.error == str(error)
    assert (type(error), error.param, error.code) == (InvalidRequest, "structured_outputs", "unsupported_grammar")


class TestFailures:
    def test_a_grammar_that_the_engine_cannot_compile_is_refused(self, start):
        bad = json.dumps({"grammars": [{"lark_grammar": "start: <|nobody|>"}]})
        engine = start()
        results = run(engine, [asks("bad", [1], 5, bad), asks("good", [1], 5, GRAMMARS["choice"])])
        assert results["bad"].finish_reason == "error"
        assert "nobody" in results["bad"].error
        assert results["good"].finish_reason == "stop"
        assert not engine.has_work

    def test_a_grammar_that_grows_too_complex_ends_its_request_only(self, start, monkeypatch):
        monkeypatch.setattr("jaxserve.structured.matchers.parser_limits", lambda _: LLParserLimits(step_max_items=2))
        prompt = [1, 2, 3]
        engine = start()
        results = run(engine, [asks("deep", prompt, 30, GRAMMARS["grammar"]), request("free", prompt, 8)])
        assert_refused(results["deep"], "the grammar cannot be followed further")
        assert results["free"].finish_reason == "length"

    def test_the_prefix_of_a_grammar_that_failed_stays_cached(self, start, monkeypatch):
        monkeypatch.setattr("jaxserve.structured.matchers.parser_limits", lambda _: LLParserLimits(step_max_items=2))
        prompt = list(range(1, 14))
        engine = start()
        results = run(engine, [asks("deep", prompt, 30, GRAMMARS["grammar"])])
        assert_refused(results["deep"], "the grammar cannot be followed further")
        run(engine, [request("free", prompt, 1)])
        assert engine.scheduler.stats().prefix_cache_hits == 12

    @pytest.mark.slow
    def test_a_grammar_whose_tokens_are_too_much_ends_its_request_only(self, start, llama, tokenizer):
        """Its siblings too run until they reach the same limit."""
        (a,) = tokenizer.encode("a")
        ambiguous = make_grammar(StructuredOutputs(grammar='start: s\ns: s s s s s | s s | "a" | '))
        params = SamplingParams(temperature=0.0, logit_bias={a: 100})
        deep = [asks(f"deep{i}", [1], 90, ambiguous, params, group_id="deep0") for i in range(2)]
        engine = start()
        results = run(engine, [*deep, asks("json", [5], 40, GRAMMARS["choice"]), request("free", [1, 2], 80)])
        for name in ("deep0", "deep1"):
            assert_refused(results[name], "cannot be followed further")
            assert set(results[name].token_ids) == {a}
        assert results["json"].token_ids == naive(llama, tokenizer, [5], 40, GRAMMARS["choice"])
        assert results["free"].token_ids == llama.naive([1, 2], 80)
        assert not engine.has_work

    def test_without_an_end_of_text_there_is_no_grammar(self, start):
        engine = start(load=lambda: ascii_tokenizer(has_eos=False))
        (result,) = run(engine, [asks("r", [1], 5, GRAMMARS["choice"])]).values()
        assert result.finish_reason == "error"
        assert "end-of-text" in result.error

    def test_an_engine_without_matchers_refuses(self, llama):
        with pytest.raises(InvalidRequest, match="follows no grammars"):
            llama.engine().add([asks("r", [1], 5, GRAMMARS["choice"])])

    def test_a_request_that_waits_for_its_grammar_can_be_aborted(self, start, tokenizer):
        is_wanted = threading.Event()

        def load():
            assert is_wanted.wait(PATIENCE)
            return tokenizer

        engine = start(load=load)
        engine.add([asks("r", [1], 5, GRAMMARS["choice"]), request("free", [1, 2], 4)])
        assert engine.num_waiting == 2
        results = {"free": Result()}
        while results["free"].finish_reason is None:  # nobody waits for the grammar
            for output in engine.step():
                results[output.request_id].add(output)
        assert engine.step() == []
        assert engine.has_work
        engine.abort(["r"])
        assert not engine.has_work
        is_wanted.set()

    def test_a_grammar_that_takes_too_long_is_refused(self, start, tokenizer, monkeypatch):
        is_over = threading.Event()
        monkeypatch.setattr("jaxserve.structured.matchers.COMPILE_TIMEOUT", 0.05)
        engine = start(load=lambda: is_over.wait(PATIENCE) and tokenizer)
        (result,) = run(engine, [asks("r", [1], 5, GRAMMARS["choice"])]).values()
        is_over.set()
        assert result.finish_reason == "error"
        assert "too long" in result.error


def test_an_abort_in_the_middle_leaves_nothing(start):
    engine = start()
    engine.add([asks("r", [1, 2], 60, GRAMMARS["json"])])
    results = {"r": Result()}
    while len(results["r"].token_ids) < 4:
        for output in engine.step():
            results[output.request_id].add(output)
    engine.abort(["r"])
    drain(engine, results)
    again = run(engine, [asks("r", [1, 2], 60, GRAMMARS["json"])])["r"]  # the same id begins anew
    assert again.token_ids[:4] == results["r"].token_ids[:4]
    assert again.finish_reason == "stop"
