"""Look into a running engine: for notebooks, and for whoever wants to know where the bytes and the time of a step go.

    from jaxserve import LLM, inspect

    llm = LLM("scribe-2m", tensor_parallel_size=2)
    inspect.weights(llm)            # where each weight lives
    inspect.kv_cache(llm)           # and the KV cache
    inspect.step(llm, rows=8)       # the programs of a step: kernels, collectives, memory, roofline
    with inspect.timeline(llm) as timeline:
        llm.generate(["Once upon a time", "The end"])
    timeline                        # what each step computed, as a figure
    inspect.bubble(llm, rows=8)     # how long the stages of `pipeline_parallel_size` wait

Each result is plain data with a text form and, in a notebook, a table or a picture.
"""

from jaxserve.inspect.arrays import ArrayGroup, Arrays, kv_cache, weights
from jaxserve.inspect.bubble import Bubble, bubble
from jaxserve.inspect.collectives import Collective, find_collectives
from jaxserve.inspect.picture import Picture
from jaxserve.inspect.roofline import Roofline, Speed
from jaxserve.inspect.step import ProgramReport, StepReport, step
from jaxserve.inspect.timeline import Timeline, TimelineRow, TimelineStep, timeline

__all__ = [
    "ArrayGroup",
    "Arrays",
    "Bubble",
    "Collective",
    "Picture",
    "ProgramReport",
    "Roofline",
    "Speed",
    "StepReport",
    "Timeline",
    "TimelineRow",
    "TimelineStep",
    "bubble",
    "find_collectives",
    "kv_cache",
    "step",
    "timeline",
    "weights",
]
