"""What a model directory says about its tokenizer, against the `tokenizers` library and transformers' generic class."""

import json
import subprocess
import sys

import pytest
import tiny_tokenizer
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors

from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.tokenizer import Tokenizer

TEXTS = (
    *tiny_tokenizer.TEXTS,
    "f(x):\n\treturn",
    "12345 67",
    "don't",
    "the\u0301 ﬁ",
    "a<s>b</s>",
    "<|im_start|>x<|im_end|>",
)
USER = {"role": "user", "content": "hi"}


def write(folder, **files):
    """Write files of a directory; their names have two underscores for the dot."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def llama3_like():
    """Return a byte-level tokenizer with digits by three and whole words before merges."""
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "Ġt", "Ġthe", ":Ċ", "Ċĉ"]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    merges = [("1", "2"), ("Ġ", "t"), (":", "Ċ"), ("Ċ", "ĉ")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def gemma_like():
    """Return one with U+2581 for spaces, none of which it adds before a text."""
    pieces = [
        "<unk>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *"abcdefghinoprtux12",
        "th",
        "\u2581\u2581",
    ]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    bpe = models.BPE(vocab=vocabulary, merges=[("t", "h"), ("\u2581", "\u2581")], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    return tokenizer


def unigram():
    """Return one as sentencepiece's unigram models have it."""
    pieces = [
        ("<unk>", 0.0),
        ("\u2581", -2.0),
        ("\u2581the", -3.0),
        *((letter, -4.0) for letter in "abcdefghinoprtux12"),
    ]
    pieces += [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    return tokenizer


KINDS = {"llama3": llama3_like, "gemma": gemma_like, "unigram": unigram}
CLASSES = (
    *(None, "PreTrainedTokenizerFast", "GPT2Tokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "GemmaTokenizerFast"),
    *("CohereTokenizer", "BertTokenizer", "T5Tokenizer", "TokenizerOfNobody"),
)
MODEL_TYPES = (
    *(None, "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "gemma", "gemma2", "gemma3_text", "phi"),
    *(
        *("phi3", "gpt2", "gpt_neox", "gptj", "opt", "bloom", "falcon", "cohere", "glm", "glm4", "olmo2", "olmo3"),
        *("stablelm",),
    ),
    *("starcoder2", "granite", "deepseek_v2", "deepseek_v3", "gpt_oss", "model_of_nobody"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizer_json_is_the_tokenizer(kind, tmp_path):
    """Whatever class or model it is said to be of."""
    reference = KINDS[kind]()
    write(tmp_path, tokenizer__json=reference.to_str())
    expected = [reference.encode(text).ids for text in TEXTS]
    texts = [reference.decode(ids) for ids in expected]
    for name in CLASSES:
        for model_type in MODEL_TYPES if name in (None, "GPT2Tokenizer") else (None, "llama", "qwen2"):
            config = {} if name is None else {"tokenizer_class": name}
            write(
                tmp_path, tokenizer_config__json=config, config__json={"model_type": model_type} if model_type else {}
            )
            tokenizer = Tokenizer.load(tmp_path)
            assert tokenizer.encode_batch(TEXTS) == expected, (name, model_type)
            assert [tokenizer.decode(ids) for ids in expected] == texts, (name, model_type)


def token(content, **fields):
    plain = {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return plain | fields


def test_gpt2_names_its_tokens_in_config_json_only(tmp_path):
    tokenizer = llama3_like()
    bos, eos = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    write(tmp_path, tokenizer__json=tokenizer.to_str(), config__json={"bos_token_id": bos, "eos_token_id": [eos]})
    assert Tokenizer.load(tmp_path).bos_token_id == bos
    write(tmp_path, config__json={"bos_token_id": 0, "eos_token_id": eos})  # 0 is an ordinary token
    ours = Tokenizer.load(tmp_path)
    assert (ours.bos_token_id, ours.eos_token_ids, ours.special_token_ids) == (None, (eos,), {bos, eos})
    write(tmp_path, tokenizer_config__json={"pad_token": "</s>"}, config__json={"bos_token_id": bos})
    assert Tokenizer.load(tmp_path).bos_token_id is None


def test_ids_that_contradict_tokenizer_json_are_reported(tmp_path, caplog):
    write(
        tmp_path,
        tokenizer__json=llama3_like().to_str(),
        tokenizer_config__json={"added_tokens_decoder": {"5": token("<s>", special=True)}},
    )
    assert Tokenizer.load(tmp_path).encode("<s>") == [261]
    assert "such as '<s>', other ids than tokenizer.json" in caplog.text


NOTHING = None
BYTES = processors.ByteLevel(trim_offsets=True)
BOS = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 261)])
EOS = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 262)])
END = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 263)])
ROBERTA = processors.RobertaProcessing(("</s>", 262), ("<s>", 261))


@pytest.mark.parametrize(
    ("processor", "options", "expected"),
    [
        (NOTHING, {}, "a"),
        (NOTHING, {"add_bos_token": True}, "<s>a"),
        (NOTHING, {"add_bos_token": True, "add_eos_token": True}, "<s>a</s>"),
        (BYTES, {"add_bos_token": True}, "<s>a"),  # DeepSeek's
        (BYTES, {"add_bos_token": False, "add_eos_token": False}, "a"),
        (BOS, {}, "<s>a"),
        (BOS, {"add_bos_token": None, "add_eos_token": None}, "<s>a"),
        (BOS, {"add_bos_token": True, "add_eos_token": False}, "<s>a"),
        (BOS, {"add_bos_token": True, "add_eos_token": True}, "<s>a</s>"),  # e5-mistral's
        (BOS, {"add_eos_token": True}, "<s>a</s>"),
        (BOS, {"add_bos_token": False}, "a"),
        (EOS, {"add_bos_token": True}, "<s>a</s>"),
        (EOS, {"add_eos_token": False}, "a"),
        (ROBERTA, {}, "<s>a</s>"),
        (ROBERTA, {"add_eos_token": False}, "<s>a"),
        (
            processors.Sequence([BYTES, END]),
            {"add_bos_token": False, "add_eos_token": False},
            "a<end>",
        ),  # Qwen3-Embedding's
        (processors.Sequence([BYTES, END]), {"add_bos_token": True}, "<s>a<end>"),
        (processors.Sequence([END, BOS]), {"add_eos_token": True}, "<s>a<end></s>"),
        (NOTHING, {"bos_token": "<new>", "add_bos_token": True}, "<new>a"),
        (NOTHING, {"bos_token": "<a:1 b>", "add_bos_token": True}, "<a:1 b>a"),
        (NOTHING, {"bos_token": "</s>", "add_bos_token": True, "add_eos_token": True}, "</s>a</s>"),
        (EOS, {"bos_token": "</s>", "add_bos_token": True, "add_eos_token": False}, "</s>a"),
        (BOS, {"eos_token": None, "add_eos_token": True}, "<s>a"),
    ],
)
def test_bos_and_eos_are_added_as_the_config_says(processor, options, expected, tmp_path, caplog):
    tokenizer = llama3_like()
    tokenizer.add_special_tokens(["<end>"])
    if processor is not None:
        tokenizer.post_processor = processor
    config = {"bos_token": "<s>", "eos_token": "</s>", **options}
    write(tmp_path, tokenizer__json=tokenizer.to_str(), tokenizer_config__json=config)
    ours = Tokenizer.load(tmp_path)
    ids = ours.encode("a")
    assert ours.decode(ids, skip_special_tokens=False) == expected
    assert ours.encode("a", add_special_tokens=False) == [ids[len(ours.affixes.before)]]
    assert ours.encode("") == [*ours.affixes.before, *ours.affixes.after]
    assert len(ours.affixes.before) + 1 + len(ours.affixes.after) == len(ids)
    assert ("has no effect without eos_token" in caplog.text) == (config["eos_token"] is None)
    ours.save(tmp_path)
    assert Tokenizer.load(tmp_path).encode("a") == ids


def test_pairs_have_what_single_texts_have(tmp_path):
    tokenizer = llama3_like()
    tokenizer.post_processor = BOS
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_eos_token": True}
    write(tmp_path, tokenizer__json=tokenizer.to_str(), tokenizer_config__json=config)
    ours = Tokenizer.load(tmp_path)
    assert ours.decode(ours._backend.encode("a", "b").ids, skip_special_tokens=False) == "<s>a</s><s>b</s>"


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("llama3", {"add_prefix_space": True}, "add_prefix_space contradicts"),
        ("llama3", {"add_prefix_space": False, "clean_up_tokenization_spaces": True}, None),
        ("gemma", {"add_prefix_space": True}, "add_prefix_space contradicts"),
        ("gemma", {"add_prefix_space": None}, None),
        ("unigram", {"add_prefix_space": False}, "add_prefix_space contradicts"),
        ("unigram", {"add_prefix_space": True}, None),
        ("unigram", {"clean_up_tokenization_spaces": True}, "clean_up_tokenization_spaces is not followed"),
    ],
)
def test_what_tokenizer_json_supersedes_is_reported(kind, config, message, tmp_path, caplog):
    reference = KINDS[kind]()
    write(tmp_path, tokenizer__json=reference.to_str(), tokenizer_config__json=config)
    assert Tokenizer.load(tmp_path).encode("the .") == reference.encode("the .").ids
    assert [message in record.message for record in caplog.records] == ([] if message is None else [True])


class TestChatTemplates:
    @pytest.mark.parametrize(
        ("files", "plain", "with_tools"),
        [
            ({"config": "config"}, "config", "config"),
            ({"config": "config", "file": "file"}, "file", "file"),
            ({"file": "file"}, "file", "file"),
            ({"config": {"default": "d", "tool_use": "t"}}, "d", "t"),
            ({"config": [{"name": "default", "template": "d"}, {"name": "rag", "template": "r"}]}, "d", "d"),
            ({"file": "file", "more": {"tool_use": "t", "rag": "r"}}, "file", "t"),
            ({"config": "config", "more": {"tool_use": "t"}}, "config", "t"),
            ({"config": {"tool_use": "t"}}, None, "t"),
        ],
    )
    def test_where_they_come_from(self, files, plain, with_tools, tmp_path):
        write(tmp_path, tokenizer__json=llama3_like().to_str())
        write(tmp_path, tokenizer_config__json={"chat_template": files.get("config")})
        if "file" in files:
            write(tmp_path, chat_template__jinja=files["file"])
        if "more" in files:
            write(tmp_path / "additional_chat_templates", **{f"{name}__jinja": t for name, t in files["more"].items()})
        for again in (False, True):
            tokenizer = Tokenizer.load(tmp_path)
            assert tokenizer.has_chat_template
            assert tokenizer.chat_template == plain
            assert tokenizer.render_chat_template([USER], tools=[{}]) == with_tools
            if plain is None:
                with pytest.raises(InvalidRequest, match="name one of tool_use"):
                    tokenizer.render_chat_template([USER])
            else:
                assert tokenizer.render_chat_template([USER]) == plain
            if not again:
                tokenizer.save(tmp_path)

    def test_one_may_be_named(self, tmp_path):
        templates = {"default": "d", "rag": "r"}
        write(tmp_path, tokenizer__json=llama3_like().to_str(), tokenizer_config__json={"chat_template": templates})
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer.render_chat_template([USER], chat_template="rag") == "r"
        assert tokenizer.with_chat_template("rag").render_chat_template([USER]) == "r"

    def test_a_file_that_is_no_text_is_named(self, tmp_path):
        write(tmp_path, tokenizer__json=llama3_like().to_str())
        (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
        with pytest.raises(CheckpointError, match=r"cannot read .*chat_template\.jinja: "):
            Tokenizer.load(tmp_path)


def test_transformers_is_not_imported_where_tokenizer_json_is(tmp_path):
    """It takes seconds of each process of a server."""
    folder = tiny_tokenizer.byte_level(tmp_path)
    program = (
        "import sys; import jaxserve.server.process.worker; from jaxserve.tokenizer import Tokenizer\n"
        f"tokenizer = Tokenizer.load({str(folder)!r})\n"
        f"tokenizer.render_chat_template([{USER!r}])\n"
        "print('transformers' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


def test_without_tokenizer_json_transformers_makes_the_tokenizer(tmp_path):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: i for i, piece in enumerate([*alphabet, "th", "<|endoftext|>"])}
    write(tmp_path, vocab__json=vocabulary, merges__txt="#version: 0.2\nt h\n", config__json={"model_type": "gpt2"})
    write(tmp_path, tokenizer_config__json={"tokenizer_class": "GPT2Tokenizer"}, chat_template__jinja="{{ eos_token }}")
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("th") == [256]
    assert tokenizer.eos_token_ids == (257,)
    assert tokenizer.render_chat_template([USER]) == "<|endoftext|>"
