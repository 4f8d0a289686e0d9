"""Strangers' grammars cost nobody else anything: the processes that compile them, and who waits."""

import concurrent.futures
import json
import os
import signal
import threading

import pytest
from hostile_grammars import SLOW
from waiting import PATIENCE, wait_until

from jaxserve.errors import InvalidRequest, JaxserveError, QueueFull
from jaxserve.sampling_params import StructuredOutputs
from jaxserve.structured import pool as pools
from jaxserve.structured.grammar import JsonOptions
from jaxserve.structured.pool import GrammarPool

SMALL = StructuredOutputs(json={"type": "integer"})


@pytest.fixture
def pool():
    pool = GrammarPool()
    yield pool
    pool.close()


def large(number):
    """Return a schema of thousands of names, all different."""
    names = {f"{number}_{index}": {"type": "null"} for index in range(4000)}
    return StructuredOutputs(json={"type": "object", "properties": names})


def children(pool):
    return [lane._process._popen.pid for lane in pool._lanes]


def test_what_comes_back_is_what_was_asked_for(pool):
    text = pool.answer(SMALL).result(PATIENCE)
    assert json.loads(text)["grammars"][0]["json_schema"]["type"] == "integer"
    schemas = [("a", {"type": "object", "properties": {}}, True), ("b", {}, False)]
    made = json.loads(pool.arguments(schemas, options=JsonOptions(is_closed=False)).result(PATIENCE))
    assert [schema["type"] for schema in made] == ["object", "object"]
    assert "additionalProperties" not in made[0]


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"json": {"not": {"minLength": 3}}}, "structured_outputs.json"),
        ({"json": '{"const": "\ud800"}'}, "structured_outputs.json"),
        ({"regex": "\ud800"}, "structured_outputs.regex"),
        ({"choice": ["a", "\udfff"]}, "structured_outputs.choice"),
        ({"grammar": 'start: "\ud800"'}, "structured_outputs.grammar"),
        ({"regex": "(a"}, "structured_outputs.regex"),
    ],
)
def test_refusals_name_the_field(pool, wish, param):
    for _ in range(2):  # the second one from memory
        with pytest.raises(InvalidRequest) as caught:
            pool.answer(StructuredOutputs(**wish)).result(PATIENCE)
        assert caught.value.param == param


def test_what_is_known_costs_nothing(pool):
    text = pool.answer(SMALL).result(PATIENCE)
    pool.close()
    assert pool.answer(SMALL).result(0) == text
    assert pool._lanes is None


def test_what_is_left_out_of_a_schema_that_is_not_strict_is_named_once(pool, caplog):
    for size in (2, 3):
        unique = {"type": "array", "uniqueItems": True, "maxItems": size}
        constraint = StructuredOutputs(json=unique)
        with pytest.raises(InvalidRequest, match="uniqueItems"):
            pool.answer(constraint).result(PATIENCE)
        assert pool.answer(constraint, is_strict=False).result(PATIENCE)
        parameters = {"type": "object", "properties": {"a": unique}}
        made = pool.arguments([("a", parameters, False), ("b", {}, True)], options=JsonOptions()).result(PATIENCE)
        assert json.loads(made)[0]["properties"] == {"a": {"type": "array", "maxItems": size}}
        with pytest.raises(InvalidRequest, match="uniqueItems") as caught:
            pool.arguments([("a", {}, False), ("b", parameters, True)], options=JsonOptions()).result(PATIENCE)
        assert caught.value.param == "b"
    (record,) = [record for record in caplog.records if "uniqueItems" in record.getMessage()]
    assert record.levelname == "WARNING"


def test_a_grammar_that_crashes_the_compiler_is_refused_and_the_next_one_is_not(pool, caplog):
    pool.start()
    pid = children(pool)[1]
    future = pool.answer(SLOW)
    wait_until(lambda: not pool._lanes[1]._queue)
    os.kill(pid, signal.SIGSEGV)
    with pytest.raises(InvalidRequest, match="too large or too deep") as caught:
        future.result(PATIENCE)
    assert caught.value.param == "structured_outputs.grammar"
    assert "SIGSEGV" in caplog.text
    assert pool.answer(large(0)).result(PATIENCE)
    assert children(pool)[1] != pid
    with pytest.raises(InvalidRequest, match="too large"):
        pool.answer(SLOW).result(0)  # it is not tried again


def test_a_process_that_cannot_be_started_again_fails_only_what_waits_for_it(pool, monkeypatch):
    monkeypatch.setattr(pools, "SMALL_BYTES", 0)

    def fail():
        raise OSError("too many open files")

    pool.start()
    with monkeypatch.context() as patch:
        patch.setattr(pools._Process, "_start", staticmethod(fail))
        os.kill(children(pool)[1], signal.SIGKILL)
        for error, number in ((InvalidRequest, 0), (JaxserveError, 1)):
            with pytest.raises(error):
                pool.answer(StructuredOutputs(json={"type": "integer", "maximum": number})).result(PATIENCE)
    assert pool.answer(SMALL).result(PATIENCE)


@pytest.mark.parametrize("reads", [True, False])
def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_not(monkeypatch, reads):
    monkeypatch.setattr(pools, "JOB_SECONDS", 0.3)
    monkeypatch.setattr(pools, "SMALL_SECONDS", PATIENCE)
    pool = GrammarPool()
    pool.start()
    if not reads:
        os.kill(children(pool)[1], signal.SIGSTOP)
    with pytest.raises(InvalidRequest, match="too long") as caught:
        pool.answer(SLOW if reads else large(0)).result(PATIENCE)
    assert caught.value.param == f"structured_outputs.{'grammar' if reads else 'json'}"
    assert pool.answer(SMALL).result(PATIENCE)
    pool.close()


@pytest.mark.slow
def test_a_small_grammar_that_is_slow_makes_way(monkeypatch):
    """It starts again where the large ones are compiled, and is compiled."""
    monkeypatch.setattr(pools, "JOB_SECONDS", PATIENCE)
    monkeypatch.setattr(pools, "SMALL_SECONDS", 0.05)
    monkeypatch.setattr(pools, "SMALL_BYTES", 2**20)
    pool = GrammarPool()
    pool.start()
    slow = pool.answer(large(0))
    assert slow.result(PATIENCE)
    pool.close()


@pytest.mark.slow
def test_a_small_grammar_does_not_wait_behind_large_ones(pool, monkeypatch):
    monkeypatch.setattr(pools, "JOB_SECONDS", 4 * PATIENCE)
    monkeypatch.setattr(pools, "SMALL_SECONDS", 4 * PATIENCE)
    large_ones = [pool.answer(SLOW), pool.answer(large(0))]
    assert pool.answer(SMALL).result(PATIENCE)
    assert not any(future.done() for future in large_ones)


@pytest.mark.slow
def test_more_than_may_wait_are_refused(pool, monkeypatch):
    monkeypatch.setattr(pools, "MAX_QUEUED", 2)
    futures = [pool.answer(SLOW)]
    wait_until(lambda: not pool._lanes[1]._queue)
    futures += [pool.answer(large(number)) for number in range(2)]
    with pytest.raises(QueueFull):
        pool.answer(large(2))
    assert all(future.cancel() for future in futures)
    os.kill(children(pool)[1], signal.SIGKILL)
    assert pool.answer(large(3)).result(PATIENCE), "what nobody waits for is not compiled"


def test_a_grammar_that_nobody_waits_for_any_more_is_given_up(monkeypatch):
    monkeypatch.setattr(pools, "JOB_SECONDS", 4 * PATIENCE)
    monkeypatch.setattr(pools, "SMALL_BYTES", 0)  # all in one queue
    pool = GrammarPool()
    slow = pool.answer(SLOW)
    wait_until(lambda: not pool._lanes[1]._queue)
    assert slow.cancel()
    assert pool.answer(SMALL).result(PATIENCE)
    pool.close()


def test_closing_ends_the_processes_and_what_waits(pool):
    pool.start()
    pids = children(pool)
    futures = [pool.answer(SLOW), pool.answer(large(0))]
    pool.close()
    for future in futures:
        with pytest.raises(JaxserveError):
            future.result(PATIENCE)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert pool.answer(SMALL).result(PATIENCE), "a later one starts them again"


def test_from_many_threads(pool):
    wishes = [StructuredOutputs(json={"type": "integer", "minimum": number % 5}) for number in range(40)]
    before = threading.active_count()
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda wish: pool.answer(wish).result(PATIENCE), wishes))
    assert len(set(texts)) == 5
    assert threading.active_count() <= before + 2, "a thread for each of the two processes"


def test_grammars_start_no_processes_once_these_are_up(pool, monkeypatch):
    monkeypatch.setattr(pools, "SMALL_SECONDS", PATIENCE)  # on a busy machine, too
    pool.start()
    pids = children(pool)
    for number in range(10):
        pool.answer(StructuredOutputs(json={"type": "integer", "maximum": number})).result(PATIENCE)
    assert children(pool) == pids
