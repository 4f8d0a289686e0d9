"""The engine behind its client, in a thread: submit, abort, refuse, die, close, from any thread."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import pathlib
import queue
import signal
import threading
import types

import jax
import numpy as np
import pytest
from engine_harness import request, tiny_config
from waiting import PATIENCE, wait_until

from jaxserve.config import EngineConfig
from jaxserve.engine import local
from jaxserve.engine.client import EngineStats
from jaxserve.engine.local import LocalEngineClient
from jaxserve.errors import (
    CheckpointError,
    ConfigError,
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    OutOfMemory,
    QueueFull,
)
from jaxserve.execution.programs.compile import CompiledSteps
from jaxserve.execution.runner import PendingStep

CONFIG = tiny_config("llama_untied")


def start(**changes):
    """Start an engine, which the block that it is for closes."""
    return contextlib.closing(LocalEngineClient.start(dataclasses.replace(CONFIG, **changes)))


@pytest.fixture
def own_client():
    """An engine that the test may break."""
    with start() as client:
        yield client


@pytest.fixture(scope="module")
def shared_client():
    with start() as client:
        yield client


@pytest.fixture
def client(shared_client):
    """The engine of all tests that leave it whole; nothing runs in it, and no prefix is cached."""
    wait_until(shared_client.reset_prefix_cache)
    return shared_client


def collect(outputs, names):
    """Token ids by request until each of `names` has finished."""
    tokens, waiting = {name: [] for name in names}, set(names)
    while waiting:
        for output in outputs.get(timeout=PATIENCE):
            tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                waiting.discard(output.request_id)
    return tokens


@pytest.mark.slow
def test_a_profile_has_no_calls_of_python(client, tmp_path):
    """A step makes thousands of Python calls, and recording them takes longer than they do."""
    outputs = queue.SimpleQueue()
    client.start_profile(str(tmp_path))
    client.submit([request("a", [1, 2, 3], 8)], outputs.put)
    collect(outputs, ["a"])
    client.stop_profile()
    [path] = pathlib.Path(tmp_path).rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(path)).planes
    names = [event.name for plane in planes for line in plane.lines for event in line.events]
    assert names
    assert not [name for name in names if name.startswith("$")]


@pytest.mark.slow
def test_requests_from_many_threads(client):
    alone = queue.SimpleQueue()
    client.submit([request("alone", [1, 2, 3], 8)], alone.put)
    expected = collect(alone, ["alone"])["alone"]
    results = {}

    def work(index):
        mine = queue.SimpleQueue()
        names = [f"{index}-{i}" for i in range(3)]
        client.submit([request(name, [1, 2, 3], 8) for name in names], mine.put)
        results[index] = collect(mine, names)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    assert all(tokens == expected for result in results.values() for tokens in result.values())
    assert client.stats().num_steps > 0


def test_with_the_last_answer_nothing_runs_any_more(client):
    seen = queue.SimpleQueue()
    before = client.stats().preemption_counts[0]
    for number in range(20):
        client.submit([request(f"{number}", [1, 2, 3], 4)], lambda outputs: seen.put((outputs, client.stats())))
        while True:
            outputs, stats = seen.get(timeout=PATIENCE)
            if outputs[-1].finish_reason is not None:
                break
        assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.preemption_counts[0] == before + 20
    assert stats.num_free_blocks + stats.num_cached_blocks == client.info.num_blocks


def test_abort_frees_the_blocks_and_says_no_more(client):
    outputs = queue.SimpleQueue()
    client.submit([request("long", [1, 2, 3], 60), request("short", [4], 3)], outputs.put)
    client.abort(["long", "no such request"])
    assert len(collect(outputs, ["short"])["short"]) == 3
    for _ in range(20):  # its id is free at once, whether or not the engine has seen the abort
        after = queue.SimpleQueue()
        client.submit([request("long", [1, 2], 9)], after.put)
        client.abort(["long"])
        client.submit([request("long", [1, 2], 2)], after.put)
        assert len(collect(after, ["long"])["long"]) == 2
    wait_until(lambda: client.stats().kv_positions_allocated == 0)


def test_a_sink_that_raises_loses_its_own_requests_only(client, caplog):
    def broken_sink(outputs):
        raise RuntimeError("nobody is listening")

    outputs = queue.SimpleQueue()
    client.submit([request("lost", [1], 50)], broken_sink)
    client.submit([request("kept", [2], 20)], outputs.put)
    assert len(collect(outputs, ["kept"])["kept"]) == 20
    assert client.is_alive()
    assert "nobody is listening" in caplog.text
    wait_until(lambda: client.stats().num_running == 0)


def test_what_can_never_run_is_refused_at_once(client):
    with pytest.raises(ContextLengthExceeded, match=r"64.*60"):
        client.submit([request("r", [1] * 60, 5)], print)
    with pytest.raises(InvalidRequest, match="empty"):
        client.submit([request("r", [], 5)], print)
    outputs = queue.SimpleQueue()
    client.submit([request("r", [1], 2)], outputs.put)
    with pytest.raises(InvalidRequest, match="id"):
        client.submit([request("s", [1], 2), request("s", [1], 2)], print)
    collect(outputs, ["r"])


def test_queue_limit():
    with start(max_num_waiting=2) as client:
        with pytest.raises(QueueFull, match="at most 2") as refusal:
            client.submit([request(f"r{i}", [1], 2) for i in range(3)], print)
        assert refusal.value.retry_after == 1
        outputs = queue.SimpleQueue()
        client.submit([request(f"r{i}", [1], 2) for i in range(2)], outputs.put)
        collect(outputs, ["r0", "r1"])


@pytest.mark.slow
def test_how_long_a_full_queue_lasts(monkeypatch):
    """The refusal says in how many seconds as many requests will have left as are waiting, by the engine's own
    clock.
    """
    client = LocalEngineClient.start(dataclasses.replace(CONFIG, max_num_waiting=40, max_num_seqs=1))
    is_last, go_on = threading.Event(), threading.Event()
    step = client._engine.step

    def step_of_a_second():
        outputs = step()
        client._engine.seconds["total"] = client._engine.stats().num_steps
        if any(output.request_id == "last" for output in outputs):
            is_last.set()
            assert go_on.wait(PATIENCE)
        return outputs

    monkeypatch.setattr(client._engine, "step", step_of_a_second)
    try:
        outputs = queue.SimpleQueue()
        client.submit([request(f"r{i}", [i], 4) for i in range(1, 11)], lambda _: None)  # each for about 4 s
        client.submit([request("last", [11], 4)], outputs.put)
        assert is_last.wait(PATIENCE)
        waiting = [request(f"w{i}", [1], 4) for i in range(10)]
        client.submit(waiting, outputs.put)
        with pytest.raises(QueueFull, match="10 requests are waiting") as refusal:
            client.submit([request(f"x{i}", [1], 4) for i in range(31)], print)
        assert 36 <= refusal.value.retry_after <= 48
        go_on.set()
        collect(outputs, ["last", *(request.request_id for request in waiting)])
    finally:
        go_on.set()
        client.close()


@pytest.mark.slow
def test_preempted_requests_count_as_waiting(monkeypatch):
    """The limit is held against the queue as it is, and a refusal is the caller's alone."""
    client = LocalEngineClient.start(dataclasses.replace(CONFIG, max_num_waiting=2, kv_cache_memory=2**16))
    has_preempted, go_on = threading.Event(), threading.Event()
    step = client._engine.step

    def held_step():
        outputs = step()
        if client._engine.stats().num_preemptions:
            has_preempted.set()
            assert go_on.wait(PATIENCE)
        return outputs

    monkeypatch.setattr(client._engine, "step", held_step)
    try:
        outputs = queue.SimpleQueue()
        client.submit([request("a", [1], 60), request("b", [2], 60)], outputs.put)
        assert has_preempted.wait(PATIENCE)
        with pytest.raises(QueueFull, match="1 requests are waiting"):
            client.submit([request("c", [1], 2), request("d", [1], 2)], print)
        go_on.set()
        collect(outputs, ["a", "b"])
    finally:
        go_on.set()
        client.close()


def test_a_pool_smaller_than_a_request():
    with pytest.raises(OutOfMemory, match="max_model_len is 64"):
        start(kv_cache_memory=1000)


def test_reset_prefix_cache(client):
    outputs = queue.SimpleQueue()
    prompt = list(range(20))
    for name, cached in (("a", 0), ("b", 16)):
        client.submit([request(name, prompt, 2)], outputs.put)
        news = outputs.get(timeout=PATIENCE)
        assert news[0].num_cached_tokens == cached
        if news[0].finish_reason is None:
            collect(outputs, [name])
    assert client.reset_prefix_cache()
    client.submit([request("c", prompt, 2)], outputs.put)
    assert outputs.get(timeout=PATIENCE)[0].num_cached_tokens == 0


def test_a_dead_engine_has_not_reset_its_prefix_cache(own_client, monkeypatch):
    stepping, go_on = threading.Event(), threading.Event()

    def broken_step():
        stepping.set()
        assert go_on.wait(PATIENCE)
        raise RuntimeError("a bug")

    assert own_client.reset_prefix_cache()
    monkeypatch.setattr(own_client._engine, "step", broken_step)
    own_client.submit([request("r", [1], 2)], print)
    assert stepping.wait(PATIENCE)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        reset = pool.submit(own_client.reset_prefix_cache)
        wait_until(lambda: own_client._reset is not None)
        go_on.set()
        assert not reset.result(PATIENCE)


def test_death_reaches_everyone(own_client, monkeypatch):
    outputs = queue.SimpleQueue()

    def broken_schedule(*_):
        raise RuntimeError("a bug")

    own_client.submit([request("before", [1], 2)], outputs.put)
    collect(outputs, ["before"])
    monkeypatch.setattr(own_client._engine.scheduler, "schedule", broken_schedule)
    own_client.submit([request("lost", [1], 2)], outputs.put)
    (last,) = outputs.get(timeout=PATIENCE)
    assert (last.request_id, last.finish_reason) == ("lost", "error")
    assert "a bug" in last.error
    assert not own_client.is_alive()
    with pytest.raises(EngineDead, match="a bug"):
        own_client.submit([request("after", [1], 2)], outputs.put)


def test_a_close_that_is_interrupted_can_be_repeated(monkeypatch):
    client = LocalEngineClient.start(CONFIG)
    num_freed = []
    free = client._engine.close
    monkeypatch.setattr(client._engine, "close", lambda: (num_freed.append(1), free()))
    with monkeypatch.context() as waiting:
        interrupted = functools.partial(signal.default_int_handler, signal.SIGINT, None)
        waiting.setattr(client, "_ended", types.SimpleNamespace(wait=interrupted, set=client._ended.set))
        with pytest.raises(KeyboardInterrupt):
            client.close()
    assert not num_freed
    client.close()
    client.close()
    assert (num_freed, client._thread.is_alive()) == ([1], False)


def test_close_ends_what_runs():
    client = LocalEngineClient.start(CONFIG)
    outputs = queue.SimpleQueue()
    client.submit([request("long", [1], 60)], outputs.put)
    reasons = [output.finish_reason for output in outputs.get(timeout=PATIENCE)]
    client.close()
    client.close()
    while not outputs.empty():
        reasons += [output.finish_reason for output in outputs.get()]
    assert reasons[-1] in ("abort", "length")
    stats = client.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_positions_allocated) == (0, 0, 0)
    with pytest.raises(EngineDead, match="closed"):
        client.submit([request("after", [1], 2)], outputs.put)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model": "/no/such/model"}, CheckpointError, "no model"),
        ({"max_model_len": 100_000}, ConfigError, "at most 512"),
        ({"max_num_waiting": 0}, ConfigError, "at least 1"),
        (
            {"tensor_parallel_size": 64},
            ConfigError,
            "is 64, but there are 8 devices: for so many on a CPU, set JAX_NUM_CPU_DEVICES=64 in the environment",
        ),
        ({"tensor_parallel_size": 8}, ConfigError, "split evenly over 8 devices"),
    ],
)
def test_start_errors_are_one_line(options, error, message):
    with pytest.raises(error, match=message) as failure:
        start(**options)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    ("platform", "given", "timeout"), [("cpu", None, 0.0), ("gpu", None, 300.0), ("gpu", 0.0, 0.0), ("cpu", 2.5, 2.5)]
)
def test_only_a_gpu_has_a_limit_by_default(monkeypatch, platform, given, timeout):
    """On a CPU a step of a large model takes minutes, and ends."""
    devices = np.array([types.SimpleNamespace(platform=platform)])
    engine = types.SimpleNamespace(runner=types.SimpleNamespace(mesh=types.SimpleNamespace(devices=devices)))
    engine.close = lambda: None
    monkeypatch.setattr("jaxserve.engine.startup.start_engine", lambda *_, **__: (engine, None))
    limits = []
    monkeypatch.setattr(
        LocalEngineClient, "__init__", lambda *_, watchdog_timeout, **__: limits.append(watchdog_timeout)
    )
    LocalEngineClient.start(EngineConfig(watchdog_timeout=given))
    assert limits == [timeout]


@pytest.mark.parametrize("hangs", ["results", "start"])
def test_a_step_that_never_ends(hangs, monkeypatch):
    """A step that is slow to compile does not count as one."""
    monkeypatch.setattr(local, "WATCH_INTERVAL", 0.05)
    client = LocalEngineClient.start(dataclasses.replace(CONFIG, watchdog_timeout=0.5))
    outputs, is_back = queue.SimpleQueue(), threading.Event()
    client.submit([request("before", [1], 2)], outputs.put)  # nothing is compiled yet
    assert len(collect(outputs, ["before"])["before"]) == 2
    if hangs == "results":
        take = PendingStep.token_ids
        monkeypatch.setattr(PendingStep, "token_ids", lambda pending: is_back.wait(PATIENCE) and take(pending))
    else:
        find = CompiledSteps.__getitem__

        def hanging(steps, program):
            executable = find(steps, program)
            return lambda *arguments: is_back.wait(PATIENCE) and executable(*arguments)

        monkeypatch.setattr(CompiledSteps, "__getitem__", hanging)
    client.submit([request("one", [1, 2], 4), request("two", [3], 4)], outputs.put)
    assert {output.finish_reason for output in outputs.get(timeout=PATIENCE)} == {"error"}
    assert not client.is_alive()
    assert client.stats_by_engine() == {"0": EngineStats()}
    with pytest.raises(EngineDead, match=r"a step has not ended for 0\.5 s, the limit by watchdog_timeout"):
        client.submit([request("after", [1], 2)], outputs.put)
    client.close()  # waits for nothing
    is_back.set()
    client._thread.join()
    client.engine.close()
    assert outputs.empty()


def test_closing_waits_for_the_step_that_runs(own_client, monkeypatch):
    """A process that ends under it would be aborted by XLA."""
    events = []
    own_client._engine._in_flight.append(types.SimpleNamespace(token_ids=lambda: events.append("token_ids")))
    close = own_client._engine.runner.close
    monkeypatch.setattr(own_client._engine.runner, "close", lambda: (events.append("freed"), close()))
    own_client.close()
    assert events == ["token_ids", "freed"]


@pytest.mark.slow
def test_a_snapshot_shows_who_runs_and_what_for(own_client, monkeypatch):
    step, is_wanted = own_client._engine.step, threading.Event()

    def held_step():
        outputs = step()
        wait_until(lambda: is_wanted.is_set() or bool(own_client._snapshots))
        is_wanted.set()
        return outputs

    monkeypatch.setattr(own_client._engine, "step", held_step)
    idle = own_client.snapshot()  # the engine sleeps: the snapshot wakes it
    assert idle.running == idle.waiting == []
    assert idle.blocks == [0, own_client.info.num_blocks]
    outputs = queue.SimpleQueue()
    own_client.submit([request(str(name), [1, 2, 3, 4, 5], 50) for name in range(6)], outputs.put)
    snapshot = own_client.snapshot()
    assert len(snapshot.running) + len(snapshot.waiting) == 6
    assert len(snapshot.waiting) >= 2  # four slots
    assert sum(snapshot.blocks[1::2]) == own_client.info.num_blocks
    collect(outputs, [str(name) for name in range(6)])
    assert own_client.snapshot().num_output_tokens == 300


def test_snapshots_end_with_the_engine(client):
    client.close()
    with pytest.raises(EngineDead):
        client.snapshot()


def test_a_snapshot_that_is_waited_for_ends_with_the_engine(own_client, monkeypatch):
    def fail(**_):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(own_client._engine.scheduler, "snapshot", fail)
    with pytest.raises(EngineDead, match="the device is gone"):
        own_client.snapshot()
    assert not own_client.is_alive()
