"""Tokenizers of GGUF files, built for the `tokenizers` library from the vocabulary in their metadata. No jax.

There are three kinds: "gpt2" is byte-level BPE with merges, "llama" is sentencepiece's BPE with scores, which falls
back to bytes, and "gemma4" is the latter with merges. The file says which tokens are special.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxserve.errors import CheckpointError
from jaxserve.loading.gguf import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
"""Types of tokens; 5 (unused) and 6 (a byte) need no special treatment."""

_SPACE = "\u2581"  # sentencepiece's

_GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
_STARCODER = (r"\p{N}", *_GPT2)
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = (_WORDS + r"\p{N}{1,3}" + _REST,)
_QWEN2 = (_WORDS + r"\p{N}" + _REST,)
_QWEN35 = (_QWEN2[0].replace(r"\p{L}+|\p{N}|", r"[\p{L}\p{M}]+|\p{N}|").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}"),)
_SEED = (_WORDS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",)
_LING = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
_CASED_WORDS = "".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{word}{_ENDING}" for word in (f"{_UPPER}*{_LOWER}+", f"{_UPPER}+{_LOWER}*")
)
_O200K = (_CASED_WORDS + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",)
_TEKKEN = (_O200K[0].replace(_ENDING, "|").replace(r"\p{N}{1,3}", r"\p{N}"),)
_KIMI = (r"\p{Han}+|" + _O200K[0].replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(r"[\r\n/]*", r"[\r\n]*"),)
_CJK = r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_NO_LETTERS_THEN = (  # letters without case in the version of Unicode that the pattern was made with
    r"\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2f\ua78f-\uab6f"
    r"\x{10570}-\x{105ff}\x{10d50}-\x{10d8f}\x{16e40}-\x{16eff}\x{1d400}-\x{1dfff}"
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_NO_LETTERS_THEN}]]+",
    r"\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _CJK,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_BLOOM = (r" ?[^(\s|.,!?…。，、।۔،)]+",)  # noqa: RUF001 (full stops and commas of several scripts)

SPLITS = {
    name: patterns
    for patterns, names in (
        (_GPT2, "default gpt-2 mpt olmo exaone4 granite-docling mellum phi-2"),
        (_LLAMA3, "llama3 llama-v3 llama-bpe chatglm-bpe falcon3 falcon-h1 lfm2 pixtral dbrx glm4 smaug-bpe"),
        (_QWEN2, "qwen2 deepseek-r1-qwen hunyuan megrez"),
        (_QWEN35, "qwen35"),
        (_SEED, "seed-coder"),
        (_LING, "bailingmoe bailingmoe2"),
        (_QWEN2, "stablelm2"),
        (_STARCODER, "command-r exaone mellum2 refact smollm starcoder"),
        (_BLOOM, "bloom"),
        (_DEEPSEEK_CODER, "deepseek-coder"),
        (_DEEPSEEK_LLM, "deepseek-llm"),
        (_DEEPSEEK_V3, "deepseek-v3 hunyuan-dense"),
        (_O200K, "gpt-4o llama4 minimax-m2"),
        (_TEKKEN, "tekken"),
        (_KIMI, "kimi-k2"),
    )
    for name in names.split()
}
"""How a text is split before merges, by `tokenizer.ggml.pre`: each pattern splits the pieces of the previous one."""

FALCON = "falcon"
"""The one split that is not made by such patterns."""

LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2", "pixtral", "tekken")
"""Splits whose pieces become a token before any merge if they are one; their models begin texts with BOS."""

NORMALIZED = ("command-r", "deepseek-r1-qwen", "mpt", "olmo", "qwen2", "qwen35")
"""Splits of models that normalise texts to Unicode's NFC."""

SPLITS_OF_OLD_FILES = {"gpt2": "gpt-2", "gptj": "gpt-2", "gptneox": "mpt"}
"""Architectures whose models all use the same split, so that files may omit it."""

_END_OF_TURN = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|end_of_text|>"),
    *("[EOT]", "[EOS]", "[e~[", "<eos>", "<turn|>"),
)
"""Control tokens that end a generation, although many files declare only one of them."""
_END_OF_HARMONY = ("<|return|>", "<|call|>", "<|endoftext|>")
"""Control tokens that end a generation of GPT-OSS, whose format also uses <|end|> after thoughts."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GGUFTokenizer:
    """A tokenizer as a file describes it; `special` are bos_token, eos_token, unk_token and pad_token where known."""

    backend: Tokenizer
    special: dict[str, str | None]
    chat_template: str | None
    end_token_ids: tuple[int, ...]


def read_tokenizer(path: str | Path) -> GGUFTokenizer:
    """Read the tokenizer of a GGUF file. Raises CheckpointError, naming what is missing or unknown."""
    file = GGUFFile(path)
    try:
        return build_tokenizer(file.metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}") from None


def build_tokenizer(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """Build a tokenizer from the keys `tokenizer.*`. Raises CheckpointError, naming what is missing or unknown."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "gemma4"):
        raise CheckpointError(f"unknown tokenizer.ggml.model {kind!r}; known are gpt2, llama, gemma4")
    tokens = _list(metadata, "tokenizer.ggml.tokens", str)
    types = _types(metadata) or [NORMAL] * len(tokens)
    if not tokens or len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise CheckpointError(f"{len(tokens)} tokens, {len(set(tokens))} different ones, {len(types)} types of tokens")
    special = {
        f"{name}_token": _token(metadata, tokens, f"tokenizer.ggml.{key}_token_id")
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    backend = _byte_level(metadata, tokens) if kind == "gpt2" else _sentencepiece(metadata, tokens, types, special)
    added = [
        AddedToken(token, normalized=False, special=token_type != USER_DEFINED)
        for token, token_type in zip(tokens, types, strict=True)
        if token_type in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    backend.add_tokens(added)
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", _adds_bos(kind, metadata))
    before = [special["bos_token"]] if adds_bos and special["bos_token"] else []
    after = [special["eos_token"]] if metadata.get("tokenizer.ggml.add_eos_token") and special["eos_token"] else []
    around = sorted({*before, *after})
    if around:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B:1", *after],
            special_tokens=[(token, tokens.index(token)) for token in around],
        )
    template = metadata.get("tokenizer.chat_template")
    return GGUFTokenizer(
        backend=backend,
        special=special,
        chat_template=template if isinstance(template, str) else None,
        end_token_ids=end_token_ids(metadata),
    )


def end_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end a generation: EOS, ends of turns and messages, and control tokens known as such."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = metadata.get("tokenizer.ggml.tokens", []), _types(metadata)
    control = {
        token: token_id
        for token_id, (token, token_type) in enumerate(zip(tokens, types, strict=False))
        if token_type == CONTROL
    }
    ends = _END_OF_HARMONY if "<|call|>" in control else _END_OF_TURN
    known = [token_id for token, token_id in control.items() if token in ends]
    return tuple(dict.fromkeys([token_id for token_id in named if token_id is not None] + known))


def _byte_level(metadata: Mapping[str, Any], tokens: list[str]) -> Tokenizer:
    split = _pre_tokenizer(metadata)
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    merges = _listed_merges(metadata, vocabulary)
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split in LLAMA3))
    if split in NORMALIZED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_splitters(split))
    backend.decoder = decoders.ByteLevel()
    return backend


def _listed_merges(metadata: Mapping[str, Any], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the list of merges. Raises CheckpointError for one that does not make a token of two."""
    found = [
        (merge.partition(" ")[0], merge.partition(" ")[2]) for merge in _list(metadata, "tokenizer.ggml.merges", str)
    ]
    if unknown := [merge for merge in found if not vocabulary.keys() >= {*merge, "".join(merge)}]:
        raise CheckpointError(f"{len(unknown)} of tokenizer.ggml.merges do not merge tokens, such as {unknown[0]}")
    return found


def _splitters(split: str) -> list[pre_tokenizers.PreTokenizer]:
    """Return the pre-tokenizers of a split. Falcon's looks for digits after the mapping to bytes, some of which look
    like digits.
    """
    if split == FALCON:
        return [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    patterns = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[split]]
    return [*patterns, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], special: Mapping[str, str | None]
) -> Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if metadata["tokenizer.ggml.model"] == "gemma4":
        merges = _listed_merges(metadata, vocabulary)
    else:
        scores = _list(metadata, "tokenizer.ggml.scores", float)
        if len(scores) != len(tokens):
            raise CheckpointError(f"{len(tokens)} tokens, but {len(scores)} tokenizer.ggml.scores")
        merges = _merges({token: scores[i] for i, token in enumerate(tokens) if types[i] == NORMAL}, vocabulary)
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=merges,
            unk_token=special["unk_token"],
            fuse_unk=True,
            byte_fallback=all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)),
        )
    )
    is_prefixed = metadata["tokenizer.ggml.model"] == "llama"
    begins_with_space = metadata.get("tokenizer.ggml.add_space_prefix", is_prefixed)
    prefix = [normalizers.Prepend(_SPACE)] if begins_with_space else []
    strip = [decoders.Strip(" ", 1, 0)] if begins_with_space else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges(scores: Mapping[str, float], order: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return every pair of tokens that form a token, ordered by the score of the token they form.

    Sentencepiece merges the neighbours that form the token with the highest score (arXiv:1808.06226), without a list of
    merges.
    """
    found = [
        (-score, order[token], order[token[:cut]], order[token[cut:]], cut, token)
        for token, score in scores.items()
        for cut in range(1, len(token))
        if token[:cut] in scores and token[cut:] in scores
    ]
    return [(token[:cut], token[cut:]) for *_, cut, token in sorted(found)]


def _pre_tokenizer(metadata: Mapping[str, Any]) -> str:
    """Return `tokenizer.ggml.pre`, or what the architecture implies."""
    split = metadata.get("tokenizer.ggml.pre", SPLITS_OF_OLD_FILES.get(metadata.get("general.architecture", "")))
    if split not in (*SPLITS, FALCON):
        raise CheckpointError(f"unknown tokenizer.ggml.pre {split!r}; known are {', '.join((*SPLITS, FALCON))}")
    return split


def _adds_bos(kind: str, metadata: Mapping[str, Any]) -> bool:
    """Return llama.cpp's default for a file that does not say if BOS is added."""
    return kind != "gpt2" or _pre_tokenizer(metadata) in LLAMA3


def _token(metadata: Mapping[str, Any], tokens: list[str], key: str) -> str | None:
    token_id = metadata.get(key)
    if token_id is None:
        return None
    if not isinstance(token_id, int) or not 0 <= token_id < len(tokens):
        raise CheckpointError(f"{key} is {token_id!r}, but there are {len(tokens)} tokens")
    return tokens[token_id]


def _types(metadata: Mapping[str, Any]) -> list[int]:
    key = "tokenizer.ggml.token_type"
    return _list(metadata, key, int) if key in metadata else []


def _list(metadata: Mapping[str, Any], key: str, kind: type) -> list[Any]:
    values = metadata.get(key)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise CheckpointError(f"{key} must be a list of type {kind.__name__}")
    return values
