"""jaxserve: LLM serving on JAX. `generate`, `LLM` and `SamplingParams` are all that most programs need.

Importing this package is cheap: jax is imported on first use.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "AsyncLLM": "jaxserve.async_llm",
    "LLM": "jaxserve.llm",
    "generate": "jaxserve.llm",
    "BeamSearchParams": "jaxserve.sampling_params",
    "SamplingParams": "jaxserve.sampling_params",
    "StructuredOutputs": "jaxserve.sampling_params",
    "RequestOutput": "jaxserve.request",
    "CompletionOutput": "jaxserve.request",
}
__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchParams",
    "CompletionOutput",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "generate",
]

if TYPE_CHECKING:
    from jaxserve.async_llm import AsyncLLM
    from jaxserve.llm import LLM, generate
    from jaxserve.request import CompletionOutput, RequestOutput
    from jaxserve.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputs


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _EXPORTS:
        raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
