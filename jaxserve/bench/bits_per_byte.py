"""`jaxserve bench bits-per-byte`: how well a model predicts a text, measured by the engine's prompt log
probabilities.
"""

import dataclasses
import lzma
import math
import pathlib
import statistics
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from jaxserve.bench.report import table
from jaxserve.config import EngineConfig, KVCacheDType, Quantization
from jaxserve.errors import InvalidRequest
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve.llm import LLM, RequestOutput


NUM_GENERATED, NUM_CONTINUED = 32, 4
"""Tokens that are generated after some of the runs, and the number of runs, to compare decoding with prompts."""


class _Costs(NamedTuple):
    """What the tokens of a text cost a model."""

    bits: list[float]
    """Bits of each run of the text."""
    num_tokens: int
    num_free: int
    """Tokens that cost nothing, because nothing stands before them."""
    logprobs: list[float]
    """Log probabilities of all tokens of the text that cost anything."""
    decoded: float
    """Largest difference between log probabilities of tokens that were generated, and of the same in a prompt."""


def run(
    config: EngineConfig,
    *,
    text_path: pathlib.Path,
    quantizations: Sequence[Quantization] = (),
    kv_cache_dtypes: Sequence[KVCacheDType] = (),
) -> str:
    """Measure how many bits per byte the model needs for the text, and return the report.

    The text is cut into runs that fill the context, each prefixed with the tokenizer's BOS token. Bits are divided by
    the bytes of the text rather than its tokens, so that models with different tokenizers can be compared; the report
    also shows `xz -9` on the same bytes. Without a BOS token the first token of each run costs nothing, and the report
    says so. For each of `quantizations` the model is loaded again with its matrices rounded; its row has the difference
    from the model as it is, with the standard error of that over the runs of the text, of which there are pairs; and
    the largest differences between log probabilities of codes and of the floats that they encode, and between those of
    generated tokens and of the same tokens in a prompt. For each of `kv_cache_dtypes` its keys and values are held so,
    with the first of these differences and the last.

    Raises StartupError, and InvalidRequest if the text cannot be read or is empty.
    """
    try:
        text = text_path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {text_path}: {error}", param="text") from error
    num_bytes = len(text.encode())
    if num_bytes == 0:
        raise InvalidRequest(f"{text_path} is empty", param="text")
    if quantizations and config.load_format == "dummy":
        raise InvalidRequest("random weights are not stored, so that none can be rounded beside them", param="beside")
    plain = _costs(config, text)
    title = f"{text_path.name}: {num_bytes} bytes, {plain.num_tokens} tokens in {len(plain.bits)} runs"
    if plain.num_free:
        title += f"; no BOS, so {plain.num_free} tokens cost nothing"
    rows = [[config.model, f"{sum(plain.bits) / num_bytes:.3f}", "", "", f"{plain.decoded:.1e}"]]
    for name in quantizations:
        costs, values = _of_codes_and_values(config, name, text)
        differences = _paired(plain, costs, num_bytes), f"{_largest(costs, values):.1e}", f"{costs.decoded:.1e}"
        rows.append([f"  in {name}", f"{sum(costs.bits) / num_bytes:.3f}", *differences])
    for dtype in kv_cache_dtypes:
        costs = _costs(dataclasses.replace(config, kv_cache_dtype=dtype), text)
        differences = _paired(plain, costs, num_bytes), "", f"{costs.decoded:.1e}"
        rows.append([f"  KV in {dtype}", f"{sum(costs.bits) / num_bytes:.3f}", *differences])
    rows.append(["xz -9", f"{8 * len(lzma.compress(text.encode(), preset=9)) / num_bytes:.3f}"])
    header = ["", "bits a byte", "difference", "codes - floats", "decoded - prompt"][
        : None if quantizations or kv_cache_dtypes else 2
    ]
    return f"{title}\n\n" + table(header, [(row + [""] * len(header))[: len(header)] for row in rows])


def _of_codes_and_values(config: EngineConfig, name: Quantization, text: str) -> tuple[_Costs, _Costs]:
    """Return the costs with matrices rounded to codes, and with the floats that the same codes encode."""
    from jaxserve.convert import convert

    with tempfile.TemporaryDirectory() as folder:
        store = pathlib.Path(folder) / "store"
        convert(config.model, store, revision=config.revision, quantization=name, progress=False)
        stored = dataclasses.replace(config, model=str(store), revision=None, quantization=None)
        codes, values = (dataclasses.replace(stored, dequantize=each) for each in (False, True))
        return _costs(codes, text), _costs(values, text)


def _largest(costs: _Costs, other: _Costs) -> float:
    return max(abs(a - b) for a, b in zip(costs.logprobs, other.logprobs, strict=True))


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
        starts = [bos + run[: (length - NUM_GENERATED) // 2] for run in runs[:NUM_CONTINUED]]
        decoded = _largest_of_decoding(llm, starts)
    of_runs = [_logprobs(output) for output in outputs]
    bits = [-sum(run) / math.log(2) for run in of_runs]
    return _Costs(bits, len(token_ids), 0 if bos else len(runs), [value for run in of_runs for value in run], decoded)


def _logprobs(output: "RequestOutput") -> list[float]:
    """Return the log probabilities of the tokens of a prompt, the first of which has no past."""
    entries = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
    return [entry[token].logprob for token, entry in entries if entry is not None]


def _largest_of_decoding(llm: "LLM", prompts: list[list[int]]) -> float:
    """Return the largest difference between log probabilities of generated tokens and of the same ones in a prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_GENERATED, logprobs=0, ignore_eos=True, detokenize=False)
    generated = [output.outputs[0] for output in llm.generate(prompts, params)]
    wholes = [prompt + list(each.token_ids) for prompt, each in zip(prompts, generated, strict=True)]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    differences = []
    for output, each in zip(llm.generate(wholes, params), generated, strict=True):
        decoded = [entry[token].logprob for token, entry in zip(each.token_ids, each.logprobs or [], strict=True)]
        again = _logprobs(output)[-len(decoded) :]
        differences += [abs(a - b) for a, b in zip(decoded, again, strict=True)]
    return max(differences, default=0.0)


def _paired(plain: _Costs, costs: _Costs, num_bytes: int) -> str:
    """Describe a difference in bits per byte, with its standard error if there are several runs to compute it from."""
    differences = [bits - other for bits, other in zip(costs.bits, plain.bits, strict=True)]
    mean = f"{sum(differences) / num_bytes:+.4f}"
    if len(differences) < 2:
        return mean
    error = math.sqrt(len(differences)) * statistics.stdev(differences) / num_bytes
    return f"{mean} +- {error:.4f}"
