"""The text part of checkpoints that read images or sound as well: their config and the names of their tensors. No jax.

Such a config holds that of the language model, and tensors of the language model have a prefix. Everything after
`text_fields` and `text_name` sees a checkpoint of the language model alone.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from jaxserve.errors import CheckpointError

Fields = dict[str, Any]

TEXT_OF = "text_of"
"""Field of the text's config that names the model type of the whole checkpoint."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wrapper:
    """A model type whose config has that of a language model inside.

    Attributes:
        text: the model type of the language model if its config has none.
        key: the name of the language model's config.
        is_flat: older configs have the fields of the language model beside the others.
        is_tied: the default of tie_word_embeddings; None if the language model's counts.
        defaults: the language model's fields that differ from its family's defaults.
    """

    text: str
    key: str = "text_config"
    is_flat: bool = False
    is_tied: bool | None = None
    defaults: Mapping[str, Any] = MappingProxyType({})

    @property
    def family(self) -> str:
        """The model type of the family that serves the language model if its config names none."""
        known = _TEXT_TYPES.get(self.text)
        return self.text if known is None else known.family


WRAPPERS: Mapping[str, Wrapper] = {
    "aya_vision": Wrapper(text="cohere2"),
    "cohere2_vision": Wrapper(text="cohere2"),
    "fast_vlm": Wrapper(text="qwen2"),
    "gemma3": Wrapper(text="gemma3_text", is_tied=True),
    "gemma3n": Wrapper(text="gemma3n_text", is_tied=True),
    "gemma4": Wrapper(text="gemma4_text", is_tied=True),
    "gemma4_unified": Wrapper(text="gemma4_unified_text", is_tied=True),
    "glm46v": Wrapper(text="glm4v_text"),
    "glm4v": Wrapper(text="glm4v_text"),
    "glm4v_moe": Wrapper(text="glm4v_moe_text", is_tied=False),
    "idefics3": Wrapper(text="llama"),
    "internvl": Wrapper(text="qwen2"),
    "internvl_chat": Wrapper(text="qwen2", key="llm_config"),
    "kimi_k25": Wrapper(text="deepseek_v3"),
    "kimi_vl": Wrapper(text="deepseek_v3"),
    "lfm2_vl": Wrapper(text="lfm2", is_tied=True),
    "llama4": Wrapper(text="llama4_text", is_tied=False),
    "llava": Wrapper(text="llama"),
    "llava_next": Wrapper(text="llama"),
    "llava_next_video": Wrapper(text="llama"),
    "llava_onevision": Wrapper(text="qwen2"),
    "mistral3": Wrapper(text="mistral"),
    "perception_lm": Wrapper(text="llama"),
    "qwen2_5_vl": Wrapper(text="qwen2_5_vl_text", is_flat=True),
    "qwen2_audio": Wrapper(text="qwen2"),
    "qwen2_vl": Wrapper(text="qwen2_vl_text", is_flat=True),
    "qwen3_5": Wrapper(text="qwen3_5_text"),
    "qwen3_5_moe": Wrapper(text="qwen3_5_moe_text", is_tied=False),
    "qwen3_vl": Wrapper(text="qwen3_vl_text"),
    "qwen3_vl_moe": Wrapper(text="qwen3_vl_moe_text", is_tied=False),
    "smolvlm": Wrapper(text="llama"),
    "video_llama_3": Wrapper(text="qwen2"),
    "vipllava": Wrapper(text="llama"),
    "voxtral": Wrapper(
        text="llama",
        defaults={
            "vocab_size": 131072,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "rms_norm_eps": 1e-05,
            "rope_theta": 100000000.0,
            "head_dim": 128,
        },
    ),
}
"""Model types whose text is served: without images the language model computes as it does alone."""

REFUSED: Mapping[str, str] = {
    "idefics": "its layers attend to images by cross-attention",
    "mllama": "some of its layers attend to images by cross-attention",
    "paligemma": "its prompts attend in both directions",
}
"""Multimodal model types whose text cannot be served, and why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _TextType:
    """A model type that only the config of a wrapper has: the family that serves it, and the fields that differ from
    that family's defaults.
    """

    family: str
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any] = MappingProxyType({})


_QWEN2_VL = _TextType(
    family="qwen2",
    defaults={
        "vocab_size": 152064,
        "hidden_size": 8192,
        "intermediate_size": 29568,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "max_window_layers": 80,
        "rope_theta": 1000000.0,
    },
)
_TEXT_TYPES: Mapping[str, _TextType] = {
    "gemma4_unified_text": _TextType(
        family="gemma4_text",
        defaults={"max_position_embeddings": 262144, "sliding_window": 1024},
        fixed={"hidden_size_per_layer_input": 0, "enable_moe_block": False},
    ),
    "glm4v_text": _TextType(
        family="glm4",
        defaults={"rms_norm_eps": 1e-05, "max_position_embeddings": 32768, "partial_rotary_factor": 1.0},
        fixed={"attention_bias": True, "head_dim": None},
    ),
    "glm4v_moe_text": _TextType(
        family="glm4_moe",
        defaults={"vocab_size": 151424, "max_position_embeddings": 65536, "attention_bias": True, "head_dim": None},
        fixed={"use_qk_norm": False},
    ),
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3_vl_text": _TextType(
        family="qwen3",
        defaults={
            "max_position_embeddings": 128000,
            "num_key_value_heads": 32,
            "rope_theta": 500000.0,
        },
        fixed={"use_sliding_window": False, "layer_types": None},
    ),
}
"""Model types of the language models of wrappers that are known families under another name."""

OF_BOTH = (
    *("architectures", "auto_map", "bos_token_id", "eos_token_id", "id2label", "label2id", "num_labels"),
    *("pad_token_id", "problem_type", "transformers_version", "classifier_from_token", "method"),
)
"""Fields that may stand beside the language model's config as well as in it; those beside it win."""
_QUANTIZATION = ("quantization_config", "compression_config", "quantization")
_DTYPES = ("dtype", "torch_dtype")
_TIED = ("tie_word_embeddings", "tie_embedding")
"""Names of the field that ties the LM head to the embedding, the second of which only LFM2 has."""

_LANGUAGE = ("language_model", "text_model")
_TOWERS = {
    *("audio_tower", "connector", "embed_audio", "embed_vision", "image_newline", "mlp1", "mm_projector"),
    *("multi_modal_projector", "projector", "vision_embedder", "vision_model", "vision_projection"),
    *("vision_resampler", "vision_tower", "visual"),
}
"""Modules of wrappers that only images and sound pass through."""
_HEADS = ("lm_head", "score")


def text_fields(fields: Fields) -> Fields:
    """Return the config of the language model in a wrapper's config.json; that of any other model type as it is.

    Raises CheckpointError if it is missing, or contradicts what stands beside it.
    """
    wrapper = WRAPPERS.get(str(fields.get("model_type")))
    if wrapper is None:
        return fields
    inner = fields.get(wrapper.key)
    if inner is None and wrapper.is_flat:
        inner = {name: value for name, value in fields.items() if not name.endswith("_config") and name != "model_type"}
    if not isinstance(inner, dict):
        raise CheckpointError(f"config.json: {wrapper.key} must be an object, got {inner!r:.100}")
    shared = {name: fields[name] for name in OF_BOTH if fields.get(name) is not None}
    shared |= next(({name: fields[name]} for name in _DTYPES if fields.get(name) is not None), {})
    shared |= _quantization(fields, inner, wrapper.key)
    is_tied = _is_tied(fields, inner, wrapper)
    text = {name: value for name, value in inner.items() if name not in _DTYPES or not shared.keys() & {*_DTYPES}}
    text = {**wrapper.defaults, **text, **shared, TEXT_OF: fields["model_type"]}
    text = {name: value for name, value in text.items() if name not in _TIED}
    return _as_family(text, wrapper) | ({} if is_tied is None else {"tie_word_embeddings": is_tied})


def _is_tied(fields: Fields, inner: Fields, wrapper: Wrapper) -> Any:
    """Return tie_word_embeddings: either of the two may say true, as transformers 4 wrote it into the inner one."""
    given = [(name, each[name]) for each in (fields, inner) for name in _TIED if each.get(name) is not None]
    for name, value in given:
        if not isinstance(value, bool):
            raise CheckpointError(f"config.json: {name} must be true or false, got {value!r:.100}")
    return any(value for _, value in given) if given else wrapper.is_tied


def _quantization(fields: Fields, inner: Fields, key: str) -> Fields:
    """Return the field that describes quantization, which may stand in either."""
    found: Fields = {}
    for name in _QUANTIZATION:
        outer, own = fields.get(name), inner.get(name)
        if outer and own and outer != own:
            raise CheckpointError(f"config.json: {name} and {key}.{name} contradict each other")
        if outer or own:
            found[name] = outer or own
    return found


def _as_family(text: Fields, wrapper: Wrapper) -> Fields:
    """Return the fields as those of a model type that is served, with the defaults of the one that they have.

    Positions of three axes (mrope) are all the same for a text.
    """
    name = text.get("model_type") or wrapper.text
    text["model_type"] = name
    kind = "full_attention" if text.get("sliding_window", 0) is None else "sliding_attention"
    kinds = text.get("layer_types")
    if name == "mistral" and isinstance(kinds, list) and any(each != kind for each in kinds):
        raise CheckpointError(
            f"config.json: layer_types is not supported in {wrapper.key}, where transformers reads over it: a mistral "
            f"there has {kind} in all layers, a ministral what layer_types says"
        )
    for rope in ("rope_scaling", "rope_parameters"):
        given = text.get(rope)
        if isinstance(given, dict) and "mrope" in (given.get("type"), given.get("rope_type")):
            kept = {each: value for each, value in given.items() if each not in ("type", "rope_type")}
            text[rope] = kept | {"rope_type": "default"}
    known = _TEXT_TYPES.get(name)
    if known is None:
        return text
    given = {name: value for name, value in text.items() if value is not None}
    return {**known.defaults, **given, **known.fixed, "model_type": known.family}


def text_name(name: str) -> str | None:
    """Return the name of a wrapper's tensor in a checkpoint of the language model; None if it is of another part."""
    first, _, rest = name.removeprefix("model.").partition(".")
    if first in _LANGUAGE:
        return rest if rest.startswith(("model.", *(f"{head}." for head in _HEADS))) else f"model.{rest}"
    return None if first in _TOWERS else name


def tower(name: str) -> str:
    """Return the part of a wrapper to which a tensor belongs that is not of the language model."""
    return name.removeprefix("model.").partition(".")[0]


def stored_names(module: str) -> tuple[str, ...]:
    """Return the names that a module of the language model may have in a wrapper's lists of modules: the inverse of
    `text_name`.
    """
    prefixes = [f"{model}{language}." for language in _LANGUAGE for model in ("", "model.")]
    short = module.removeprefix("model.")
    return tuple(dict.fromkeys([module, *(f"{prefix}{name}" for prefix in prefixes for name in (module, short))]))


def without_towers[T](tensors: Mapping[str, T]) -> tuple[dict[str, T], dict[str, int]]:
    """Return a wrapper's tensors of the language model by their names there, and the number of others by part.

    Raises CheckpointError if two have the same name.
    """
    found: dict[str, T] = {}
    left: dict[str, int] = {}
    for name, tensor in tensors.items():
        own = text_name(name)
        if own is None:
            left[tower(name)] = left.get(tower(name), 0) + 1
        elif own in found:
            raise CheckpointError(f"two tensors are {own} of the language model; one of them is {name}")
        else:
            found[own] = tensor
    return found, left


def text_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names of a wrapper's tensors by those in the language model, of which they are."""
    return {own: name for name in names if (own := text_name(name)) is not None}
