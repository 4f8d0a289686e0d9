"""Fields that hold a list where an object should be, or the like, as a file edited by hand has them."""

import json

import pytest
import tiny_tokenizer

from jaxserve.errors import CheckpointError
from jaxserve.loading.json_files import read_object
from jaxserve.tokenizer import Tokenizer

OBJECTS = {"rope_scaling", "rope_parameters", "quantization_config", "auto_map", "id2label", "label2id"}
IDS = "a token id or a list of them"
WRONG = [
    *[("config.json", name, value, "an object") for name in sorted(OBJECTS) for value in ([], "x", 5)],
    ("config.json", "architectures", "x", "a list of texts"),
    ("config.json", "architectures", {}, "a list of texts"),
    ("config.json", "layer_types", "full", "a list of texts"),
    ("config.json", "layer_types", [{}], "a list of texts"),
    ("config.json", "model_type", ["llama"], "a text"),
    ("config.json", "torch_dtype", [], "a text"),
    ("config.json", "dtype", {}, "a text"),
    ("config.json", "num_labels", [], "an integer"),
    ("config.json", "eos_token_id", {}, IDS),
    ("generation_config.json", "eos_token_id", {}, IDS),
    ("generation_config.json", "eos_token_id", [[1]], IDS),
    *[
        ("tokenizer_config.json", "added_tokens_decoder", value, "an object of tokens by id")
        for value in ([], {"a": "x"}, {"1": 5}, {"1": {"special": True}})
    ],
    ("tokenizer_config.json", "bos_token", 5, "a token"),
    ("tokenizer_config.json", "eos_token", {"lstrip": True}, "a token"),
    *[
        ("tokenizer_config.json", name, value, "true or false")
        for name in ("add_bos_token", "add_eos_token", "fix_mistral_regex")
        for value in ("yes", 1)
    ],
    ("special_tokens_map.json", "pad_token", [], "a token"),
    ("special_tokens_map.json", "additional_special_tokens", "x", "a list of tokens or an object of them"),
    ("tokenizer_config.json", "additional_special_tokens", "x", "a list of tokens or an object of them"),
    ("tokenizer_config.json", "additional_special_tokens", [1], "a list of tokens or an object of them"),
    ("tokenizer_config.json", "extra_special_tokens", {"a": 1}, "a list of tokens or an object of them"),
    ("tokenizer_config.json", "auto_map", [], "an object or a list of two"),
    ("tokenizer_config.json", "chat_template", 5, "a text or a list of objects with name and template"),
    ("tokenizer_config.json", "chat_template", [{}], "a text or a list of objects with name and template"),
    ("tokenizer_config.json", "init_inputs", 5, "a list"),
    ("tokenizer_config.json", "model_input_names", 5, "a list of texts"),
    ("tokenizer_config.json", "split_special_tokens", [], "true or false"),
    ("tokenizer_config.json", "tokenizer_class", [], "a text"),
]
FITTING = [
    ("config.json", "rope_scaling", {"type": "linear", "factor": 2.0}),
    ("config.json", "eos_token_id", [1, 2]),
    ("tokenizer_config.json", "additional_special_tokens", ["<|im_end|>", {"content": "<|im_start|>", "lstrip": True}]),
    ("tokenizer_config.json", "extra_special_tokens", {"image_token": "<|im_end|>"}),
    ("tokenizer_config.json", "auto_map", ["a.Slow", None]),
    ("tokenizer_config.json", "chat_template", [{"name": "default", "template": "a"}]),
    ("tokenizer_config.json", "chat_template", {"default": "a"}),
]


@pytest.mark.parametrize(("file", "name", "value", "words"), WRONG)
def test_what_does_not_fit_is_named_with_its_field(file, name, value, words, tmp_path):
    path = tmp_path / file
    path.write_text(json.dumps({name: value}))
    with pytest.raises(CheckpointError) as caught:
        read_object(path)
    assert str(caught.value) == f"{path}: {name} must be {words}, got {value!r}"


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("config.json", "quantization_config"),
        ("generation_config.json", "eos_token_id"),
        ("tokenizer_config.json", "chat_template"),
    ],
)
def test_it_is_named_when_a_tokenizer_is_made(file, name, tmp_path):
    path = tiny_tokenizer.byte_level(tmp_path) / file
    path.write_text(json.dumps({name: [{}]}))
    with pytest.raises(CheckpointError, match=f"^{path}: {name} must be "):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(("file", "name", "value"), [*FITTING, *[(file, name, None) for file, name, *_ in WRONG]])
def test_what_may_stand_there_does(file, name, value, tmp_path):
    path = tmp_path / file
    path.write_text(json.dumps({name: value}))
    assert read_object(path) == {name: value}
