"""Each field of a tokenizer's companions that transformers reads changes what it does there, or is refused or logged.

`goldens/tokenizer_variations.py` has other values of each field. transformers, which needs no torch for this, reads
each of them here.
"""

import inspect
import json
import re

import pytest
import tiny_tokenizer
import tokenizers
import transformers
from tokenizer_variations import CONFIG, FILES, MATCHING, NEW, NOT_OF_FILES, OLD_MAP, OPTIONS, REPORTED, TEMPLATE
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.tokenizer import Tokenizer

TEXTS = (
    *tiny_tokenizer.TEXTS,
    f"a {NEW} b{NEW}c<x> <x>d",
    "a <s> b </s> c<|im_end|>",
    "the upon on , . it 's 1",
    "do n't THE The",
    "once\tupon</s></s>",
)
CHATS = (
    [{"role": "user", "content": "hi </s>"}],
    [{"role": "user", "content": "a"}, {"role": "system", "content": ""}],
)
NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token", "image_token")
NAMED = "{% for name in [" + ", ".join(NAMES) + ", boi_token, audio_bos_token] %}{{ name }}|{% endfor %}"
PIECES = [*(chr(code) for code in range(0x20, 0x7F)), "the", "on", "upon"]


def byte_level(folder):
    """Write one with BOS before every text, as Llama 3 has it."""
    tiny_tokenizer.byte_level(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.save(str(folder / "tokenizer.json"))
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE})


def unigram(folder):
    """Write one as sentencepiece's unigram models have it, with an EOS after every text."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0), ("▁the", -3.0)]
    pieces += [(piece, -4.0) for piece in PIECES[1:]] + [(f"<0x{byte:02X}>", -9.0) for byte in range(256)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "</s>", "unk_token": "<unk>", "added_tokens_decoder": {}}
    write(folder, "tokenizer_config.json", config | {"additional_special_tokens": ["<y>"]})


def old_files(folder):
    """Write one of a transformers before 4.34."""
    tiny_tokenizer.sentencepiece(folder)
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    write(folder, "special_tokens_map.json", {"bos_token": "<s>", "unk_token": "<unk>", "pad_token": "<p>"})
    write(folder, "added_tokens.json", {"<p>": 900, "<q>": 901})


BASES = {"byte_level": byte_level, "unigram": unigram, "old_files": old_files}


def write(folder, name, content):
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


def probe(tokenizer, *, encode, decode, render, special, role_ids):
    """Return all that a user of a tokenizer sees of these files, in one form for both implementations."""
    seen = {"special": special, **role_ids}
    for text in TEXTS:
        for adds in (True, False):
            seen["ids", text, adds] = ids = encode(text, adds)
            for skips in (True, False):
                seen["text", text, adds, skips] = decode(ids, skips)
    for index, chat in enumerate(CHATS):
        for tools in (None, [{"type": "function"}]):
            seen["chat", index, bool(tools)] = render(chat, tools, None)
    seen["names"] = render(CHATS[0], None, NAMED)
    return seen


def of_transformers(folder):
    """Return what transformers makes of a folder, None if it refuses it."""
    try:
        tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception:
        return None

    def render(chat, tools, template):
        try:
            return tokenizer.apply_chat_template(
                chat, tools=tools, chat_template=template, tokenize=False, add_generation_prompt=True
            )
        except ValueError:
            return None

    return probe(
        tokenizer,
        encode=lambda text, adds: tokenizer(text, add_special_tokens=adds)["input_ids"],
        decode=lambda ids, skips: tokenizer.decode(ids, skip_special_tokens=skips),
        render=render,
        special={i for i, added in tokenizer.added_tokens_decoder.items() if added.special},
        role_ids={"bos": tokenizer.bos_token_id, "eos": tokenizer.eos_token_id, "size": len(tokenizer)},
    )


def of_ours(folder):
    """Return what jaxserve makes of a folder, None if it refuses it."""
    try:
        tokenizer = Tokenizer.load(folder)
    except CheckpointError:
        return None

    def render(chat, tools, template):
        try:
            return tokenizer.render_chat_template(chat, tools=tools, chat_template=template)
        except InvalidRequest:
            return None

    eos = (*tokenizer.eos_token_ids, None)[0]
    return probe(
        tokenizer,
        encode=tokenizer.encode,
        decode=lambda ids, skips: tokenizer.decode(ids, skip_special_tokens=skips),
        render=render,
        special=set(tokenizer.special_token_ids),
        role_ids={"bos": tokenizer.bos_token_id, "eos": eos, "size": tokenizer.vocab_size},
    )


def differences(ours, theirs):
    """Return what differs; a chat may be refused here or there, such as one of an empty template."""
    return [
        (key, ours[key], value)
        for key, value in theirs.items()
        if ours[key] != value and not (key[0] == "chat" and None in (value, ours[key]))
    ][:2]


def rows():
    for file, table in {"tokenizer_config.json": CONFIG, "special_tokens_map.json": OLD_MAP}.items():
        for name, values in table.items():
            yield from ((file, name, value) for value in values)
    for file, contents in FILES.items():
        yield from ((file, None, content) for content in contents)


@pytest.fixture(params=BASES)
def base(request, tmp_path):
    BASES[request.param](tmp_path)
    return tmp_path


def test_bases_are_as_in_transformers(base):
    assert of_ours(base) == of_transformers(base)


def test_what_changes_in_transformers_changes_alike(base, caplog):
    """And where nothing changes there, nothing does here."""
    wrong = []
    for file, name, value in rows():
        if name in OPTIONS:
            continue
        before = (base / file).read_text() if (base / file).exists() else None
        write(base, file, value if name is None else json.loads(before or "{}") | {name: value})
        caplog.clear()
        theirs, ours = of_transformers(base), of_ours(base)
        differing = "refused" if ours is None else differences(ours, theirs or ours)
        if theirs is not None and differing and not (name in REPORTED and name in caplog.text):
            wrong.append((file, name, value, differing))
        if before is None:
            (base / file).unlink()
        else:
            (base / file).write_text(before)
    assert wrong == []


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_followed_though_transformers_reads_over_them(base, name):
    config = json.loads((base / "tokenizer_config.json").read_text())
    seen = []
    for value in (True, False):
        write(base, "tokenizer_config.json", {"bos_token": "<s>"} | config | {name: value})
        tokenizer = Tokenizer.load(base)
        token_id = tokenizer.bos_token_id if name == "add_bos_token" else tokenizer.eos_token_ids[0]
        seen.append(tokenizer.encode("on")[0 if name == "add_bos_token" else -1] == token_id)
    assert seen == [True, False]


def test_no_field_that_transformers_reads_is_forgotten():
    base, fast = transformers.PreTrainedTokenizerBase, transformers.PreTrainedTokenizerFast
    readers = (base.__init__, base._from_pretrained, fast.__init__, fast.convert_to_native_format)
    text = "\n".join(map(inspect.getsource, readers))
    read = set(re.findall(r'kwargs(?:\.pop|\.get|\.setdefault)?[(\[]\s*"(\w+)"', text))
    read |= set(re.findall(r'"(\w+)" (?:not )?in \w*kwargs', text)) | set(re.findall(r'key == "(\w+)"', text))
    read |= {*base.SPECIAL_TOKENS_ATTRIBUTES}
    assert {"bos_token", "chat_template", "model_max_length", "extra_special_tokens"} < read
    assert read - CONFIG.keys() - NOT_OF_FILES == set()
    assert {*tokenizers.AddedToken("x").__getstate__()} == {"content", *MATCHING}
