import itertools
import json

import numpy as np
import pytest
from tiny_tokenizer import byte_level

from jaxserve.bench.serving.arrivals import arrival_times
from jaxserve.bench.serving.options import ServingOptions
from jaxserve.bench.serving.prompts import PromptMaker
from jaxserve.bench.serving.workloads import (
    BLOCK,
    OWN,
    Call,
    Segment,
    azure_calls,
    fit,
    mooncake_calls,
    random_calls,
    read_workload,
)
from jaxserve.errors import InvalidRequest
from jaxserve.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer.load(byte_level(tmp_path_factory.mktemp("tokenizer")))


def _ids(calls, seed=0, vocab_size=1000):
    maker = PromptMaker(seed=seed, as_ids=True, tokenizer=None, vocab_size=vocab_size)
    return [maker.prompt(call) for call in calls]


def test_random_prompts_share_a_prefix_and_nothing_else():
    calls = random_calls(ServingOptions(input_len=50, prefix_len=20, num_requests=6, output_len=7))
    prompts = _ids(calls)
    assert {len(prompt) for prompt in prompts} == {50}
    assert len({tuple(prompt[:20]) for prompt in prompts}) == 1
    assert len({tuple(prompt[20:24]) for prompt in prompts}) == 6
    assert {call.output_len for call in calls} == {7}


def test_random_lengths_fill_their_range():
    calls = random_calls(ServingOptions(input_len=100, output_len=50, range_ratio=0.5, num_requests=2000))
    lengths = [call.num_prompt_tokens for call in calls]
    assert (min(lengths), max(lengths)) == (50, 150)
    assert 97 < np.mean(lengths) < 103
    assert {call.output_len for call in calls} == set(range(25, 76))
    assert [len(prompt) for prompt in _ids(calls)] == lengths


def test_a_seed_fixes_lengths_and_tokens():
    options = {"input_len": 9, "range_ratio": 0.9, "num_requests": 20}
    first, again, other = (random_calls(ServingOptions(seed=seed, **options)) for seed in (1, 1, 2))
    assert first == again != other
    assert _ids(first, seed=1) == _ids(again, seed=1) != _ids(first, seed=2)


def test_a_shorter_segment_has_the_first_tokens_of_a_longer_one():
    short, long = (Call(prompt=(Segment((BLOCK, 3), n),), num_prompt_tokens=n, output_len=1) for n in (17, 512))
    one, other = _ids([short, long])
    assert other[:17] == one


def test_text_has_as_many_tokens_as_asked_for(tokenizer):
    maker = PromptMaker(seed=0, as_ids=False, tokenizer=tokenizer)
    calls = random_calls(ServingOptions(input_len=40, num_requests=10, prompts="text"))
    for call in calls:
        prompt = maker.prompt(call)
        assert isinstance(prompt, str)
        assert abs(len(tokenizer.encode(prompt)) - 40) <= 1


def test_token_ids_are_never_special_ones(tokenizer):
    maker = PromptMaker(seed=0, as_ids=True, tokenizer=tokenizer)
    (call,) = random_calls(ServingOptions(input_len=5000, num_requests=1))
    assert set(maker.prompt(call)).isdisjoint(tokenizer.special_token_ids)


def test_an_azure_trace_keeps_its_times_and_lengths(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.6805900,396,109\n"
        "2023-11-16 18:15:48.6805900,10,1\n"
    )
    calls = azure_calls(path, speed=2.0)
    assert [call.arrival for call in calls] == pytest.approx([0, 1, 2])
    assert [(call.num_prompt_tokens, call.output_len) for call in calls] == [(374, 44), (10, 1), (396, 109)]
    assert [len(prompt) for prompt in _ids(calls)] == [374, 10, 396]
    scaled = azure_calls(path, length_scale=0.1)
    assert [(call.num_prompt_tokens, call.output_len) for call in scaled] == [(37, 4), (1, 1), (40, 11)]


def _mooncake(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_equal_hash_ids_are_equal_blocks(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 27000, "input_length": 1024, "output_length": 6, "hash_ids": [0, 3]},
        {"timestamp": 30000, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]},
    ]
    calls = mooncake_calls(_mooncake(tmp_path / "trace.jsonl", rows), speed=3.0)
    assert [call.arrival for call in calls] == [0, 9, 10]
    first, second, third = _ids(calls)
    assert [len(prompt) for prompt in (first, second, third)] == [1100, 1024, 600]
    assert first[:512] == second[:512] == third[:512]
    assert first[512:600] == third[512:]
    assert first[512:1024] != second[512:]


def test_scaled_blocks_are_still_shared(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 0, "input_length": 1536, "output_length": 5, "hash_ids": [0, 1, 4]},
    ]
    first, second = _ids(mooncake_calls(_mooncake(tmp_path / "trace.jsonl", rows), length_scale=1 / 16))
    assert (len(first), len(second)) == (69, 96)
    assert first[:64] == second[:64]
    assert first[64:] != second[64:69]


@pytest.mark.parametrize(
    ("workload", "text", "line"),
    [
        ("azure", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n", "line 2"),
        ("azure", "TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,3,4\n", "line 2"),
        ("mooncake", '{"timestamp": 0}\n', "line 1"),
        ("mooncake", '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n\n{oops\n', "line 3"),
        ("mooncake", "", "holds no requests"),
        ("sharegpt", '{"conversations": []}', "ShareGPT"),
        ("sharegpt", "[]", "holds no requests"),
        ("sonnet", "\n\n", "holds no requests"),
    ],
)
def test_a_file_of_another_kind_is_refused_where_it_differs(workload, text, line, tmp_path, tokenizer):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match=line) as refusal:
        read_workload(ServingOptions(workload=workload, file=str(path)), tokenizer)
    assert refusal.value.param == "file"


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(InvalidRequest, match="nothing_here"):
        read_workload(ServingOptions(workload="azure", file=str(tmp_path / "nothing_here")), None)


def test_sharegpt_asks_first_questions_for_answers_as_long(tmp_path, tokenizer):
    def turns(*texts):
        speakers = itertools.cycle(["human", "gpt"])
        return {"conversations": [{"from": who, "value": text} for who, text in zip(speakers, texts, strict=False)]}

    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([turns("Why?", "Because.", "And?"), turns("Only a question"), turns("Who?", "You")]))
    calls = read_workload(ServingOptions(workload="sharegpt", file=str(path)), tokenizer)
    assert {(call.prompt, call.output_len) for call in calls} == {("Why?", 8), ("Who?", 3)}


def test_sonnets_begin_alike_and_stay_within_their_length(tmp_path, tokenizer):
    path = tmp_path / "sonnet.txt"
    path.write_text("".join(f"line number {number} of it\n" for number in range(50)))
    options = ServingOptions(workload="sonnet", file=str(path), input_len=300, prefix_len=150, num_requests=8)
    calls = read_workload(options, tokenizer)
    lengths = [len(tokenizer.encode(str(call.prompt))) for call in calls]
    assert [call.num_prompt_tokens for call in calls] == lengths
    assert all(260 < length <= 300 for length in lengths)
    beginnings = {str(call.prompt)[:120] for call in calls}
    assert len(beginnings) == 1
    assert len({call.prompt for call in calls}) == 8


def test_workloads_of_text_need_a_tokenizer(tmp_path):
    (tmp_path / "file").write_text("[]")
    with pytest.raises(InvalidRequest) as refusal:
        read_workload(ServingOptions(workload="sharegpt", file=str(tmp_path / "file")), None)
    assert refusal.value.param == "tokenizer"


def _call(num_prompt: int, output_len: int) -> Call:
    segments = (Segment((BLOCK, 0), 30), Segment((OWN, 1), num_prompt - 30))
    return Call(prompt=segments, num_prompt_tokens=num_prompt, output_len=output_len)


@pytest.mark.parametrize(
    ("lengths", "fitted"),
    [
        ((60, 40), (60, 40)),
        ((61, 40), (60, 40)),  # the prompt gives way to an output of less than half
        ((200, 60), (50, 50)),
        ((40, 90), (40, 50)),  # and the output to half the context
    ],
)
def test_what_is_too_long_is_cut_by_the_rule(lengths, fitted):
    call = fit(_call(*lengths), 100, None)
    assert (call.num_prompt_tokens, call.output_len) == fitted
    assert len(_ids([call])[0]) == fitted[0]
    assert _ids([call])[0] == _ids([_call(*lengths)])[0][: fitted[0]]  # it keeps its beginning
    if lengths == fitted:
        assert call == _call(*lengths)


def test_a_text_is_cut_to_tokens(tokenizer):
    call = fit(Call(prompt="abcdefgh" * 10, num_prompt_tokens=80, output_len=10), 50, tokenizer, reserve=5)
    assert (call.num_prompt_tokens, call.output_len) == (35, 10)
    assert len(tokenizer.encode(str(call.prompt))) == 35


def test_a_context_without_room_is_refused():
    with pytest.raises(InvalidRequest):
        fit(_call(60, 40), 8, None, reserve=7)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_variance_of_the_burstiness(burstiness):
    calls = [_call(40, 1)] * 20_000
    times = arrival_times(calls, rate=8.0, burstiness=burstiness, seed=3)
    gaps = np.diff(times, prepend=0.0)
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    assert times == arrival_times(calls, rate=8.0, burstiness=burstiness, seed=3)
    assert times != arrival_times(calls, rate=8.0, burstiness=burstiness, seed=4)


def test_without_a_rate_the_trace_says_when():
    calls = [Call(prompt="x", num_prompt_tokens=1, output_len=1, arrival=at) for at in (0.0, 2.5)]
    assert arrival_times(calls, rate=None, burstiness=1.0, seed=0) == [0.0, 2.5]
    assert arrival_times([_call(40, 1)] * 2, rate=None, burstiness=1.0, seed=0) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("url", {"url": "127.0.0.1:8000"}),
        ("file", {"workload": "azure"}),
        ("prompts", {"endpoint": "chat", "prompts": "ids"}),
        ("prefix_len", {"prefix_len": 256}),
        ("range_ratio", {"range_ratio": 1.0}),
        ("request_rate", {"request_rate": 0.0}),
        ("request_rate", {"request_rate": float("nan")}),
        ("burstiness", {"burstiness": float("inf")}),
        ("num_requests", {"num_requests": 0}),
        ("temperature", {"temperature": -0.1}),
        ("extra_body", {"extra_body": "{"}),
        ("extra_body", {"extra_body": "[1]"}),
    ],
)
def test_an_option_that_cannot_hold_is_named(param, options):
    with pytest.raises(InvalidRequest) as refusal:
        ServingOptions(**options)
    assert refusal.value.param == param


def test_the_public_traces_are_read_whole(test_data):
    folder = test_data / "workloads"
    calls = azure_calls(folder / "AzureLLMInferenceTrace_conv.csv")
    assert len(calls) == 19366
    assert np.mean([call.num_prompt_tokens for call in calls]) == pytest.approx(1154.7, abs=0.1)
    assert calls[-1].arrival == pytest.approx(3501.7, abs=0.1)

    calls = mooncake_calls(folder / "conversation_trace.jsonl")
    rows = [json.loads(line) for line in (folder / "conversation_trace.jsonl").read_text().splitlines()]
    assert len(calls) == len(rows) == 12031
    assert sum(call.num_prompt_tokens for call in calls) == sum(row["input_length"] for row in rows)
    assert sum(len(call.prompt) for call in calls) == sum(len(row["hash_ids"]) for row in rows)
