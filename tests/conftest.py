"""Before any test: 8 CPU devices, strict promotion, and every annotated function checked at call time in CI, but for
slow tests.
"""

import asyncio
import collections
import contextlib
import gc
import inspect
import logging
import os
import pathlib
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# jax looks for plugins once, when it is first asked for devices: pallas_kernels.deviceless would come too late.
sys.path.append(str(pathlib.Path(sys.prefix) / "deviceless"))

from type_checks import check_types, unchecked

if os.environ.get("CHECK_TYPES") != "0":
    check_types(["jaxserve", "pallas_kernels"])

import jax
import pytest
from few_sizes import few_sizes
from hypothesis import settings

from pallas_kernels.jax_internals import ask_ptxas_once
from pallas_kernels.layout_inference import infer_layouts_faster

if os.environ["JAX_PLATFORMS"] == "cpu":
    # A test's program takes longer to compile than to run: XLA's older emitters for CPUs compile it in half the time,
    # and LLVM need not optimize it much. In parts, for several threads, it would take a fifth more processor time.
    # In this process only, which reads its flags once; what tests start compiles as a user's process does.
    flags = os.environ["XLA_FLAGS"]
    os.environ["XLA_FLAGS"] = (
        f"{flags} --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_backend_optimization_level=1"
        " --xla_cpu_parallel_codegen_split_count=1"
    )
    jax.devices()
    os.environ["XLA_FLAGS"] = flags

COMPILED = pathlib.Path(__file__).parents[1] / ".pytest_cache" / "xla"
"""Folder of compiled programs."""

MAX_AGE = 14 * 24 * 3600
"""Seconds after which a compiled program that no run has read is deleted."""

# As in the processes that lower an engine's steps.
ask_ptxas_once()
infer_layouts_faster()

# Compilers make and drop many objects: looking for cycles among them as often as Python does takes 5% of the time.
gc.set_threshold(50_000, 20, 50)

# The same examples in every run, so that a commit is judged by its changes; `pytest --hypothesis-profile explore` draws
# new ones.
settings.register_profile("repeat", derandomize=True, deadline=None)
settings.register_profile("quick", derandomize=True, deadline=None)  # of which `depths.examples` makes fewer
settings.register_profile("explore", deadline=None)
settings.load_profile("repeat")

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
# What several tests or runs compile is compiled once, however little time that takes. A program's key is a hash of what
# XLA is given: a change of code that changes the program is never hidden.
jax.config.update("jax_compilation_cache_dir", str(COMPILED))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


MAX_MAPS = 10_000
"""Memory maps of a process. Linux grants it 65,530, a compiled function takes three, and with none left XLA crashes:
more than these are given back after a file, twice as many after a slow test.
"""

COMPILE_FOR_LONGER = {
    *("bench", "engine", "extensions", "inspect", "layers"),
    *("models", "pallas_kernels", "speculative", "structured"),
}
"""Folders whose tests compile for longer than they run; of `engine` all but test_recall."""


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Look for no cycles while modules are imported and tests collected, nor later among what is there by then."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Sort the files: those whose tests have a time limit of their own first, then those with most slow tests, then
    those with most tests. With several processes, each of which takes the next file, none is left alone with a long
    one in the end.
    """
    longest = {item.path for item in items if item.get_closest_marker("timeout")}
    num_slow = collections.Counter(item.path for item in items if item.get_closest_marker("slow"))
    num_tests = collections.Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in longest, -num_slow[item.path], -num_tests[item.path]))


def pytest_sessionfinish(session):
    """Delete the compiled programs that are no longer used, in the process that starts the others if there are any."""
    if hasattr(session.config, "workerinput") or not COMPILED.exists():
        return
    for file in COMPILED.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another run deletes it, too
            if file.is_file() and time.time() - file.stat().st_atime > MAX_AGE:
                file.unlink()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Check no types in slow tests: they are further cases of what quick ones call, and checks cost a seventh of their
    time.
    """
    is_checked = item.get_closest_marker("slow") is None or item.path.stem == "test_type_checks"
    with contextlib.nullcontext() if is_checked else unchecked():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


@pytest.fixture(scope="module", autouse=True)
def _quick_to_compile(request):
    """Turn LLVM's optimizations off on a CPU where there are many programs that run only a few times; elsewhere
    programs would run for longer than that saves.
    """
    is_quick = request.path.parent.name in COMPILE_FOR_LONGER and request.path.stem != "test_recall"
    jax.config.update("jax_disable_most_optimizations", is_quick and jax.default_backend() == "cpu")
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session", autouse=True)
def _few_sizes():
    with few_sizes():
        yield


@pytest.fixture(scope="module", autouse=True)
def _room_for_the_next_file():
    yield
    _drop_compiled_functions(MAX_MAPS)


@pytest.fixture(autouse=True)
def _room_for_the_next_slow_test(request):
    yield
    if request.node.get_closest_marker("slow"):
        _drop_compiled_functions(2 * MAX_MAPS)


def _drop_compiled_functions(max_maps):
    """Let jax drop its compiled functions if they take more memory maps than `max_maps`."""
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > max_maps:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(autouse=True)
def _logs_as_before():
    """Restore the logging configuration after each test: a command that runs in a test changes it for the whole
    process.
    """
    root, ours = logging.getLogger(), logging.getLogger("jaxserve")
    handlers, level = root.handlers, ours.level
    yield
    root.handlers = handlers
    ours.setLevel(level)


@pytest.fixture(scope="session")
def test_data():
    """The folder of shared test data (models, tokenizers, workloads); tests that need it are skipped if it is
    absent.
    """
    path = pathlib.Path(os.environ.get("JAXSERVE_TEST_DATA", "../shared"))
    if not path.is_dir():
        pytest.skip(f"no shared test data at {path}: set JAXSERVE_TEST_DATA")
    return path.resolve()
