"""`jaxserve bench bits-per-byte`: how well a model predicts a text, measured by the engine's prompt log
probabilities.
"""

import dataclasses
import lzma
import math
import pathlib
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.bench.report import table
from jaxserve.config import EngineConfig, Quantization
from jaxserve.errors import InvalidRequest
from jaxserve.request import SamplingParams


class _Costs(NamedTuple):
    """What the tokens of a text cost a model."""

    bits: list[float]
    """Bits of each run of the text."""
    num_tokens: int
    num_free: int
    """Tokens that cost nothing, because nothing stands before them."""


def run(config: EngineConfig, *, text_path: pathlib.Path, quantizations: Sequence[Quantization] = ()) -> str:
    """Measure how many bits per byte the model needs for the text, and return the report.

    The text is cut into runs that fill the context, each prefixed with the tokenizer's BOS token. Bits are divided by
    the bytes of the text rather than its tokens, so that models with different tokenizers can be compared; the report
    also shows `xz -9` on the same bytes. Without a BOS token the first token of each run costs nothing, and the report
    says so. For each of `quantizations` the model is loaded again with its matrices rounded; its row has the difference
    from the model as it is, with the standard error of that over the runs of the text, of which there are pairs.

    Raises StartupError, and InvalidRequest if the text cannot be read or is empty.
    """
    try:
        text = text_path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {text_path}: {error}", param="text") from error
    num_bytes = len(text.encode())
    if num_bytes == 0:
        raise InvalidRequest(f"{text_path} is empty", param="text")
    plain = _costs(config, text)
    title = f"{text_path.name}: {num_bytes} bytes, {plain.num_tokens} tokens in {len(plain.bits)} runs"
    if plain.num_free:
        title += f"; no BOS, so {plain.num_free} tokens cost nothing"
    rows = [[config.model or "built-in model", f"{sum(plain.bits) / num_bytes:.3f}"]]
    for name in quantizations:
        costs = _costs(dataclasses.replace(config, quantization=name), text)
        rows.append([f"  in {name}", f"{sum(costs.bits) / num_bytes:.3f}", _paired(plain, costs, num_bytes)])
    rows.append(["xz -9", f"{8 * len(lzma.compress(text.encode(), preset=9)) / num_bytes:.3f}"])
    header = ["", "bits a byte", *(["difference"] if quantizations else [])]
    return f"{title}\n\n" + table(header, [row + [""] * (len(header) - len(row)) for row in rows])


def _costs(config: EngineConfig, text: str) -> _Costs:
    """Load the model and let it predict the text."""
    from jaxserve.llm import LLM

    with LLM(**dataclasses.asdict(config)) as llm:
        tokenizer = llm.get_tokenizer()
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        length = llm.info.max_model_len - 1 - len(bos)  # every request generates a token
        runs = [token_ids[start : start + length] for start in range(0, len(token_ids), length)]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = llm.generate([bos + run for run in runs], params)
    bits = []
    for output in outputs:
        entries = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
        # The first token of a prompt has no past.
        bits.append(sum(-entry[token].logprob / math.log(2) for token, entry in entries if entry is not None))
    return _Costs(bits, len(token_ids), 0 if bos else len(runs))


def _paired(plain: _Costs, costs: _Costs, num_bytes: int) -> str:
    """Describe a difference in bits per byte, with its standard error if there are several runs to compute it from."""
    differences = [bits - other for bits, other in zip(costs.bits, plain.bits, strict=True)]
    mean = f"{sum(differences) / num_bytes:+.4f}"
    if len(differences) < 2:
        return mean
    error = math.sqrt(len(differences)) * statistics.stdev(differences) / num_bytes
    return f"{mean} +- {error:.4f}"
