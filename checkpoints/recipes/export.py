"""Put trained weights and the tokenizer together as a Hugging Face folder; its model card is written by hand."""

import argparse
import json
import shutil
from pathlib import Path

from model import CONFIGS

GENERATION = {
    "bos_token_id": 0,
    "eos_token_id": [1, 5],  # end of text, end of turn
    "pad_token_id": 1,
    "do_sample": True,
    "temperature": 0.7,
    "top_p": 0.95,
}


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=CONFIGS, required=True)
    parser.add_argument("--weights", type=Path, required=True, help="the model.safetensors that train.py wrote")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder that train_tokenizer.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(args.tokenizer / name, args.out / name)
    shutil.copyfile(args.weights, args.out / "model.safetensors")
    for name, content in (("config.json", CONFIGS[args.model].hugging_face()), ("generation_config.json", GENERATION)):
        (args.out / name).write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
