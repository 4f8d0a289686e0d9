"""The wire: a client of an engine elsewhere gets what one in the same process would."""

import asyncio
import contextlib
import threading

import msgspec
import pytest
from fake_client import Script
from remote_engine import Engine, Sink, connected, request
from serving import byte_tokenizer
from waiting import PATIENCE, until

from jaxserve.engine import wire
from jaxserve.engine.client import EngineStats
from jaxserve.engine.frontend import Frontend
from jaxserve.engine.replicas import ReplicatedEngineClient
from jaxserve.errors import (
    CapacityExceeded,
    EngineDead,
    InvalidRequest,
    JaxserveError,
    QueueFull,
    RequestFailed,
    Unavailable,
)
from jaxserve.request import EngineOutput, EngineRequest, Refusal, TokenLogprobs
from jaxserve.sampling_params import SamplingParams


async def test_tokens_of_many_requests_arrive_in_one_message_a_step(engine):
    async with connected(engine, "x", "y") as (x, y):
        ours, theirs = Sink(), Sink()
        x.submit([request("a"), request("b", prompt=(9, 10, 11))], ours)
        y.submit([request("c", prompt=(3, 4))], theirs)
        await until(lambda: len(ours.reasons) == 2 and len(theirs.reasons) == 1)
        assert x.info == engine.client.info
    assert ours.tokens("a") == [5, 6, 7, 8]
    assert ours.tokens("b") == [9, 10, 11]
    assert theirs.tokens("c") == [3, 4]
    assert ours.reasons == {"a": "length", "b": "stop"}
    assert len(ours.batches) < len(ours.outputs)


async def test_a_request_arrives_as_it_was_sent(engine):
    sent = EngineRequest(
        request_id="a",
        group_id="a",
        prompt_token_ids=[1, 2],
        params=SamplingParams(temperature=0, logit_bias={3: -1.5}, stop=["x", "y"], logprobs=2, seed=-(2**63)),
        max_tokens=3,
        stop_token_ids=frozenset([2, 7]),
        bad_word_ids=((1, 2), (3,)),
        seed=2**63 - 1,
        priority=-4,
        cache_salt="pepper",
    )
    async with connected(engine, "x") as (x,):
        sink = Sink()
        x.submit([sent], sink)
        await until(lambda: bool(sink.reasons))
    (received,) = engine.client.submitted
    assert msgspec.to_builtins(received) == msgspec.to_builtins(sent)


def test_an_output_arrives_as_it_was_sent():
    top = TokenLogprobs(4, -0.25, 1, [4, 9], [-0.25, float("-inf")])
    sent = EngineOutput(
        request_id="a", new_token_ids=[4], logprobs=[top], prompt_logprobs=[top], embedding=b"\x00\xff", error="no"
    )
    assert wire.decode_to_client(wire.encode(wire.Outputs([sent]))) == wire.Outputs([sent])


@pytest.mark.parametrize(
    "error",
    [
        QueueFull("100 are waiting", retry_after=2.5),
        CapacityExceeded("too long", param="max_tokens", code="capacity_exceeded"),
        InvalidRequest("odd", param="prompt"),
        EngineDead("gone"),
        RequestFailed("NaN"),
    ],
)
async def test_a_refusal_comes_as_the_error_it_was(engine, error):
    engine.client.refusal = error
    async with connected(engine, "x") as (x,):
        sink = Sink()
        x.submit([request("a"), request("b")], sink)
        await until(lambda: len(sink.reasons) == 2)
        engine.client.refusal = None
        x.submit([request("a")], sink)  # its id is free again
        await until(lambda: bool(sink.tokens("a")))
        refusal = sink.outputs[0].refusal
    assert type(refusal.error()) is type(error)
    assert str(refusal.error()) == str(error)
    assert vars(refusal.error()) == vars(error)


async def test_a_full_queue_is_an_error_before_anything_has_come(engine):
    engine.client.refusal = QueueFull("100 are waiting", retry_after=2.5)
    async with connected(engine, "x") as (x,):
        frontend = Frontend(x, byte_tokenizer())
        group = frontend.prepare([5, 6], SamplingParams(n=2), request_id="a")
        with pytest.raises(QueueFull, match="100 are waiting") as refused:
            await frontend.run([group], lambda *_: pytest.fail("something has come"))
        assert refused.value.retry_after == 2.5


async def test_a_refusal_in_the_middle_of_a_text(engine):
    error = InvalidRequest("it is too complex", param="structured_outputs", code="unsupported_grammar")
    engine.play = lambda _: Script(token_ids=[7, 8], error=error)
    async with connected(engine, "x") as (x,):
        frontend, token_ids = Frontend(x, byte_tokenizer()), []
        group = frontend.prepare([5, 6], SamplingParams(), request_id="a")
        with pytest.raises(InvalidRequest, match="too complex") as refused:
            await frontend.run([group], lambda _, delta: token_ids.extend(delta.outputs[0].token_ids))
        assert token_ids == [7, 8]
        assert vars(refused.value) == vars(error)


def test_a_refusal_of_an_unknown_kind_is_still_an_error():
    assert type(Refusal(kind="Surprise", message="?").error()) is JaxserveError


async def test_an_id_that_runs_is_refused_at_once(engine):
    engine.play = lambda request: Script(token_ids=[], hangs=True)
    async with connected(engine, "x") as (x,):
        x.submit([request("a")], Sink())
        with pytest.raises(InvalidRequest, match="running already"):
            x.submit([request("a")], Sink())
        with pytest.raises(InvalidRequest, match="running already"):
            x.submit([request("b"), request("b")], Sink())


async def test_abort_from_another_thread(engine):
    engine.play = lambda request: Script(token_ids=[5], hangs=True)
    async with connected(engine, "x") as (x,):
        sink = Sink()
        x.submit([request("a")], sink)
        await until(lambda: bool(sink.outputs))
        await asyncio.to_thread(x.abort, ["a", "unknown"])
        await until(lambda: engine.client.num_running == 0)
    assert engine.client.aborted == ["a"]


async def test_requests_of_a_client_that_is_gone_are_aborted(engine):
    engine.play = lambda request: Script(token_ids=[5], hangs=True)
    async with connected(engine, "x", "y") as (x, y):
        mine, others = Sink(), Sink()
        x.submit([request("a"), request("b")], mine)
        y.submit([request("c")], others)
        await until(lambda: len(mine.outputs) == 2 and bool(others.outputs))
        engine.server.client_gone("x")
        await until(lambda: engine.client.num_running == 1)
        assert sorted(engine.client.aborted) == ["a", "b"]


async def test_several_clients_spread_requests_over_engines_in_long_steps(engine):
    """The statistics of an engine do not change during a step: those of one stay at nothing here."""
    other = Engine()
    engine.client.stats = EngineStats
    for each in (engine, other):
        each.play = lambda request: Script(token_ids=[], hangs=True)
    folders = {0: engine.folder, 1: other.folder}
    with contextlib.ExitStack() as stack:
        stack.callback(other.close)
        clients = [await ReplicatedEngineClient.connect(folders, name, num_engines=2) for name in "xyz"]
        for client in clients:
            stack.callback(client.close)
        for number in range(20):
            for client in clients:
                client.submit([request(f"{number}{id(client)}")], Sink())
            await asyncio.sleep(0.02)
        await until(lambda: len(engine.client.submitted) + len(other.client.submitted) == 60)
    assert abs(len(engine.client.submitted) - len(other.client.submitted)) <= 6


async def test_stats_follow_the_engine(engine):
    engine.play = lambda request: Script(token_ids=[5], hangs=True)
    async with connected(engine, "x") as (x,):
        x.submit([request("a")], Sink())
        await until(lambda: x.stats().num_running == 1)
        x.abort(["a"])
        await until(lambda: x.stats().num_running == 0)


async def test_with_the_last_answer_nothing_runs_any_more(engine):
    async with connected(engine, "x") as (x,):
        for number in range(20):
            seen = asyncio.Queue()
            x.submit([request(f"{number}")], lambda outputs, seen=seen: seen.put_nowait((outputs, x.stats())))
            outputs, stats = await asyncio.wait_for(seen.get(), PATIENCE)
            while outputs[-1].finish_reason is None:
                outputs, stats = await asyncio.wait_for(seen.get(), PATIENCE)
            assert stats.num_running == 0


async def test_calls_wait_for_their_answers(engine):
    engine.play = lambda request: Script(token_ids=[5], hangs=True)
    async with connected(engine, "x", "y") as (x, y):
        assert await asyncio.to_thread(x.reset_prefix_cache) is True
        x.submit([request("a")], Sink())
        await until(lambda: engine.client.num_running == 1)
        answers = await asyncio.gather(*(asyncio.to_thread(client.reset_prefix_cache) for client in (x, y, x, y)))
        assert answers == [False] * 4


async def test_a_call_that_fails_is_answered(engine, caplog):
    def fail(directory):
        raise RuntimeError(f"cannot write to {directory}")

    engine.client.start_profile = fail
    async with connected(engine, "x") as (x,):
        with pytest.raises(JaxserveError, match="start_profile: cannot write to /profiles"):
            await asyncio.wait_for(asyncio.to_thread(x.start_profile, "/profiles"), PATIENCE)
    assert "start_profile has failed" in caplog.text


async def test_a_snapshot_comes_over_the_wire(engine):
    engine.play = lambda request: Script(token_ids=[5], hangs=True)
    async with connected(engine, "x") as (x,):
        x.submit([request("a")], Sink())
        await until(lambda: engine.client.num_output_tokens == 1)
        assert await asyncio.to_thread(x.snapshot) == engine.client.snapshot()


@pytest.mark.parametrize("is_sent", [False, True], ids=["before it is sent", "before it is answered"])
async def test_a_call_ends_when_its_client_is_closed(engine, is_sent):
    has_come, gate = threading.Event(), threading.Event()
    take = engine.client.snapshot
    engine.client.snapshot = lambda: (has_come.set(), gate.wait(PATIENCE), take())[-1]
    async with connected(engine, "x") as (x,):
        loop = asyncio.get_running_loop()
        called = threading.Event()
        answer = loop.run_in_executor(None, lambda: (called.set(), x.snapshot()))
        assert called.wait(PATIENCE)
        if is_sent:
            await until(has_come.is_set)
        x.close()
        with pytest.raises(EngineDead, match="the connection is closed"):
            await asyncio.wait_for(answer, PATIENCE)
    gate.set()


async def test_a_call_does_not_wait_for_ever(engine, monkeypatch):
    monkeypatch.setattr("jaxserve.engine.remote.CALL_TIMEOUT", 0.05)
    gate = threading.Event()
    engine.client.snapshot = lambda: gate.wait(PATIENCE)
    async with connected(engine, "x") as (x,):
        with pytest.raises(Unavailable, match="in a step"):
            await asyncio.to_thread(x.snapshot)
        gate.set()


def test_what_is_no_message_is_refused():
    for data in (b"", b"\xc1", wire.encode(wire.Abort("x", ["a"]))[:-1], b"\x80\x04\x95"):  # the last is a pickle
        with pytest.raises(msgspec.DecodeError):
            wire.decode_to_engine(data)
