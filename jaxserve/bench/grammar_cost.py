"""`jaxserve bench grammar`: host time per step spent on the token masks of requests with a grammar.

Each next token is drawn uniformly from all that the grammar allows, as from a model with random weights. This drives a
matcher through more states, and harder ones, than meaningful text would.
"""

import statistics
import time
from collections.abc import Sequence

import numpy as np

from jaxserve.bench.report import table
from jaxserve.errors import InvalidRequest
from jaxserve.request import EngineRequest, Request
from jaxserve.sampling_params import SamplingParams, StructuredOutputs
from jaxserve.structured.grammar import make_grammar
from jaxserve.structured.matchers import Matchers
from jaxserve.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            "required": ["street", "city"],
        },
    },
    "required": ["name", "age", "tags", "address"],
}
GRAMMARS = {"json_object": StructuredOutputs(json_object=True), "schema": StructuredOutputs(json=SCHEMA)}

_WARMUP_STEPS = 5


def run(tokenizer: Tokenizer, *, grammar: str, num_requests: Sequence[int], num_steps: int, seed: int) -> str:
    """Measure the milliseconds that `Matchers.masks` takes per step for each number of requests, and return the report.

    Raises InvalidRequest.
    """
    if min(num_requests) < 1:
        raise InvalidRequest(f"--num-requests must be at least 1, got {min(num_requests)}", param="num_requests")
    rows = []
    for count in num_requests:
        times, num_masks = measure(tokenizer, grammar=grammar, num_requests=count, num_steps=num_steps, seed=seed)
        deciles = statistics.quantiles(times, n=10)
        per_mask = sum(times) / num_masks * 1e6
        rows.append([str(count), *(f"{deciles[i] * 1e3:.2f}" for i in (0, 4, 8)), f"{per_mask:.0f}"])
    head = f"masks over {tokenizer.vocab_size} tokens, grammar {grammar}, {num_steps} steps\n\n"
    return head + table(["requests", "p10 ms a step", "median ms", "p90 ms", "mean us a mask"], rows)


def measure(
    tokenizer: Tokenizer, *, grammar: str, num_requests: int, num_steps: int, seed: int
) -> tuple[list[float], int]:
    """Return the seconds of each step and the total number of masks. A text that ends is replaced by a new one."""
    rng = np.random.default_rng(seed)
    matchers = Matchers(lambda: tokenizer, vocab_size=tokenizer.vocab_size)
    text = make_grammar(GRAMMARS[grammar])
    ends = frozenset(tokenizer.eos_token_ids)
    names = iter(range(2**62))

    def begin(count: int) -> list[Request]:
        requests = [
            EngineRequest(
                request_id=(name := str(next(names))),
                group_id=name,
                prompt_token_ids=[0],
                params=SamplingParams(),
                max_tokens=2**20,
                stop_token_ids=ends,
                grammar=text,
            )
            for _ in range(count)
        ]
        for request in requests:
            matchers.start([request])
        num_ready = 0
        while num_ready < count:
            ready, failed = matchers.take_compiled(wait=True)
            for _, error in failed:
                raise error
            num_ready += len(ready)
        return [Request(request, arrival=0) for request in requests]

    try:
        requests = begin(num_requests)
        times, num_masks = [], 0
        for step in range(-_WARMUP_STEPS, num_steps):
            start = time.perf_counter()
            masks, _, broken = matchers.masks(requests, {})
            seconds = time.perf_counter() - start
            if broken:
                raise InvalidRequest(next(iter(broken.values())))
            if step >= 0:
                times.append(seconds)
                num_masks += len(requests)
            allowed = [np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")) for mask in masks[:, 0]]
            drawn = [int(rng.choice(tokens)) for tokens in allowed]
            over = [request for request, token in zip(requests, drawn, strict=True) if token in ends]
            matchers.forget([request.request_id for request in over])
            for request, token in zip(requests, drawn, strict=True):
                request.token_ids.append(token)
            requests = [request for request in requests if request not in over] + begin(len(over))
    finally:
        matchers.close()
    return times, num_masks
