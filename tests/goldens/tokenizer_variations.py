"""What the companions of a tokenizer.json may say: for each field that transformers reads, other values of it.

`tests/loading/test_tokenizer_variations.py` has transformers read each of them. A field that transformers begins to
read is added here; the test names it.
"""

TYPED = {"__type": "AddedToken"}


def token(content, **fields):
    """Return a token as the files spell one."""
    return {
        "content": content,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "single_word": False,
        "special": True,
        **fields,
    }


MATCHING = ("lstrip", "rstrip", "normalized", "single_word", "special")
FLAGS = (True, False, None)
NEW, OLD, PIECE = "<new>", "</s>", "the"
"""A token that no vocabulary has, one that all have as a special one, and one that all have as an ordinary one."""

ROLE = (NEW, OLD, PIECE, token(NEW, lstrip=True, **TYPED), token(OLD, rstrip=True, **TYPED), token(NEW), None)
LIST = (
    [NEW, "<x>"],
    [PIECE],
    [OLD],
    [token(NEW, rstrip=True, **TYPED), "<x>"],
    [token(NEW, normalized=True, lstrip=True, special=False, **TYPED)],
    [token(PIECE, special=False, **TYPED), token(OLD, special=False, **TYPED)],
    {"image_token": NEW, "boi_token": PIECE},
    {"image_token": token(NEW, lstrip=True, **TYPED)},
    [],
    {},
    None,
)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

CONFIG = {
    **dict.fromkeys((*ROLES, "image_token", "audio_bos_token"), ROLE),
    **dict.fromkeys(("additional_special_tokens", "extra_special_tokens"), LIST),
    "model_specific_special_tokens": ({"image_token": NEW}, {"image_token": PIECE}, {}, None),
    "added_tokens_decoder": (
        {"900": token(NEW), "901": token("<x>", special=False)},
        {"1": token("<s>", lstrip=True)},
        {"2": token("</s>", special=False)},
        {"900": token(PIECE)},
        *({"900": token(NEW, special=False) | {name: True}} for name in MATCHING),
        *({"900": token(name, special=False, single_word=True)} for name in ("upon", "on")),
        {},
        None,
    ),
    "chat_template": (
        TEMPLATE,
        {"default": TEMPLATE, "tool_use": "tools"},
        [{"name": "default", "template": TEMPLATE}, {"name": "tool_use", "template": "tools"}],
        {"tool_use": "tools"},
        "",
        None,
    ),
    "split_special_tokens": FLAGS,
    "clean_up_tokenization_spaces": FLAGS,
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": FLAGS,
    "add_prefix_space": FLAGS,
    "add_bos_token": FLAGS,
    "add_eos_token": FLAGS,
    "fix_mistral_regex": FLAGS,
    "chat_control_tokens": ([OLD], [], None),
    "response_template": ("{{ x }}", None),
    "response_schema": ({"type": "object"}, None),
    "model_max_length": (3, 1e30, None),
    "max_len": (3, None),
    "max_length": (3, None),
    "padding_side": ("left", "right"),
    "truncation_side": ("left", "right"),
    "truncation_strategy": ("only_first", None),
    "stride": (1, None),
    "pad_to_multiple_of": (8, None),
    "pad_token_type_id": (3, None),
    "tokenizer_padding": (None,),
    "tokenizer_truncation": (None,),
    "model_input_names": (["input_ids"],),
    "processor_class": ("SomeProcessor", None),
    "tokenizer_class": ("PreTrainedTokenizerFast", "LlamaTokenizer", None),
    "name_or_path": ("some/model", None),
    "auto_map": ({"AutoTokenizer": ["a.B", None]},),
    "verbose": FLAGS,
    "backend": ("tokenizers",),
    "unk_id": (3, None),
    "add_sep_token": FLAGS,
    "legacy": FLAGS,
    "use_default_system_prompt": FLAGS,
    "do_lower_case": FLAGS,
    "no_such_field": (1, None),
}
"""Other values of each field of tokenizer_config.json."""

OLD_MAP = {
    **dict.fromkeys((*ROLES, "image_token"), (NEW, OLD, PIECE, token(NEW, lstrip=True), token(OLD, rstrip=True))),
    "additional_special_tokens": LIST,
    "extra_special_tokens": LIST,
    "add_sep_token": (True, False),
}
"""Those of special_tokens_map.json, which tokenizer_config.json does not supersede before transformers 4.34."""

FILES = {
    "added_tokens.json": ({NEW: 900, "<x>": 901}, {NEW: 900, "</s>": 2}, {"</s>": 900, "<s>": 900}, {PIECE: 900}, {}),
    "chat_template.jinja": (TEMPLATE, "{{ eos_token }}", ""),
    "additional_chat_templates/tool_use.jinja": ("tools", TEMPLATE),
    "special_tokens_map.json": ({}, {"eos_token": OLD, "pad_token": NEW}),
}
"""Other contents of whole files."""

REPORTED = ("add_prefix_space", "clean_up_tokenization_spaces")
"""Fields that are not followed where transformers follows them; the log names them."""
OPTIONS = ("add_bos_token", "add_eos_token")
"""Fields that are followed, and that transformers 5 reads over where there is a tokenizer.json."""
NOT_OF_FILES = {
    *("tokenizer_object", "tokenizer_file", "vocab_file", "merges_file", "vocab", "merges", "gguf_file", "init_inputs"),
    *("post_processor", "_json_truncation", "_json_padding", "_spm_precompiled_charsmap", "is_local", "tokenizer"),
    *("local_files_only", "added_tokens_file", "files_loaded"),
}
"""Arguments of transformers' classes that hold objects of Python, and where files are."""
