"""Tokenizers of GGUF files against those that the same models have elsewhere."""

import json
import re
import string

import gguf_files
import numpy as np
import pytest
from tokenizers import Regex, pre_tokenizers

from jaxserve.errors import CheckpointError
from jaxserve.loading.builtin import resolve_model
from jaxserve.loading.gguf_tokenizer import build_tokenizer, end_token_ids
from jaxserve.tokenizer import Tokenizer

SEPARATOR = "\n__ggml_vocab_test__\n"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6


def metadata_of(tokenizer_json, **others):
    """Return the metadata that llama.cpp's converter writes for a byte-level tokenizer.json."""
    fields = json.loads(tokenizer_json.read_text())
    ids = fields["model"]["vocab"] | {token["content"]: token["id"] for token in fields["added_tokens"]}
    special = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in fields["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in fields["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [special.get(token, NORMAL) for token in tokens],
        "tokenizer.ggml.merges": merges,
    } | {f"tokenizer.ggml.{name}": value for name, value in others.items()}


@pytest.mark.parametrize(
    ("name", "vectors", "others"),
    [
        ("llama3", "ggml-vocab-llama-bpe.gguf", {"pre": "llama-bpe", "bos_token_id": 128000}),
        ("qwen2", "ggml-vocab-qwen2.gguf", {"pre": "qwen2", "eos_token_id": 151645}),
    ],
)
def test_vectors_of_llama_cpp(test_data, name, vectors, others):
    folder = test_data / "tokenizers"
    read = build_tokenizer(metadata_of(folder / f"{name}.tokenizer.json", **others))
    texts = (folder / "vectors" / f"{vectors}.inp").read_bytes().decode().split(SEPARATOR)
    lines = (folder / "vectors" / f"{vectors}.out").read_text().split("\n")
    assert len(texts) == len(lines) == 47
    for text, line in zip(texts, lines, strict=True):
        ids = [int(word) for word in line.split()]
        assert read.backend.encode(text, add_special_tokens=False).ids == ids
        with_bos = [128000, *ids] if name == "llama3" else ids
        assert read.backend.encode(text).ids == with_bos
        assert read.backend.decode(ids) == text
    assert 151645 in read.end_token_ids if name == "qwen2" else read.special["bos_token"] == "<|begin_of_text|>"


def test_scores_give_the_merges_of_the_tokenizer_json(test_data):
    folder = test_data / "models" / "stories260K"
    ours, theirs = Tokenizer.load(folder / "stories260K-f32.gguf"), Tokenizer.load(folder)
    texts = (test_data / "tokenizers/vectors/ggml-vocab-qwen2.gguf.inp").read_bytes().decode().split(SEPARATOR)
    for text in [*texts, "Once upon a time, there was a little girl named Lily.", "", "a<s>b</s> c", "  x"]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
    for name in ("eos_token_ids", "bos_token_id", "special_token_ids", "vocab_size", "adds_bos", "strips_first_space"):
        assert getattr(ours, name) == getattr(theirs, name)


def test_harmony_ends_with_answers_and_calls():
    tokens = ["a", "<|endoftext|>", "<|return|>", "<|end|>", "<|call|>"]
    keys = {"tokens": tokens, "token_type": [NORMAL, *[CONTROL] * 4], "eos_token_id": 2}
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    assert set(end_token_ids(metadata)) == {1, 2, 4}
    metadata["tokenizer.ggml.token_type"] = [NORMAL, *[CONTROL] * 3, NORMAL]
    assert set(end_token_ids(metadata)) == {1, 2, 3}


def tiny_metadata(**others):
    tokens = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "ab", "\u2581a", "<end_of_turn>", "  ", "\u2581ab"]
    types = [UNKNOWN, CONTROL, CONTROL, *[NORMAL] * 5, CONTROL, USER_DEFINED, NORMAL]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "token_type": types + [BYTE] * 256,
        "scores": [0.0, 0.0, 0.0, -5.0, -6.0, -7.0, -1.0, -2.0, 0.0, 0.0, -3.0, *[0.0] * 256],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    } | others
    return {f"tokenizer.ggml.{name}": value for name, value in metadata.items() if value is not None}


def test_scores_spaces_and_added_tokens():
    backend = build_tokenizer(tiny_metadata()).backend
    # "ab" has a better score than "\u2581a", so it is merged first; "  " is a token of its own before merges.
    assert backend.encode("ab").ids == [1, 10]
    assert backend.encode("a  b", add_special_tokens=False).ids == [7, 9, 3, 5]
    assert backend.encode("c", add_special_tokens=False).ids == [3, 11 + ord("c")]
    assert backend.decode([10, 9, 5]) == "ab  b"
    without = build_tokenizer(tiny_metadata(add_space_prefix=False, add_bos_token=False, add_eos_token=True)).backend
    assert without.encode("ab").ids == [6, 2]
    assert without.decode([10]) == " ab"


def test_listed_merges_spaces_and_bytes_of_gemma_4():
    metadata = tiny_metadata(model="gemma4", scores=None, merges=["\u2581 a", "a b", "\u2581 ab"])
    backend = build_tokenizer(metadata).backend
    assert backend.encode("ab a").tokens == ["<s>", "ab", "\u2581a"]
    assert backend.encode("c\n", add_special_tokens=False).ids == [11 + ord("c"), 11 + ord("\n")]
    assert backend.decode(backend.encode(" ab", add_special_tokens=False).ids) == " ab"


def test_ends_and_template_of_a_whole_file(tmp_path):
    template = "{% for message in messages %}{{ bos_token }}{{ message.content }}{% endfor %}"
    metadata = tiny_metadata(eot_token_id=6) | {"tokenizer.chat_template": template}
    gguf_files.write(tmp_path / "m.gguf", "llama", metadata, {"x": np.ones(3, np.float32)})
    tokenizer = Tokenizer.load(tmp_path / "m.gguf")
    assert tokenizer.eos_token_ids == (2, 6, 8)
    assert tokenizer.special_token_ids == {0, 1, 2, 8}
    assert tokenizer.bos_token_id == 1
    assert tokenizer.render_chat_template([{"role": "user", "content": "ab"}]) == "<s>ab"
    assert resolve_model(str(tmp_path / "m.gguf")) == str(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"model": "bert"}, r"unknown tokenizer\.ggml\.model 'bert'; known are gpt2, llama, gemma4"),
        ({"model": None}, r"unknown tokenizer\.ggml\.model None"),
        ({"model": "gpt2", "pre": "viking"}, r"unknown tokenizer\.ggml\.pre 'viking'; known are default, gpt-2"),
        ({"model": "gpt2"}, r"unknown tokenizer\.ggml\.pre None"),
        ({"model": "gpt2", "pre": "qwen2", "merges": ["a b", "x y"]}, r"1 of tokenizer\.ggml\.merges"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "2 tokens, 1 different ones"),
        ({"token_type": [1]}, "267 tokens, 267 different ones, 1 types"),
        ({"scores": [1.0]}, r"267 tokens, but 1 tokenizer\.ggml\.scores"),
        ({"tokens": "a"}, r"tokenizer\.ggml\.tokens must be a list of type str"),
        ({"bos_token_id": 1000}, r"tokenizer\.ggml\.bos_token_id is 1000, but there are 267 tokens"),
    ],
)
def test_what_is_not_known_is_named(tmp_path, others, message):
    gguf_files.write(tmp_path / "m.gguf", "llama", tiny_metadata(**others), {"x": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match=message) as error:
        Tokenizer.load(tmp_path / "m.gguf")
    assert "m.gguf" in str(error.value)


BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES_ALONE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
DIGITS = pre_tokenizers.Digits(individual_digits=True)
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"  # noqa: RUF001 (full stops and commas of several scripts)


def split_by(*patterns):
    return pre_tokenizers.Sequence([*(pre_tokenizers.Split(Regex(it), "isolated") for it in patterns), BYTES_ALONE])


ASCII_PUNCTUATION = "[" + re.escape(string.punctuation) + "]"
FALCON = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Punctuation("contiguous"),
        BYTES,
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9]{3}"), "isolated"),
    ]
)
O200K = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ヿ]+",
    rf"{ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# As in the tokenizers that Moonshot, Qwen, ByteDance, Mistral and inclusionAI publish.
KIMI = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
LING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
TEKKEN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
        r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
)
TEXTS = (
    "HelloWORLDs they'LL  iPhone's\u0301ABC /\n/x 1234567 x\u00b2=\u00bd",
    "漢字かなカナ한글12.5% (a)b_c <tag/>  \r\n\t end  ",
    "naïve Ñandú ŽŠ ß ǅ ʰ ⴀ \u0561 \U0001d400b, “quoted”　。\uff01 Ünï 2024-01-31 $5+3<8",
)


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("falcon", FALCON),
        ("gpt-4o", split_by(O200K)),
        ("deepseek-v3", split_by(*DEEPSEEK_V3)),
        ("bailingmoe2", split_by(LING)),
        ("kimi-k2", split_by(KIMI)),
        ("qwen35", split_by(QWEN35)),
        ("seed-coder", split_by(SEED)),
        ("tekken", split_by(TEKKEN)),
        ("starcoder", pre_tokenizers.Sequence([DIGITS, BYTES])),
        ("refact", pre_tokenizers.Sequence([DIGITS, BYTES])),
        ("phi-2", BYTES),
        ("bloom", split_by(BLOOM)),
        ("dbrx", split_by(rf"{WORDS}|\p{{N}}{{1,3}}|{REST}")),
        ("stablelm2", split_by(rf"{WORDS}|\p{{N}}|{REST}")),
    ],
)
def test_texts_are_split_as_the_model_wants_it(pre, expected):
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|endoftext|>"]
    keys = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": []}
    backend = build_tokenizer({f"tokenizer.ggml.{key}": value for key, value in keys.items()}).backend
    for text in (
        *TEXTS,
        "def f2(x):  \n\treturn  x*10 + 3655",
        " 7  8",
        "it's\n\n 42nd! [a|b] (c, d)…",
        "I'LL go。漢 ü",
    ):
        assert backend.pre_tokenizer.pre_tokenize_str(text) == expected.pre_tokenize_str(text)


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("deepseek-llm", "it's 1234 ²\n\n x", ["it", "'", "s", " ", "1234", " ", "²", "\n", "\n", " x"]),
        ("deepseek-llm", "漢字。a,b “c” ʰ", ["漢字", "。", "a", ",", "b", " ", "“", "c", "”", " ʰ"]),
        # Letters that have had a case only since a later Unicode, or none then.
        ("deepseek-llm", "ñÑ Ꝏ ꟊ \U0001d400 ꟊ", ["ñÑ", " Ꝏ", " ꟊ \U0001d400 ꟊ"]),
        ("deepseek-coder", "f(x1) == 12\n 漢", ["f", "(", "x", "1", ")", " == ", "1", "2", "\n", " ", "漢"]),
        # The second byte of ü and of ² looks like a digit.
        ("falcon", "ü2024, a²", ["Ã", "¼", "202", "4", ",", "Ġa", "Â", "²"]),
        ("gpt-4o", "HelloWORLDs'll\u0301ABC", ["Hello", "WORLDs'll", "\u0301", "ABC"]),
    ],
)
def test_pieces_of_texts(pre, text, pieces):
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    keys = {"model": "gpt2", "pre": pre, "tokens": tokens, "merges": []}
    backend = build_tokenizer({f"tokenizer.ggml.{key}": value for key, value in keys.items()}).backend
    found = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    expected = pieces if pre == "falcon" else [BYTES_ALONE.pre_tokenize_str(piece)[0][0] for piece in pieces]
    assert found == expected


@pytest.mark.parametrize(
    ("architecture", "pre", "is_composed"),
    [("gptneox", None, True), ("gptneox", "olmo", True), ("gptj", None, False), ("gpt2", None, False)],
)
def test_old_files_and_normal_form(architecture, pre, is_composed):
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    keys = {"model": "gpt2", "tokens": tokens, "merges": []} | ({"pre": pre} if pre else {})
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    backend = build_tokenizer(metadata | {"general.architecture": architecture}).backend
    text = "e\u0301 12"
    expected = BYTES.pre_tokenize_str("é 12" if is_composed else text)
    assert backend.encode(text).tokens == list("".join(piece for piece, _ in expected))


def test_who_takes_whole_pieces_and_bos():
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<s>"]
    keys = {"model": "gpt2", "tokens": tokens, "merges": [], "bos_token_id": len(tokens) - 1}
    for pre, ids in (("llama-bpe", ["<s>", "ab"]), ("dbrx", ["a", "b"])):
        backend = build_tokenizer(
            {f"tokenizer.ggml.{key}": value for key, value in (keys | {"pre": pre}).items()}
        ).backend
        assert backend.encode("ab").tokens == ids
