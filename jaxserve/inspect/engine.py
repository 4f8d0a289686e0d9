"""Find the engine of a model that runs in this process, and see its plans."""

import contextlib
import time
from collections.abc import Callable, Iterator

from jaxserve.engine.engine import Engine
from jaxserve.engine.local import LocalEngineClient
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.local_model import LocalModel
from jaxserve.scheduling.plan import StepPlan


def engine_of(llm: LocalModel) -> Engine:
    """Return the engine of an LLM or AsyncLLM. Raises ConfigError if it runs in another process, EngineDead if it is
    closed or has failed, and InvalidRequest for anything else.
    """
    if not isinstance(llm, LocalModel):
        raise InvalidRequest(f"llm must be an LLM or AsyncLLM, got {llm!r:.100}", param="llm")
    client = llm.client
    if not isinstance(client, LocalEngineClient):
        raise ConfigError("inspect needs an engine in this process, as LLM and AsyncLLM have one")
    client.raise_if_dead()
    return client.engine


def wait_until_warm(llm: LocalModel) -> None:
    """Wait until nothing is compiled in the background: whatever is measured meanwhile takes longer. Raises what
    `engine_of` raises.
    """
    runner = engine_of(llm).runner
    runner.wait_for_background()
    while runner.can_advance_warm_up and llm.client.is_alive():
        time.sleep(0.01)


@contextlib.contextmanager
def plans_passed_to(see: Callable[[StepPlan], object], engine: Engine) -> Iterator[None]:
    """Let the engine's thread call `see` with each plan in a block. Raises ConfigError inside of another such block."""
    if engine.on_plan is not None:
        raise ConfigError("a recording of this engine has not ended, and only one runs at a time")
    engine.on_plan = see
    try:
        yield
    finally:
        engine.on_plan = None
