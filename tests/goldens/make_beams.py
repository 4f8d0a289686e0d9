"""What transformers' beam search finds with one of the goldens: beams.json, the reference of `LLM.beam_search`.

Runs in a Python with torch, as make_goldens.py. The tokens that end a sequence are among those that the model likes, so
that sequences end before and after the beams' best ones.
"""

import itertools
import json
import pathlib

import numpy as np
import torch
import transformers
from make_goldens import load

NAME = "llama_untied"
NUM_TOKENS = 12
PROMPT_LENGTHS = (9, 20)
EARLY_STOPPING = (False, True, "never")
LENGTH_PENALTIES = (1.0, 0.0, 2.0, -0.5)


def main():
    folder = pathlib.Path(__file__).parent
    model = load(folder / NAME, transformers.LlamaForCausalLM)
    token_ids = np.load(folder / NAME / "golden.npz")["token_ids"]
    cases = []
    for number, (early_stopping, length_penalty) in enumerate(itertools.product(EARLY_STOPPING, LENGTH_PENALTIES)):
        prompt = token_ids[: PROMPT_LENGTHS[number % 2]].tolist()
        beam_width = 2 + number % 4
        options = {
            "do_sample": False,
            "num_beams": beam_width,
            "num_return_sequences": beam_width,
            "max_new_tokens": NUM_TOKENS,
            "length_penalty": length_penalty,
            "early_stopping": early_stopping,
            "pad_token_id": model.config.vocab_size - 1,
            "return_dict_in_generate": True,
            "output_scores": True,
        }
        endless = model.generate(torch.tensor([prompt]), **options).sequences[:, len(prompt) :]
        eos_token_ids = sorted({int(endless[row % beam_width, 3 + 2 * row]) for row in range(1 + number % 3)})
        found = model.generate(torch.tensor([prompt]), eos_token_id=eos_token_ids, **options)
        sequences = []
        for sequence in found.sequences[:, len(prompt) :].tolist():
            ends = [index for index, token_id in enumerate(sequence) if token_id in eos_token_ids]
            sequences.append(sequence[: ends[0] + 1] if ends else sequence)
        cases.append(
            {
                "prompt": prompt,
                "beam_width": beam_width,
                "eos_token_ids": eos_token_ids,
                "early_stopping": early_stopping,
                "length_penalty": length_penalty,
                "max_tokens": NUM_TOKENS,
                "sequences": sequences,
                "scores": found.sequences_scores.tolist(),
            }
        )
        print(early_stopping, length_penalty, [len(sequence) for sequence in sequences])
    text = ",\n".join(json.dumps(case) for case in cases)
    (folder / "beams.json").write_text(f"[\n{text}\n]\n")


if __name__ == "__main__":
    main()
