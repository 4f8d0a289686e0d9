"""`jaxserve bench speculation`: what speculative decoding gains on the prompts of a workload, one request at a time or
a few at once, and that the text is the same.
"""

import dataclasses
import json
import pathlib
import time
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.bench.report import table
from jaxserve.config import EngineConfig
from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import SamplingParams

PIECE = 1000
"""Characters of a text that are a prompt: some 250 tokens."""


class _Run(NamedTuple):
    token_ids: list[list[int]]
    seconds: float
    num_steps: int
    num_drafts: int
    num_draft_tokens: int
    accepted: tuple[int, ...]
    """Drafts accepted at each position."""


def run(
    config: EngineConfig,
    *,
    workload: pathlib.Path,
    category: str | None,
    num_prompts: int,
    output_len: int,
    temperature: float,
    num_at_once: int,
    others: Sequence[str] = (),
) -> str:
    """Generate without drafts, with `speculative_config`, and with the `others` in its place; return the report.

    `workload` is a file of JSON lines with the fields `turns`, of which the first is the prompt, and `category`, as
    Spec-Bench has them, or a text (.txt), of which pieces are continued. Prompts that are too long lose their
    beginning. Raises StartupError, and InvalidRequest if the file cannot be read or has no such prompts.
    """
    if config.speculation is None:
        raise InvalidRequest("there is nothing to compare without --speculative-config", param="speculative_config")
    texts = _texts(workload, category, num_prompts)
    sizes = {"output_len": output_len, "temperature": temperature, "num_at_once": num_at_once}
    configs = [None, config.speculative_config, *others]
    runs = [_generate(dataclasses.replace(config, speculative_config=each), texts, **sizes) for each in configs]
    plain = runs[0]
    num_tokens = sum(map(len, plain.token_ids))
    rows = [
        [
            str(index),
            f"{1e3 * run.seconds / num_tokens:.2f}",
            f"{plain.seconds / run.seconds:.2f}",
            f"{run.num_steps}",
            f"{sum(run.accepted)} of {run.num_draft_tokens}",
            f"{1 + sum(run.accepted) / max(run.num_drafts, 1):.2f}",
            " ".join(f"{count / max(run.num_drafts, 1):.2f}" for count in run.accepted),
            f"{sum(a == b for a, b in zip(plain.token_ids, run.token_ids, strict=True))} of {len(texts)}",
        ]
        for index, run in enumerate(runs)
    ]
    names = ["", "ms a token", "faster", "steps", "accepted", "tokens a drafting step", "by position", "same texts"]
    return "\n".join(
        [
            f"{workload.name}, {category or 'all categories'}: {len(texts)} prompts, {num_tokens} tokens, "
            f"{num_at_once} at once",
            "",
            table(names, rows),
            "",
            *(f"{index}: {each or 'no drafts'}" for index, each in enumerate(configs)),
        ]
    )


def _texts(workload: pathlib.Path, category: str | None, count: int) -> list[str]:
    try:
        content = workload.read_text(encoding="utf-8")
        if workload.suffix == ".txt":
            stride = len(content) // count
            return [content[first : first + PIECE] for first in range(0, count * stride, max(stride, 1))]
        lines = [json.loads(line) for line in content.splitlines() if line.strip()]
        texts = [line["turns"][0] for line in lines if category in (None, line["category"])]
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise InvalidRequest(f"cannot read {workload}: {error!r}", param="workload") from error
    if not texts:
        categories = ", ".join(sorted({line["category"] for line in lines}))
        raise InvalidRequest(f"{workload} has no prompts of {category!r}; there is {categories}", param="category")
    return texts[:count]


def _generate(config: EngineConfig, texts: list[str], *, output_len: int, temperature: float, num_at_once: int) -> _Run:
    from jaxserve.llm import LLM

    with LLM(**dataclasses.asdict(config), progress=False) as llm:
        tokenizer = llm.get_tokenizer()
        longest = llm.info.max_model_len - output_len
        if longest < 1:
            raise InvalidRequest(f"output_len leaves no room for a prompt in {llm.info.max_model_len} tokens")
        prompts = [tokenizer.encode(text)[-longest:] for text in texts]
        params = SamplingParams(
            temperature=temperature, max_tokens=output_len, seed=0, ignore_eos=True, detokenize=False
        )
        llm.generate(prompts[:num_at_once], params, use_tqdm=False)  # whatever is slow the first time
        before = llm.stats()
        start = time.perf_counter()
        outputs = [
            output
            for first in range(0, len(prompts), num_at_once)
            for output in llm.generate(prompts[first : first + num_at_once], params, use_tqdm=False)
        ]
        seconds = time.perf_counter() - start
        after = llm.stats()
    accepted = zip(
        after.spec_decode_num_accepted_tokens_per_pos, before.spec_decode_num_accepted_tokens_per_pos, strict=True
    )
    return _Run(
        token_ids=[list(output.outputs[0].token_ids) for output in outputs],
        seconds=seconds,
        num_steps=after.num_steps - before.num_steps,
        num_drafts=after.spec_decode_num_drafts - before.spec_decode_num_drafts,
        num_draft_tokens=after.spec_decode_num_draft_tokens - before.spec_decode_num_draft_tokens,
        accepted=tuple(a - b for a, b in accepted),
    )
