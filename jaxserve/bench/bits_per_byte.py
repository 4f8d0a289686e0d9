"""`jaxserve bench bits-per-byte`: how well a model predicts a text, measured by the engine's prompt log
probabilities.
"""

import dataclasses
import lzma
import math
import pathlib

from jaxserve.bench.report import table
from jaxserve.config import EngineConfig
from jaxserve.errors import InvalidRequest
from jaxserve.request import SamplingParams


def run(config: EngineConfig, *, text_path: pathlib.Path) -> str:
    """Measure how many bits per byte the model needs for the text, and return the report.

    The text is cut into runs that fill the context, each prefixed with the tokenizer's BOS token. Bits are divided by
    the bytes of the text rather than its tokens, so that models with different tokenizers can be compared; the report
    also shows `xz -9` on the same bytes. Without a BOS token the first token of each run costs nothing, and the report
    says so.

    Raises StartupError, and InvalidRequest if the text cannot be read or is empty.
    """
    from jaxserve.llm import LLM

    try:
        text = text_path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"cannot read {text_path}: {error}", param="text") from error
    num_bytes = len(text.encode())
    if num_bytes == 0:
        raise InvalidRequest(f"{text_path} is empty", param="text")
    with LLM(**dataclasses.asdict(config)) as llm:
        tokenizer = llm.get_tokenizer()
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        length = llm.info.max_model_len - 1 - len(bos)  # every request generates one token
        runs = [token_ids[start : start + length] for start in range(0, len(token_ids), length)]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = llm.generate([bos + run for run in runs], params)
    bits, num_free = 0.0, 0
    for output in outputs:
        entries = output.prompt_logprobs or []
        num_free += not bos
        for token_id, entry in zip(output.prompt_token_ids, entries, strict=True):
            if entry is not None:  # None for the first token of a prompt, which has no context
                bits -= entry[token_id].logprob / math.log(2)
    compressed = len(lzma.compress(text.encode(), preset=9))
    title = f"{text_path.name}: {num_bytes} bytes, {len(token_ids)} tokens in {len(runs)} runs"
    if num_free:
        title += f"; no BOS, so {num_free} tokens cost nothing"
    rows = [
        [config.model, f"{bits / num_bytes:.3f}"],
        ["xz -9", f"{8 * compressed / num_bytes:.3f}"],
    ]
    return f"{title}\n\n" + table(["", "bits a byte"], rows)
