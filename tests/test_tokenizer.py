import json
import pathlib
import threading

import pytest
import tiny_tokenizer
from depths import examples, quick_only
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import CheckpointError, InvalidRequest
from jaxserve.tokenizer import IncrementalDetokenizer, Tokenizer, read_generation_config

REPLACEMENT = "\ufffd"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return Tokenizer.load(tiny_tokenizer.byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    return Tokenizer.load(tiny_tokenizer.sentencepiece(tmp_path_factory.mktemp("sentencepiece")))


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def detokenize_in_steps(tokenizer, token_ids, **options):
    """Return the text after each token, and at last after the flush."""
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    text, steps = "", []
    for token_id in token_ids:
        text += detokenizer.push(token_id)
        steps.append(text)
    return [*steps, text + detokenizer.flush()]


def assert_steps_equal_decode(tokenizer, token_ids):
    """At each step all complete characters are there; at the end all that decode() shows.

    Before the end, decode() of byte-fallback tokens spoils complete characters next to an incomplete one, so that the
    steps are compared with the bytes of the tokens.
    """
    *steps, whole = detokenize_in_steps(tokenizer, token_ids)
    visible = [tokenizer.token_bytes(i) if i not in tokenizer.special_token_ids else b"" for i in token_ids]
    for i, text in enumerate(steps, 1):
        so_far = tokenizer.decode(token_ids[:i])
        if tokenizer.strips_first_space:
            so_far = b"".join(visible[:i]).decode(errors="replace").removeprefix(" ")
        assert so_far.startswith(text)
        held_back = so_far[len(text) :]
        # Of the three bytes of a lone surrogate, which is no character, the decoder holds two until it sees the third.
        assert held_back in ("", REPLACEMENT, 2 * REPLACEMENT), "only an incomplete character may be held back"
    assert whole == tokenizer.decode(token_ids)


class TestText:
    @pytest.mark.parametrize("text", tiny_tokenizer.TEXTS)
    def test_round_trip(self, tokenizer, text):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text

    def test_batch_equals_single(self, tokenizer):
        assert tokenizer.encode_batch(tiny_tokenizer.TEXTS) == [tokenizer.encode(text) for text in tiny_tokenizer.TEXTS]

    def test_bos_is_added_where_the_model_wants_it(self, byte_level, sentencepiece):
        assert sentencepiece.encode("the")[0] == sentencepiece.bos_token_id == 1
        assert 1 not in sentencepiece.encode("the", add_special_tokens=False)
        assert sentencepiece.adds_bos
        assert byte_level.encode("") == []
        assert not byte_level.adds_bos

    def test_special_tokens_are_skipped_or_not(self, byte_level):
        ids = byte_level.encode("a<|im_end|>b<|tool|>")
        assert byte_level.decode(ids) == "ab<|tool|>"
        assert byte_level.decode(ids, skip_special_tokens=False) == "a<|im_end|>b<|tool|>"
        assert detokenize_in_steps(byte_level, ids)[-1] == "ab<|tool|>"
        assert detokenize_in_steps(byte_level, ids, skip_special_tokens=False)[-1] == "a<|im_end|>b<|tool|>"

    def test_ids_beyond_the_vocabulary_have_no_text(self, tokenizer):
        unknown = tokenizer.max_token_id + 1000
        ids = [*tokenizer.encode("the"), unknown, *tokenizer.encode("n", add_special_tokens=False)]
        assert tokenizer.token_bytes(unknown) == b""
        assert detokenize_in_steps(tokenizer, ids)[-1] == tokenizer.decode(ids)
        with pytest.raises(InvalidRequest, match="negative"):
            tokenizer.decode([-1])

    @pytest.mark.parametrize("method", ["encode", "encode_plain", "decode"])
    def test_other_threads_go_on_meanwhile(self, byte_level, method):
        """The tokenizer has to release the interpreter's lock, or no other thread runs."""
        text = "the upon a " * 100_000
        given = byte_level.encode(text) if method == "decode" else text
        begun, ended = threading.Event(), threading.Event()
        turns = 0

        def work():
            begun.set()
            getattr(byte_level, method)(given)
            ended.set()

        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        while not ended.wait(0.0005):
            turns += 1
        thread.join()
        assert turns > 10

    def test_lone_surrogates_are_refused(self, tokenizer):
        with pytest.raises(InvalidRequest, match="Unicode") as caught:
            tokenizer.encode("broken \ud83d emoji")
        assert caught.value.param == "prompt"

    def test_sizes(self, byte_level):
        assert byte_level.vocab_size == 256 + 8 + 3
        assert byte_level.max_token_id == byte_level.vocab_size - 1
        assert len(byte_level.special_token_ids) == 2


class TestTokenBytes:
    def test_bytes_of_all_tokens_make_the_text(self, tokenizer):
        for text in tiny_tokenizer.TEXTS:
            ids = tokenizer.encode(text, add_special_tokens=False)
            whole = b"".join(map(tokenizer.token_bytes, ids)).decode()
            assert whole.removeprefix(" " if tokenizer.strips_first_space else "") == text

    def test_parts_of_characters(self, tokenizer):
        ids = tokenizer.encode("a🦙", add_special_tokens=False)[-4:]
        assert [tokenizer.token_bytes(i) for i in ids] == [b"\xf0", b"\x9f", b"\xa6", b"\x99"]
        assert {tokenizer.token_text(i) for i in ids} == {REPLACEMENT}

    def test_spaces(self, sentencepiece, byte_level):
        for tokenizer in (sentencepiece, byte_level):
            (token_id,) = tokenizer.encode("the upon", add_special_tokens=False)[-1:]
            assert tokenizer.token_text(token_id) == " upon"


class TestIncrementalDetokenizer:
    @pytest.mark.parametrize("text", tiny_tokenizer.TEXTS)
    def test_equals_decode_at_every_step(self, tokenizer, text):
        assert_steps_equal_decode(tokenizer, tokenizer.encode(text))

    @settings(max_examples=examples(200))
    @given(data=st.data())
    def test_arbitrary_ids_equal_decode(self, byte_level, data):
        ids = data.draw(st.lists(st.integers(0, byte_level.max_token_id), max_size=40))
        assert_steps_equal_decode(byte_level, ids)

    @settings(max_examples=examples(200))
    @given(text=st.text(max_size=30))
    def test_arbitrary_texts(self, sentencepiece, text):
        assert_steps_equal_decode(sentencepiece, sentencepiece.encode(text))

    @settings(max_examples=examples(200))
    @given(prompt=st.text(max_size=8), ids=st.lists(st.integers(0, 360), max_size=12))
    def test_broken_bytes_stop_nothing(self, sentencepiece, prompt, ids):
        """decode() turns a whole run of bytes into U+FFFD if one is wrong; a stream cannot know that in time."""
        prompt_ids = sentencepiece.encode(prompt)
        whole = detokenize_in_steps(sentencepiece, ids, prompt_token_ids=prompt_ids)[-1]
        expected = b"".join(sentencepiece.token_bytes(i) for i in ids if i not in sentencepiece.special_token_ids)
        expected_text = expected.decode(errors="replace")
        if prompt_ids == [1]:
            expected_text = expected_text.removeprefix(" ")
        assert whole == expected_text

    def test_half_a_surrogate_is_held_back_and_flushed(self, byte_level):
        half = [i for byte in (b"\xed", b"\xa1") for i in range(256) if byte_level.token_bytes(i) == byte]
        assert_steps_equal_decode(byte_level, half)
        assert_steps_equal_decode(byte_level, [*half, *byte_level.encode("x")])

    def test_flush_shows_what_was_left_incomplete(self, byte_level):
        ids = byte_level.encode("x🦙")[:-1]
        assert detokenize_in_steps(byte_level, ids)[-2:] == ["x", "x" + REPLACEMENT]
        assert byte_level.decode(ids) == "x" + REPLACEMENT

    def test_the_first_space_belongs_to_a_continuation(self, sentencepiece):
        prompt, whole = sentencepiece.encode("the"), sentencepiece.encode("the upon a")
        continuation = whole[len(prompt) :]
        assert detokenize_in_steps(sentencepiece, continuation, prompt_token_ids=prompt)[-1] == " upon a"
        assert detokenize_in_steps(sentencepiece, continuation, prompt_token_ids=[1])[-1] == "upon a"

    def test_a_character_begun_by_the_prompt(self, tokenizer):
        ids = tokenizer.encode("x🦙y", add_special_tokens=False)
        prompt, continuation = ids[:-3], ids[-3:]  # two bytes of the llama each
        assert detokenize_in_steps(tokenizer, continuation, prompt_token_ids=prompt)[-1] == "🦙y"

    @pytest.mark.parametrize("text", ["", "a", "{", "é", "🦙"])
    def test_a_character_that_only_the_prompt_has(self, tokenizer, text):
        ids = tokenizer.encode("x🦙", add_special_tokens=False)
        output = tokenizer.encode("x" + text, add_special_tokens=False)[
            len(tokenizer.encode("x", add_special_tokens=False)) :
        ]
        for prompt in (ids[:-1], [*ids[:-1], 1]):
            assert detokenize_in_steps(tokenizer, output, prompt_token_ids=prompt)[-1] == text

    def test_a_first_space_that_is_kept(self, sentencepiece):
        ids = sentencepiece.encode("the", add_special_tokens=False)
        for keeps in (False, True):
            text = detokenize_in_steps(sentencepiece, ids, prompt_token_ids=[1], keeps_first_space=keeps)[-1]
            assert text == " " * keeps + "the"


class TestChatTemplate:
    def test_text_and_ids(self, byte_level):
        text = byte_level.render_chat_template([USER])
        assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        ids = byte_level.encode(text, add_special_tokens=False)
        assert byte_level.decode(ids, skip_special_tokens=False) == text
        assert ids[0] in byte_level.special_token_ids

    def test_the_final_message_is_continued(self, byte_level):
        messages = [USER, {"role": "assistant", "content": "Well, "}]
        text = byte_level.render_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
        assert text.endswith("<|im_start|>assistant\nWell, ")

    @pytest.mark.parametrize(
        ("messages", "options", "message"),
        [
            ([], {}, "empty"),
            ([{"role": "robot", "content": ""}], {}, "no robots"),
            ([USER], {"continue_final_message": True}, "continue_final_message"),
            ([USER], {"chat_template": "{{ messages[7].content.x }}"}, "no element 7"),
            ([USER], {"chat_template": "{{ 1 + 'a' }}"}, "unsupported operand"),
            ([USER], {"chat_template": "{% for %}"}, "chat template"),
            ([USER], {"chat_template": "{{ messages.append(1) }}"}, "chat template"),
            ([USER], {"chat_template": "{{ ''.__class__.__mro__ }}"}, "chat template"),
            ([USER], {"template_kwargs": {"tokenize": True}}, "not a variable"),
        ],
    )
    def test_what_cannot_be_rendered_is_an_invalid_request(self, byte_level, messages, options, message):
        with pytest.raises(InvalidRequest, match=message) as caught:
            byte_level.render_chat_template(messages, **options)
        assert caught.value.param in ("messages", "chat_template_kwargs")

    def test_without_a_template(self, sentencepiece):
        assert not sentencepiece.has_chat_template
        with pytest.raises(InvalidRequest, match="no chat template"):
            sentencepiece.render_chat_template([USER])
        template = "the {{ messages[0].content }}"
        assert sentencepiece.render_chat_template([USER], chat_template=template) == "the hi"


class TestLoad:
    def test_a_directory_without_a_tokenizer(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        with pytest.raises(CheckpointError, match="no tokenizer in"):
            Tokenizer.load(tmp_path)

    def test_a_file_that_is_json_but_no_tokenizer(self, tmp_path):
        (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
        with pytest.raises(CheckpointError, match=f"cannot read the tokenizer in {tmp_path}: ") as caught:
            Tokenizer.load(tmp_path)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
    @pytest.mark.parametrize("content", ["", "{", "[1]"])
    def test_a_broken_file_is_named(self, tmp_path, name, content):
        path = tiny_tokenizer.byte_level(tmp_path) / name
        path.write_text(content)
        with pytest.raises(CheckpointError, match=f"^(cannot read )?{path}(: it is (empty|no JSON)| must hold)"):
            Tokenizer.load(tmp_path)

    def test_a_config_that_transformers_refuses_is_named_with_the_field(self, tmp_path):
        """Where there is no tokenizer.json, transformers needs the config."""
        path = tmp_path / "config.json"
        path.write_text('{"model_type": "llama", "hidden_size": "64"}')
        (tmp_path / "vocab.json").write_text('{"a": 0}')
        with pytest.raises(CheckpointError, match=f"^cannot read {path}: .*'hidden_size': .*expected int, got str"):
            Tokenizer.load(tmp_path)

    def test_an_unknown_decoder_is_named(self, tmp_path):
        path = tiny_tokenizer.byte_level(tmp_path) / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"decoder": {"type": "CTC", "pad_token": "<pad>",
            "word_delimiter_token": "|", "cleanup": True}}))  # fmt: skip
        with pytest.raises(CheckpointError, match="CTC"):
            Tokenizer.load(tmp_path)

    @pytest.mark.parametrize(("eos", "expected"), [(7, (265, 7)), ([265, 8], (265, 8)), (None, (265,))])
    def test_eos_of_the_generation_config(self, tmp_path, eos, expected):
        tiny_tokenizer.byte_level(tmp_path)
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        assert Tokenizer.load(tmp_path).eos_token_ids == expected

    @pytest.mark.parametrize("eos", ["</s>", [7, "</s>"], True, 1.5])
    def test_an_eos_that_is_no_token_id(self, tmp_path, eos):
        path = tiny_tokenizer.byte_level(tmp_path) / "generation_config.json"
        path.write_text(json.dumps({"eos_token_id": eos}))
        with pytest.raises(CheckpointError, match=f"^{path}: eos_token_id must be a token id or a list of them"):
            Tokenizer.load(tmp_path)

    @pytest.mark.parametrize("content", ["{", "[]"])
    def test_a_broken_generation_config(self, tmp_path, content):
        assert read_generation_config(tmp_path) == {}
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(CheckpointError, match="generation_config"):
            read_generation_config(tmp_path)


class TestPublishedVectors:
    """Texts with the token ids that llama.cpp expects of these tokenizers (which add no BOS)."""

    @pytest.mark.parametrize(
        ("name", "vectors", "said"),
        quick_only(
            [
                ("llama3", "ggml-vocab-llama-bpe.gguf", {}),
                ("llama3", "ggml-vocab-llama-bpe.gguf", {"tokenizer_class": "GPT2Tokenizer"}),
                ("llama3", "ggml-vocab-llama-bpe.gguf", {"model_type": "qwen2"}),
                ("llama3", "ggml-vocab-llama-bpe.gguf", {"model_type": "gemma3_text"}),
                ("qwen2", "ggml-vocab-qwen2.gguf", {}),
                ("qwen2", "ggml-vocab-qwen2.gguf", {"tokenizer_class": "LlamaTokenizer", "model_type": "gpt2"}),
            ],
            ("llama3", "ggml-vocab-llama-bpe.gguf", {"model_type": "qwen2"}),
            ("qwen2", "ggml-vocab-qwen2.gguf", {}),
        ),
    )
    def test_encode_and_detokenize(self, test_data, tmp_path, name, vectors, said):
        """Whatever class or type of model the companions name."""
        folder = test_data / "tokenizers"
        (tmp_path / "tokenizer.json").symlink_to(folder / f"{name}.tokenizer.json")
        for file, field in (("tokenizer_config.json", "tokenizer_class"), ("config.json", "model_type")):
            (tmp_path / file).write_text(json.dumps({key: value for key, value in said.items() if key == field}))
        tokenizer = Tokenizer.load(tmp_path)
        texts = (folder / "vectors" / f"{vectors}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
        lines = (folder / "vectors" / f"{vectors}.out").read_text().split("\n")
        assert len(texts) == len(lines) == 47
        for text, line in zip(texts, lines, strict=True):
            ids = [int(word) for word in line.split()]
            assert tokenizer.encode(text) == ids
            assert_steps_equal_decode(tokenizer, ids)

    def test_byte_fallback(self, test_data):
        tokenizer = Tokenizer.load(test_data / "models" / "stories260K")
        texts = (test_data / "tokenizers" / "vectors" / "ggml-vocab-qwen2.gguf.inp").read_bytes().decode()
        for text in texts.split("\n__ggml_vocab_test__\n"):
            ids = tokenizer.encode(text)
            assert_steps_equal_decode(tokenizer, ids)

    def test_templates_render_as_transformers_renders_them(self, test_data, tmp_path):
        from transformers.utils.chat_template_utils import render_jinja_template

        tokenizer = Tokenizer.load(tiny_tokenizer.byte_level(tmp_path))
        messages = [USER, {"role": "assistant", "content": "hello"}, {"role": "user", "content": "and?"}]
        parameters = {"type": "object", "properties": {"city": {"type": "string", "description": "where"}}}
        function = {"name": "weather", "description": "today", "parameters": parameters}
        tools = [{"type": "function", "function": function}]
        templates = sorted(pathlib.Path(test_data / "tokenizers" / "templates").glob("*.jinja"))
        assert len(templates) >= 10
        for path in templates:
            template = path.read_text()
            (expected,), _ = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=template,
                add_generation_prompt=True,
                bos_token="<s>",
                eos_token="<|im_end|>",
            )
            ours = tokenizer.render_chat_template(
                messages, tools=tools, chat_template=template, template_kwargs={"bos_token": "<s>"}
            )
            assert ours == expected, path.name
