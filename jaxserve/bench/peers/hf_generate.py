"""The workload under Hugging Face transformers: padded batches of fixed membership, as `model.generate` runs them.

Run as a plain file by an interpreter that has torch and transformers (it imports nothing of jaxserve): `python
hf_generate.py SPEC.json`. Prints one JSON line.
"""

import json
import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def main(path: str) -> None:
    """Run the jobs of the spec file in order, in batches of `max_num_seqs`."""
    with open(path) as file:
        spec = json.load(file)
    torch.manual_seed(0)
    torch.set_num_threads(spec["num_threads"])
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(spec["engine"]["model"])).float().eval()
    jobs, size = spec["jobs"], spec["engine"]["max_num_seqs"]
    batches = [jobs[start : start + size] for start in range(0, len(jobs), size)]
    run_batch(model, batches[0][:1], num_tokens=2)  # the first call allocates
    start, cpu_start = time.perf_counter(), time.process_time()
    for batch in batches:
        run_batch(model, batch, num_tokens=max(job["output_len"] for job in batch))
    print(json.dumps({"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu_start}))


def run_batch(model: torch.nn.Module, batch: list[dict], *, num_tokens: int) -> None:
    """Generate `num_tokens` for each job of a batch, left-padded to its longest prompt."""
    longest = max(len(job["prompt_token_ids"]) for job in batch)
    padding = [longest - len(job["prompt_token_ids"]) for job in batch]
    ids = [[0] * pad + job["prompt_token_ids"] for job, pad in zip(batch, padding, strict=True)]
    mask = [[0] * pad + [1] * (longest - pad) for pad in padding]
    generate(model, torch.tensor(ids), torch.tensor(mask), num_tokens)


def generate(model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, num_tokens: int) -> None:
    """Continue prompts by exactly `num_tokens`, the most likely ones."""
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            pad_token_id=0,
        )


if __name__ == "__main__":
    main(sys.argv[1])
