"""Write goldens.json: greedy continuations of both built-in models by transformers, in float32 on the CPU.

Needs torch, transformers and safetensors; run it again only when the weights change.
"""

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

HERE = Path(__file__).parent
CHECKPOINTS = HERE.parents[1] / "checkpoints"
NUM_TOKENS = 48
PROMPTS = (
    "Once upon a time there was a little fox who",
    "The captain looked at the sea and",
    '"Who is there?" cried the king.',
    "It was the best of times,",
)
CHATS = ("Hello! How are you?", "Tell me a story about a dragon.", "Who are you?")


def main() -> None:
    rows = []
    for name in ("scribe-15m", "scribe-2m"):
        tokenizer = AutoTokenizer.from_pretrained(CHECKPOINTS / name)
        model = AutoModelForCausalLM.from_pretrained(CHECKPOINTS / name, dtype=torch.float32)
        messages = [[{"role": "user", "content": chat}] for chat in CHATS]
        rendered = [tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in messages]
        texts = [(prompt, tokenizer(prompt)["input_ids"], False) for prompt in PROMPTS]
        texts += [(text, tokenizer(text, add_special_tokens=False)["input_ids"], True) for text in rendered]
        for text, ids, is_chat in texts:
            out = model.generate(
                torch.tensor([ids]),
                generation_config=GenerationConfig(max_new_tokens=NUM_TOKENS, do_sample=False),
                output_logits=True,
                return_dict_in_generate=True,
            )
            best = [logits[0].topk(2).values for logits in out.logits]
            margins = [float(first - second) for first, second in best]
            output = out.sequences[0].tolist()
            row = {"model": name, "text": text, "is_chat": is_chat, "prompt_ids": ids, "greedy_ids": output[len(ids) :]}
            rows.append(row | {"smallest_margin": round(min(margins), 5)})
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (HERE / "goldens.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
