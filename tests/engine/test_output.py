import itertools
import tracemalloc

import pytest
import tiny_tokenizer
from depths import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.output import RequestGroup, StopChecker, logprob_entry
from jaxserve.request import EngineOutput, EngineRequest, Logprob, TokenLogprobs
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(tiny_tokenizer.byte_level(tmp_path_factory.mktemp("tokenizer")))


def run(checker, pieces, *, min_pieces=0):
    """All text that is shown, the stop string, and the text after each piece."""
    shown, steps = "", []
    for count, piece in enumerate(pieces, 1):
        text, stop = checker.push(piece, may_stop=count > min_pieces)
        shown += text
        steps.append(shown)
        if stop is not None:
            return shown, stop, steps
    return shown + checker.flush(), None, steps


def expected(text, stops, *, include=False):
    """Find by brute force the stop string that is complete first, the longest of those that end together."""
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not ends:
        return text, None
    end, _, stop = min(ends)
    return text[: end if include else end - len(stop)], stop


def splits(text):
    """Every way to cut a text into pieces."""
    for cuts in itertools.product([False, True], repeat=max(len(text) - 1, 0)):
        bounds = [0, *(i for i, cut in enumerate(cuts, 1) if cut), len(text)]
        yield [text[a:b] for a, b in itertools.pairwise(bounds)]


class TestStopChecker:
    @pytest.mark.parametrize("include", [False, True])
    @pytest.mark.parametrize(
        ("text", "stops"),
        [
            ("aabaabaaab", ["aabaaab"]),  # a failed match contains the beginning of the true one
            ("abcabcabd", ["abcabd"]),
            ("aaaaab", ["aaab"]),
            ("xaby", ["b", "abc"]),
            ("xabcy", ["abcd", "bc", "c"]),  # "bc" and "c" end together
            ("xabcdy", ["d", "abcd", "q"]),
            ("abababa", ["bb", "abac"]),
            ("\n\n\n", ["\n\n", "\n\n\n"]),
            ("🦙é🦙", ["é🦙"]),
        ],
    )
    def test_token_borders_make_no_difference(self, text, stops, include):
        for pieces in splits(text):
            shown, stop, steps = run(StopChecker(stops, include_in_output=include), pieces)
            assert (shown, stop) == expected(text, stops, include=include)
            assert all(shown.startswith(step) for step in steps), "text was shown that is not in the result"

    @settings(max_examples=examples(500))
    @given(
        pieces=st.lists(st.text("ab", max_size=4), max_size=12),
        stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
        include=st.booleans(),
    )
    def test_random_texts(self, pieces, stops, include):
        shown, stop, steps = run(StopChecker(stops, include_in_output=include), pieces)
        assert (shown, stop) == expected("".join(pieces), stops, include=include)
        assert all(shown.startswith(step) for step in steps)

    @settings(max_examples=examples(300))
    @given(
        pieces=st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=12),
        stop=st.text("ab", min_size=1, max_size=4),
        min_pieces=st.integers(0, 12),
    )
    def test_min_tokens(self, pieces, stop, min_pieces):
        """The end of the stop string counts."""
        text = "".join(pieces)
        earliest_end = len("".join(pieces[:min_pieces])) + 1
        ends = [end for end in range(earliest_end, len(text) + 1) if text[:end].endswith(stop)]
        shown, found, _ = run(StopChecker([stop]), pieces, min_pieces=min_pieces)
        if ends:
            assert (shown, found) == (text[: ends[0] - len(stop)], stop)
        else:
            assert (shown, found) == (text, None)

    def test_only_what_may_become_a_stop_string_is_held_back(self):
        checker = StopChecker(["<end>", "nd<"])
        shown = [checker.push(piece)[0] for piece in ["a", "<", "e", "n", "d", "x", "<e", "<en"]]
        assert shown == ["a", "", "", "", "", "<endx", "", "<e"]
        assert checker.flush() == "<en"
        assert checker.flush() == ""

    def test_nothing_is_held_back_if_the_stop_string_is_shown_anyway(self):
        checker = StopChecker(["<end>"], include_in_output=True)
        assert [checker.push(piece) for piece in ["a<e", "nd>b"]] == [("a<e", None), ("nd>", "<end>")]

    def test_a_huge_stop_string_costs_no_more_than_the_text(self):
        checker = StopChecker(["a" * 5_000_000 + "b"])
        assert checker.push("a" * 100) == ("", None)
        assert checker.push("c") == ("a" * 100 + "c", None)
        (matcher,) = checker._matchers
        assert len(matcher._border) < 200

    def test_without_stop_strings(self):
        assert StopChecker([]).push("text") == ("text", None)


def make_group(tokenizer, *, prompt="the", n=1, eos=(265,), grammar="", **sampling):
    params = SamplingParams(**sampling)
    ids = tokenizer.encode(prompt)
    stop_token_ids = frozenset({*eos, *params.stop_token_ids})
    requests = [
        EngineRequest(
            request_id=f"r-{i}",
            group_id="r-0",
            prompt_token_ids=ids,
            params=params,
            max_tokens=100,
            stop_token_ids=stop_token_ids,
            grammar=grammar,
        )
        for i in range(n)
    ]
    return RequestGroup("r", prompt, requests, tokenizer)


def output(*token_ids, index=0, **fields):
    return EngineOutput(request_id=f"r-{index}", new_token_ids=list(token_ids), **fields)


class TestRequestGroup:
    def test_deltas_make_the_result(self, tokenizer):
        text = " upon the 🦙 end"
        ids = tokenizer.encode(text)
        group = make_group(tokenizer)
        deltas = []
        for i, token_id in enumerate(ids, 1):
            assert group.push([output(token_id, finish_reason="length" if i == len(ids) else None)]) == []
            deltas.append(group.take_delta())
        assert group.take_delta() is None
        assert "".join(delta.outputs[0].text for delta in deltas) == text
        assert [i for delta in deltas for i in delta.outputs[0].token_ids] == ids
        assert [delta.finished for delta in deltas] == [False] * (len(ids) - 1) + [True]
        assert [delta.outputs[0].finish_reason for delta in deltas[:-1]] == [None] * (len(ids) - 1)
        result = group.result()
        assert (result.outputs[0].text, result.outputs[0].token_ids) == (text, ids)
        assert (result.prompt, result.outputs[0].finish_reason, result.finished) == ("the", "length", True)

    def test_several_outputs_make_one_delta(self, tokenizer):
        first, second = tokenizer.encode("on")[0], tokenizer.encode(" upon")[0]
        group = make_group(tokenizer)
        group.push([output(first), output(second)])
        delta = group.take_delta()
        assert (delta.outputs[0].text, delta.outputs[0].token_ids) == ("on upon", [first, second])

    @pytest.mark.parametrize(("grammar", "text"), [("", "the"), ("a form", " the")])
    def test_structured_output_keeps_its_first_space(self, tmp_path, grammar, text):
        tokenizer = Tokenizer.load(tiny_tokenizer.sentencepiece(tmp_path))
        group = make_group(tokenizer, prompt="", grammar=grammar)
        group.push([output(*tokenizer.encode("the", add_special_tokens=False), finish_reason="length")])
        assert group.result().outputs[0].text == text

    def test_a_stop_string_ends_the_sequence(self, tokenizer):
        ids = tokenizer.encode("abc and more")
        group = make_group(tokenizer, stop=["c a"])
        stopped = group.push([output(token_id) for token_id in ids])
        assert stopped == ["r-0"]
        assert group.is_finished
        completion = group.result().outputs[0]
        assert (completion.text, completion.finish_reason, completion.stop_reason) == ("ab", "stop", "c a")
        assert completion.token_ids == ids[:5], "the token that completes the stop string is the last"

    def test_what_the_engine_adds_after_a_stop_string_is_dropped(self, tokenizer):
        group = make_group(tokenizer, stop="b")
        assert group.push([output(*tokenizer.encode("abx"))]) == ["r-0"]
        assert group.push([output(*tokenizer.encode("y"), finish_reason="length")]) == []
        assert group.result().outputs[0].text == "a"
        assert group.result().outputs[0].finish_reason == "stop"

    def test_a_stop_string_with_the_last_token_needs_no_abort(self, tokenizer):
        group = make_group(tokenizer, stop="b")
        assert group.push([output(*tokenizer.encode("ab"), finish_reason="length")]) == []
        completion = group.result().outputs[0]
        assert (completion.text, completion.finish_reason, completion.stop_reason) == ("a", "stop", "b")

    def test_a_held_back_text_comes_at_the_end(self, tokenizer):
        group = make_group(tokenizer, stop="<end>")
        llama = tokenizer.encode("🦙")
        group.push([output(*tokenizer.encode("x<en"))])
        assert group.take_delta().outputs[0].text == "x"
        group.push([output(llama[0], finish_reason="length")])
        assert group.take_delta().outputs[0].text == "<en\ufffd"

    @pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
    def test_a_stop_token_is_text_only_if_asked_for(self, tokenizer, include, text):
        stop_id = tokenizer.encode("b")[0]
        group = make_group(tokenizer, stop_token_ids=[stop_id], include_stop_str_in_output=include)
        group.push([output(*tokenizer.encode("ab"), finish_reason="stop", stop_reason=stop_id)])
        completion = group.result().outputs[0]
        assert (completion.text, completion.stop_reason, completion.token_ids[-1]) == (text, stop_id, stop_id)

    def test_eos_is_no_stop_reason(self, tokenizer):
        group = make_group(tokenizer)
        group.push([output(*tokenizer.encode("ab"), 265, finish_reason="stop", stop_reason=265)])
        completion = group.result().outputs[0]
        assert (completion.text, completion.finish_reason, completion.stop_reason) == ("ab", "stop", None)
        assert completion.token_ids[-1] == 265

    def test_min_tokens_holds_for_stop_strings(self, tokenizer):
        group = make_group(tokenizer, stop="b", min_tokens=3)
        assert group.push([output(*tokenizer.encode("abcb"))]) == ["r-0"]
        assert group.result().outputs[0].text == "abc"

    @pytest.mark.parametrize("skips", [False, True])
    @pytest.mark.parametrize("stop", ["<|im_start|>", "<|tool|>"])  # a special token, an added one
    @pytest.mark.parametrize(
        ("fields", "tokens", "text"),
        [
            ({}, "ab{}cd", "ab"),
            ({"include_stop_str_in_output": True}, "ab{}cd", "ab{}"),
            ({"min_tokens": 2}, "a{}b{}c", None),
            ({"stop": ["<never>", "{}"]}, "a<nev{}c", "a<nev"),
            ({"stop": ["b", "{}"]}, "ab{}c", "a"),
        ],
    )
    def test_a_stop_string_that_is_one_token(self, tokenizer, skips, stop, fields, tokens, text):
        """It ends the sequence whether or not the text shows the token."""
        stops = [each.format(stop) for each in fields.get("stop", ["{}"])]
        group = make_group(tokenizer, **fields | {"stop": stops, "skip_special_tokens": skips})
        assert group.push([output(i) for i in tokenizer.encode(tokens.replace("{}", stop))]) == ["r-0"]
        completion = group.result().outputs[0]
        if text is None:  # before min_tokens it is an ordinary token
            text = "ab" if skips and stop == "<|im_start|>" else f"a{stop}b"
        assert (completion.text, completion.finish_reason) == (text.replace("{}", stop), "stop")
        assert completion.stop_reason == ("b" if "b" in stops else stop)

    def test_half_a_character_before_a_stop_token(self, tokenizer):
        group = make_group(tokenizer, stop="<|im_start|>")
        group.push([output(*tokenizer.encode("x🦙")[:-1], *tokenizer.encode("<|im_start|>y"))])
        assert group.result().outputs[0].text == "x\ufffd"

    def test_without_detokenization(self, tokenizer):
        group = make_group(tokenizer, detokenize=False)
        group.push([output(1, 2, finish_reason="length")])
        assert (group.result().outputs[0].text, group.result().outputs[0].token_ids) == ("", [1, 2])

    def test_siblings_finish_one_by_one(self, tokenizer):
        ids = tokenizer.encode("ab")
        group = make_group(tokenizer, n=3)
        group.push([output(ids[0], index=1, num_cached_tokens=16), output(ids[1], index=2, finish_reason="length")])
        delta = group.take_delta()
        assert [completion.index for completion in delta.outputs] == [1, 2]
        assert group.unfinished_ids == ["r-0", "r-1"]
        group.push([output(ids[0], finish_reason="length"), output(index=1, finish_reason="abort")])
        assert group.is_finished
        result = group.result()
        assert [completion.text for completion in result.outputs] == ["a", "a", "b"]
        assert [completion.finish_reason for completion in result.outputs] == ["length", "abort", "length"]
        assert result.num_cached_tokens == 0, "what siblings share is no hit of the prompt"
        assert str(result) == "a\na\nb"

    def test_prompt_logprobs_come_in_pieces_and_leave_whole(self, tokenizer):
        group = make_group(tokenizer, prompt="abc", prompt_logprobs=1)
        ids = group.prompt_token_ids
        first, second = (TokenLogprobs(token_id, -2.0, 3, [256], [-0.5]) for token_id in ids[1:])
        group.push([output(prompt_logprobs=[first], num_cached_tokens=32)])
        assert group.take_delta() is None
        group.push([output(ids[0], prompt_logprobs=[second])])
        delta = group.take_delta()
        assert delta.prompt_logprobs[0] is None
        assert [list(entry) for entry in delta.prompt_logprobs[1:]] == [[ids[1], 256], [ids[2], 256]]
        assert delta.num_cached_tokens == 32
        group.push([output(ids[0], finish_reason="length")])
        assert group.take_delta().prompt_logprobs is None
        assert group.result().prompt_logprobs == delta.prompt_logprobs

    def test_logprobs_run_parallel_to_tokens(self, tokenizer):
        ids = tokenizer.encode("abc")
        group = make_group(tokenizer, logprobs=0, stop="b")
        entries = [TokenLogprobs(token_id, -0.25, 1, [], []) for token_id in ids]
        group.push([output(*ids, logprobs=entries)])
        completion = group.result().outputs[0]
        assert [list(entry) for entry in completion.logprobs] == [[token_id] for token_id in ids[:2]]
        assert completion.cumulative_logprob == -0.5

    def test_forgotten_logprobs_are_out_of_memory(self, tokenizer):
        group = make_group(tokenizer, logprobs=20)
        token_id = tokenizer.encode("a")[0]

        def stream(num_tokens):
            for i in range(num_tokens):
                entry = TokenLogprobs(token_id, -0.25, 1, list(range(20)), [-float(i + k) for k in range(20)])
                group.push([output(token_id, logprobs=[entry])])
                (completion,) = group.take_delta().outputs
                assert [list(entry.values())[1].logprob for entry in completion.logprobs] == [-float(i)]
                group.forget_logprobs()

        stream(10)
        tracemalloc.start()
        try:
            stream(1000)
            num_bytes = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert num_bytes < 200 * 1000, "20 logprobs take 3000 bytes a token"
        assert group.result().outputs[0].logprobs == []
        assert len(group.result().outputs[0].token_ids) == 1010

    def test_only_logprobs_that_were_given_are_forgotten(self, tokenizer):
        ids = tokenizer.encode("abc")
        group = make_group(tokenizer, logprobs=0)
        entries = [TokenLogprobs(token_id, -0.25, 1, [], []) for token_id in ids]
        group.forget_logprobs()
        group.push([output(ids[0], logprobs=entries[:1])])
        group.take_delta()
        group.push([output(*ids[1:], logprobs=entries[1:])])
        group.forget_logprobs()
        group.forget_logprobs()
        assert [list(entry) for entry in group.take_delta().outputs[0].logprobs] == [[ids[1]], [ids[2]]]

    def test_prompt_logprobs_stay_until_each_sequence_has_begun(self, tokenizer):
        group = make_group(tokenizer, prompt="ab", n=2, prompt_logprobs=0)
        first, second = group.prompt_token_ids
        group.push([output(first, prompt_logprobs=[TokenLogprobs(second, -1.0, 1, [], [])])])
        assert len(group.take_delta().prompt_logprobs) == 2
        group.forget_logprobs()
        assert len(group.result().prompt_logprobs) == 2
        group.push([output(index=1, finish_reason="abort")])
        group.take_delta()
        group.forget_logprobs()
        assert group.result().prompt_logprobs is None

    def test_a_failed_sequence_says_why(self, tokenizer):
        group = make_group(tokenizer)
        group.push([output(finish_reason="error", error="NaN")])
        assert group.error == "NaN"
        assert group.take_delta().outputs[0].finish_reason == "error"


def test_logprob_entry_puts_the_token_first_with_its_rank(tokenizer):
    (a,), (b,) = tokenizer.encode("a"), tokenizer.encode("b")
    entry = logprob_entry(tokenizer, TokenLogprobs(a, -1.5, 2, [b, a], [-0.5, -1.5]))
    assert list(entry.items()) == [(a, Logprob(-1.5, 2, "a")), (b, Logprob(-0.5, 1, "b"))]
    outside_the_top = logprob_entry(tokenizer, TokenLogprobs(a, -9.0, 77, [b], [-0.5]))
    assert list(outside_the_top.items()) == [(a, Logprob(-9.0, 77, "a")), (b, Logprob(-0.5, 1, "b"))]
