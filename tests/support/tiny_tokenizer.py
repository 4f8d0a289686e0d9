"""Two tiny tokenizers, made here: for tests that need one of each kind and no files from elsewhere.

`byte_level(folder)` writes one as GPT-2, Llama 3 and Qwen have it, `sentencepiece(folder)` one as Llama 2 and Mistral.
"""

import json
import pathlib

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% if mood is defined %}mood: {{ mood }}\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXTS = (
    *("", " ", "  two  spaces ", "Once upon a time", " the end\n\n\tof it", "naïve café 🦙🇨🇭 漢字 нещо"),
    *("<0xE2> is spelled out",),
)


def byte_level(folder: pathlib.Path) -> pathlib.Path:
    """Bytes, a few merges, no BOS; EOS <|im_end|> (special), <|tool|> (added, not special); a chat template."""
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("o", "n"), ("Ġ", "u"), ("Ġu", "p"), ("Ġup", "on"), ("Ċ", "Ċ")]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens(["<|tool|>"])
    return _save(tokenizer, folder, {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE})


def sentencepiece(folder: pathlib.Path) -> pathlib.Path:
    """BOS <s> before every text, EOS </s>, U+2581 for spaces, bytes as <0x..>; no chat template."""
    letters = [chr(code) for code in range(0x21, 0x7F)]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("o", "n"), ("▁", "u"), ("▁u", "p"), ("▁up", "on")]
    merges += [("▁", letter) for letter in "abcO"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    pieces += ["".join(pair) for pair in merges]
    bpe = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _save(tokenizer, folder, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


def _save(tokenizer: tokenizers.Tokenizer, folder: pathlib.Path, config: dict[str, str]) -> pathlib.Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    whole = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(whole))
    return folder
