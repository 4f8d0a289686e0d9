"""Find the engine of a model that runs in this process."""

from jaxserve.engine.engine import Engine
from jaxserve.engine.local import LocalEngineClient
from jaxserve.errors import ConfigError
from jaxserve.local_model import LocalModel


def engine_of(llm: LocalModel) -> Engine:
    """Return the engine of an LLM or AsyncLLM. Raises ConfigError if it runs in another process."""
    client = llm.client
    if not isinstance(client, LocalEngineClient):
        raise ConfigError("inspect needs an engine in this process, as LLM and AsyncLLM have one")
    return client.engine
