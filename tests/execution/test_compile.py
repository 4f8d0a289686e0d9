"""After warm-up nothing is compiled: neither by the table of steps, nor implicitly."""

import concurrent.futures
import contextlib
import os
import random
import threading
import time

import jax
import numpy as np
import pytest
from engine_harness import tiny_config
from waiting import PATIENCE, wait_until

from jaxserve.cpus import BACKGROUND_NICENESS
from jaxserve.engine.startup import start_engine
from jaxserve.errors import ConfigError
from jaxserve.execution.programs import compile as compile_module
from jaxserve.execution.programs.compile import CompiledSteps, enable_persistent_cache
from jaxserve.execution.programs.mosaic import MosaicKernel
from jaxserve.request import EngineRequest
from jaxserve.sampling_params import SamplingParams

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def counted_compiles():
    """Count every XLA compilation of the process."""
    events = []

    def listen(event, duration, **_):
        if event == COMPILE_EVENT:
            events.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_the_counter_counts():
    with counted_compiles() as events:
        jax.jit(lambda x: x * 17 + 4)(np.float32(2)).block_until_ready()
    assert events


@pytest.mark.slow
def test_no_compile_after_warm_up():
    """Every kind of request, in batches of every size, with preemption and prefix hits."""
    config = tiny_config(
        "llama_untied", kv_cache_memory=24 * 4 * 4 * 12 * 2 * 2 * 4, warmup="full", compilation_cache_dir=""
    )
    engine, info = start_engine(config, mesh=None, progress=False)
    assert info.num_blocks == 24
    num_compiles = engine.stats().num_compiles
    assert num_compiles == len(engine.runner.builder.shapes.programs)
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1),
        SamplingParams(temperature=0.0, logprobs=3, prompt_logprobs=2),
        SamplingParams(top_n_sigma=1.0, logit_bias={3: 2.0}, allowed_token_ids=list(range(50)), min_tokens=2),
    ]
    random = np.random.default_rng(0)
    with counted_compiles() as events:
        for size in range(1, 7):
            for round_ in range(len(kinds)):
                engine.add(
                    [
                        EngineRequest(
                            request_id=f"{size}-{round_}-{i}",
                            group_id=f"{size}-{round_}",
                            prompt_token_ids=random.integers(0, 100, int(random.integers(1, 30))).tolist(),
                            params=kinds[(round_ + i) % len(kinds)],
                            max_tokens=int(random.integers(1, 30)),
                            bad_word_ids=((3, 4),) if i % 2 else (),
                        )
                        for i in range(size)
                    ]
                )
                while engine.has_work:
                    engine.step()
    assert events == []
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.num_compiles, stats.num_recompiles_after_warmup) == (num_compiles, 0)


def test_a_shape_that_was_not_warmed_up_is_counted():
    def lower(size):
        return jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((size,), np.float32))

    steps = CompiledSteps(lower)
    steps.warm_up([1, 2], progress=False)
    assert (steps.num_compiles, steps.num_recompiles_after_warmup) == (2, 0)
    assert steps[3](np.zeros(3, np.float32)).tolist() == [1, 1, 1]
    assert steps[3](np.zeros(3, np.float32)).tolist() == [1, 1, 1]
    assert (steps.num_compiles, steps.num_recompiles_after_warmup) == (3, 1)
    with pytest.raises(TypeError):  # never a silent recompile
        steps[1](np.zeros(2, np.float32))


def test_each_program_has_compiler_options_of_its_own(monkeypatch):
    program = jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((), np.float32))
    compiled, options = program.compile(), []
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda _, given: options.append(given) or compiled)
    steps = CompiledSteps(lambda size: program, compiler_options=lambda size: {"size": size})
    steps.warm_up([1, 2], progress=False)
    assert sorted(given["size"] for given in options) == [1, 2]


def test_kernels_are_compiled_once_and_before_the_programs_that_call_them(monkeypatch):
    """Kernels also come before the programs without kernels that are lowered later."""
    events = []
    kernels = {name: MosaicKernel(name.encode(), b"", False, False, False) for name in "abc"}
    called = {1: "", 2: "ab", 3: "bc", 4: ""}
    programs = {size: jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((size,), np.float32)) for size in called}
    is_begun, is_all_lowered = threading.Event(), threading.Event()
    submit, wait = concurrent.futures.ThreadPoolExecutor.submit, compile_module._wait

    def lower(size):
        if size == 4:  # in the middle of the kernels
            assert is_begun.wait(PATIENCE)
        return programs[size]

    def compile_kernel(kernel, mesh):
        is_begun.set()
        assert is_all_lowered.wait(PATIENCE)
        events.append(kernel.kernel_hash.decode())

    def tell_and_submit(pool, function, *arguments):
        if function == steps._compile:
            events.append(arguments[0])
        return submit(pool, function, *arguments)

    def tell_and_wait(futures):
        is_all_lowered.set()
        wait(futures)

    monkeypatch.setattr(compile_module, "compile_kernel", compile_kernel)
    monkeypatch.setattr(compile_module, "_wait", tell_and_wait)
    monkeypatch.setattr(concurrent.futures.ThreadPoolExecutor, "submit", tell_and_submit)
    steps = CompiledSteps(lower)
    seconds = steps.warm_up(
        called,
        kernels_of=lambda lowered: {
            kernels[x] for size, x_s in called.items() if programs[size] is lowered for x in x_s
        },
        mesh=jax.make_mesh((1,), ("x",), devices=jax.devices()[:1]),
        progress=False,
    )
    assert sorted(map(str, events)) == ["1", "2", "3", "4", "a", "b", "c"]
    assert max(map(events.index, "abc")) < min(map(events.index, [2, 3, 4]))
    assert all(size in steps for size in called)
    assert 0 <= seconds.lowered_after <= seconds.kernels_after <= seconds.compiled_after
    steps.clear()
    assert 1 not in steps


def test_a_kernel_that_does_not_compile_stops_the_warm_up(monkeypatch):
    def fail(kernel, mesh):
        raise RuntimeError("this kernel does not compile")

    monkeypatch.setattr("jaxserve.execution.programs.compile.compile_kernel", fail)
    steps = CompiledSteps(lambda size: jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((size,), np.float32)))
    mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[:1])
    with pytest.raises(RuntimeError, match="this kernel"):
        steps.warm_up(
            [1], kernels_of=lambda _: {MosaicKernel(b"", b"", False, False, False)}, mesh=mesh, progress=False
        )
    assert 1 not in steps


def test_programs_in_the_cache_do_not_wait_for_those_that_compile_in_the_background(monkeypatch):
    numbers = {"new": random.random(), "cached": 17.0}

    def lower(name):
        return jax.jit(lambda x: x + numbers[name]).lower(jax.ShapeDtypeStruct((), np.float32))

    CompiledSteps(lower).warm_up(["cached"], progress=False)
    niceness, is_loaded, compile_now = {}, threading.Event(), CompiledSteps._compile

    def compile_late(steps, name, *arguments):
        assert is_loaded.wait(PATIENCE)
        return compile_now(steps, name, *arguments)

    def see(name):
        niceness[name] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        if name == "cached":
            is_loaded.set()

    monkeypatch.setattr(CompiledSteps, "_compile", compile_late)
    steps = CompiledSteps(lower)
    steps.warm_up(["new", "cached"], is_background=True, on_compiled=see, progress=False)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert niceness == {"cached": own, "new": max(own, BACKGROUND_NICENESS)}
    for name, number in numbers.items():
        assert steps[name](np.float32(1)) == np.float32(1) + np.float32(number)
    assert steps.num_compiles == 2


def test_a_cache_that_cannot_be_made(tmp_path, monkeypatch, caplog):
    """A directory that was named is an error of one line; without the default directory there is no cache."""
    (tmp_path / ".cache").write_text("a file, not a directory")
    before = jax.config.jax_compilation_cache_dir
    with pytest.raises(ConfigError, match=r"compilation_cache_dir: .*\.cache"):
        enable_persistent_cache(str(tmp_path / ".cache" / "xla"))
    monkeypatch.setenv("HOME", str(tmp_path))
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        enable_persistent_cache(None)
        assert jax.config.jax_compilation_cache_dir is None
        assert str(tmp_path) in caplog.text
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_failing_shape_stops_the_warm_up(monkeypatch):
    begun, has_stopped = [], threading.Event()
    shutdown = concurrent.futures.ThreadPoolExecutor.shutdown

    def watched(pool, **options):
        shutdown(pool, **options)
        has_stopped.set()

    def lower(size):
        begun.append(size)
        if size == 0:
            raise KeyboardInterrupt
        assert has_stopped.wait(PATIENCE)
        return jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((size,), np.float32))

    monkeypatch.setattr(concurrent.futures.ThreadPoolExecutor, "shutdown", watched)
    with pytest.raises(KeyboardInterrupt):
        CompiledSteps(lower).warm_up(range(200), progress=False)
    assert len(begun) < 100


def test_threads_at_work_are_not_joined_when_a_warm_up_is_interrupted(monkeypatch):
    """Interrupted again, as in a notebook, Python would take them for ended and its process end below XLA."""
    threads, has_begun, may_end = [], threading.Event(), threading.Event()

    def lower(_):
        threads.append(threading.current_thread())
        has_begun.set()
        assert may_end.wait(PATIENCE)

    def interrupt(*_):
        assert has_begun.wait(PATIENCE)
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(compile_module, "_as_completed", interrupt)
        interrupted.setattr(concurrent.futures, "wait", interrupt)
        interrupted.setattr(threading.Thread, "join", lambda *_: pytest.fail("a thread at work is joined"))
        with pytest.raises(KeyboardInterrupt):
            CompiledSteps(lower).warm_up([1], progress=False)
    may_end.set()
    (thread,) = threads
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_warm_up_that_is_stopped_waits_for_no_program_that_has_not_begun(monkeypatch):
    monkeypatch.setattr(compile_module, "num_usable_cpus", lambda: 1)
    compiling, may_end = threading.Event(), threading.Event()

    def compile_late(lowered, *options):
        compiling.set()
        assert may_end.wait(PATIENCE)
        return compile_now(lowered, *options)

    compile_now = jax.stages.Lowered.compile
    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_late)
    steps = CompiledSteps(lambda size: jax.jit(lambda x: x + 1).lower(jax.ShapeDtypeStruct((size,), np.float32)))
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        warm_up = executor.submit(steps.warm_up, range(1, 4), progress=False)
        assert compiling.wait(PATIENCE)
        wait_until(lambda: steps._pools[-1]._work_queue.qsize() == 2)
        steps.stop()
        may_end.set()
        with pytest.raises(concurrent.futures.CancelledError):
            warm_up.result(PATIENCE)
    assert len(steps.items()) == 1


def test_a_cache_in_a_store_of_objects_is_no_place_here():
    before = jax.config.jax_compilation_cache_dir
    try:
        jax.config.update("jax_compilation_cache_dir", "gs://bucket/xla")
        assert enable_persistent_cache(None) is None
        assert jax.config.jax_compilation_cache_dir == "gs://bucket/xla"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


def test_a_cache_of_the_process_is_left_alone(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    enable_persistent_cache("")
    assert jax.config.jax_compilation_cache_dir == before
    try:
        jax.config.update("jax_compilation_cache_dir", str(tmp_path))
        assert enable_persistent_cache(None) == tmp_path
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        enable_persistent_cache(str(tmp_path / "other"))
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "other")
    finally:
        jax.config.update("jax_compilation_cache_dir", before)


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_thread_that_was_being_started_when_an_interrupt_came_is_waited_for(monkeypatch, has_begun):
    """The thread may be running although the pool that started it has not recorded it yet; or it has not begun."""
    began, ended = threading.Event(), threading.Event()

    def lower(_):
        began.set()
        ended.wait(0.2)  # for nothing
        ended.set()

    def is_ours(thread):
        return thread.name.startswith("jaxserve-warm-up-")

    start, bootstrap = threading.Thread.start, threading.Thread._bootstrap

    def start_and_be_interrupted(thread):
        def interrupt(timeout=None):
            if has_begun:
                assert began.wait(PATIENCE)
            raise KeyboardInterrupt

        if is_ours(thread):
            monkeypatch.setattr(thread._started, "wait", interrupt)
        start(thread)

    def begin(thread):
        if is_ours(thread) and not has_begun:
            time.sleep(0.2)
        bootstrap(thread)

    monkeypatch.setattr(threading.Thread, "start", start_and_be_interrupted)
    monkeypatch.setattr(threading.Thread, "_bootstrap", begin)
    with pytest.raises(KeyboardInterrupt):
        CompiledSteps(lower).warm_up(["a"], progress=False)
    assert not any(map(is_ours, threading.enumerate()))
    assert ended.is_set() == began.is_set()  # one that begins late may find its work cancelled
