"""What people ask for, and how much of it is served: `python tests/support/demand.py`, with transformers installed.

Counts the model types for which transformers has a class that generates text, and vLLM's recipes of language models.
"""

import ast
import importlib.util
import pathlib

from jaxserve.loading.model_types import MODEL_TYPES
from jaxserve.loading.multimodal import REFUSED, WRAPPERS

TEXT_GENERATING = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)
"""Tables of transformers, from model types to classes."""

RECIPES = {
    ("llama",): 7,
    ("qwen2", "qwen3", "qwen3_moe"): 10,
    ("deepseek_v3",): 3,
    ("gpt_oss",): 2,
    ("phi3",): 2,
    ("granite",): 1,
    ("glm",): 1,
    ("kimi_k2", "kimi_k25"): 5,
    ("gemma3",): 1,
    ("mistral3",): 1,
    ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl"): 3,
    ("glm4_moe",): 3,
    ("minimax_m2",): 4,
    ("hy_v3",): 3,
    ("dots1", "ernie4_5_moe", "bailing_moe"): 3,
    ("mellum",): 2,
    ("ministral3",): 3,
    ("mistral4",): 2,
    ("lfm2", "lfm2_moe"): 8,
    ("laguna", "afmoe", "muse_glimmer"): 6,
    ("mimo_v2_flash", "step3p7"): 5,
    ("llama4",): 1,
    ("qwen3_next", "qwen3_5", "qwen3_5_moe"): 14,
    ("nemotron_h",): 8,
    ("gemma4",): 5,
    ("deepseek_v32", "glm_moe_dsa"): 5,
    ("kimi_linear", "bailing_hybrid"): 7,
    ("deepseek_v4",): 2,
    ("inkling_text", "minimax_m3_vl"): 3,
}
"""The number of recipes of 2026-08-21 by family. One with several model types is served if all of them load."""


def transformers_types():
    """Return the model types of TEXT_GENERATING, read from transformers' source: its import would need torch."""
    found = importlib.util.find_spec("transformers")
    source = pathlib.Path(found.origin).parent / "models" / "auto" / "modeling_auto.py"
    tables = [
        node
        for node in ast.parse(source.read_text()).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) in TEXT_GENERATING
    ]
    assert len(tables) == len(TEXT_GENERATING)
    return {row.elts[0].value for table in tables for row in ast.walk(table) if isinstance(row, ast.Tuple)}


def served(names):
    """Return those of model types that load."""
    return {name for name in names if name in MODEL_TYPES | WRAPPERS.keys()} - REFUSED.keys()


def counts():
    """Return how many types and recipes are served, and how many there are: [served, all] of each."""
    types = transformers_types()
    loaded = sum(number for names, number in RECIPES.items() if len(served(names)) == len(names))
    return [len(served(types)), len(types)], [loaded, sum(RECIPES.values())]


def page():
    """Return the counts, and what is refused, as text."""
    (types, all_types), (recipes, all_recipes) = counts()
    refused = ", ".join(sorted(transformers_types() - served(transformers_types())))
    wanted = ", ".join(name for names in RECIPES for name in names if not served([name]))
    return (
        f"{types} of {all_types} model types of transformers that generate text\n"
        f"{recipes} of {all_recipes} recipes of vLLM for language models ({recipes / all_recipes:.0%})\n"
        f"refused types: {refused}\nrefused in recipes: {wanted}"
    )


if __name__ == "__main__":
    print(page())  # noqa: T201
