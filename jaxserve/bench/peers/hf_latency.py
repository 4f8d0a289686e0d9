"""Batches of equal requests under Hugging Face transformers, as `jaxserve bench latency --peer` reads them.

Run as a plain file by an interpreter that has torch and transformers (it imports nothing of jaxserve):

    python hf_latency.py CONFIG.json 1:128:128 16:128:128 > hf.json
    jaxserve bench latency --shape llama-3-8b --kernels xla --batches 1:128:128 16:128:128 --peer hf.json

where CONFIG.json is a model's config.json. The weights are random, in its dtype, on the GPU if there is one.
"""

import json
import statistics
import sys
import time

import torch
from hf_generate import generate
from transformers import AutoConfig, AutoModelForCausalLM

NUM_WARMUPS, NUM_RUNS = 2, 3


def main(path: str, shapes: list[str]) -> None:
    """Time each shape, B:i:o, with one token of output (prefill) and in full, and print the peer's file."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with open(path) as file:
        fields = json.load(file)
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config).eval()
    runs = []
    for batch_size, input_len, output_len in (map(int, shape.split(":")) for shape in shapes):
        ids = torch.randint(3, config.vocab_size, (batch_size, input_len), device=device)
        prefill, total = (seconds(model, ids, num_tokens) for num_tokens in (1, output_len))
        runs.append(
            {
                "B": batch_size,
                "i": input_len,
                "o": output_len,
                "prefill_tok_s": batch_size * input_len / prefill,
                "out_tok_s": batch_size * output_len / total,
                "tpot_ms": (total - prefill) / (output_len - 1) * 1e3 if output_len > 1 else None,
            }
        )
        print(runs[-1], file=sys.stderr)
    print(json.dumps({"transformers": {"runs": runs}}))


def seconds(model: torch.nn.Module, ids: torch.Tensor, num_tokens: int) -> float:
    """Return the median time in which `num_tokens` follow each prompt."""
    times = []
    for _ in range(NUM_WARMUPS + NUM_RUNS):
        start = time.perf_counter()
        generate(model, ids, torch.ones_like(ids), num_tokens)
        if ids.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[NUM_WARMUPS:])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
