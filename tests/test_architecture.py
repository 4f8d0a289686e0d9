"""The import rules of the house: arrows point down only, and what must stay free of jax does.

Imports are read off the syntax tree, those inside functions included; what follows from them at run time is checked in
a subprocess. `if TYPE_CHECKING:` imports obey the arrows, but may name jax: nothing is loaded for a type.
"""

import ast
import functools
import graphlib
import pathlib
import subprocess
import sys
from typing import NamedTuple

import pytest
from waiting import PATIENCE

import jaxserve

ROOT = pathlib.Path(jaxserve.__file__).resolve().parents[1]

PLAIN = "errors config request sampling_params speculation values"

# room: the rooms it may import, besides itself. Highest first; `jaxserve` is the package's own __init__.
MAY_IMPORT = {
    "__main__": "jaxserve interrupts cli",
    "cli": f"{PLAIN} gpus jaxserve interrupts logs arguments flags vllm_flags bench chat answers server llm convert "
    "overview parse planning engine loading tokenizer",
    "chat": f"{PLAIN} llm",
    "parse": f"{PLAIN} decoding answers loading tokenizer",
    "ray_serve": f"{PLAIN} jaxserve flags server answers engine loading tokenizer",
    "bench": f"{PLAIN} cpus arguments flags vllm_flags inspect llm answers server convert engine structured models "
    "loading layers tokenizer",
    "inspect": f"{PLAIN} gpus tables local_model llm engine execution scheduling layers pallas_kernels",
    "jaxserve": "llm async_llm request sampling_params",
    "async_llm": f"{PLAIN} local_model engine",
    "flags": f"{PLAIN} arguments vllm_flags",
    "arguments": "vllm_flags",
    "vllm_flags": "",
    "unsupported": "errors",
    "vllm_page": "vllm_flags cli",
    "options_page": "config local_model sampling_params",
    "logs": "",
    "server": f"{PLAIN} unsupported decoding jaxserve logs tables answers tokenizer metrics engine structured",
    "answers": f"{PLAIN} structured tokenizer",
    "llm": f"{PLAIN} garbage local_model progress engine",
    "local_model": f"{PLAIN} vllm_flags interrupts answers tokenizer engine loading",
    "progress": f"{PLAIN} engine",
    "convert": f"{PLAIN} models loading tokenizer",
    "planning": f"{PLAIN} arguments cpus flags bench gpus tables engine scheduling execution layers pallas_kernels",
    "overview": f"{PLAIN} gpus tables planning engine models loading layers quantization",
    "tables": "",
    "garbage": "",
    "gpus": "errors",
    "engine": f"{PLAIN} gpus interrupts logs tokenizer metrics scheduling execution speculative models structured "
    "loading layers pallas_kernels",
    "execution": f"{PLAIN} cpus scheduling models sampling speculative loading layers quantization pallas_kernels",
    "scheduling": PLAIN,
    "models": f"{PLAIN} loading layers quantization",
    "sampling": f"{PLAIN} layers pallas_kernels",
    "speculative": f"{PLAIN} scheduling models sampling layers",
    "structured": f"{PLAIN} tokenizer",
    "decoding": "errors values",
    "loading": f"{PLAIN} cpus layers quantization",
    "layers": f"{PLAIN} quantization pallas_kernels",
    "quantization": f"{PLAIN} pallas_kernels",
    "pallas_kernels": "",
    "tokenizer": f"{PLAIN} chat_template token_pieces loading",  # those of GGUF files
    "chat_template": "",
    "token_pieces": "errors",
    "metrics": PLAIN,
    "request": "errors sampling_params",
    "sampling_params": "errors unsupported values",
    "config": "errors request sampling_params speculation values",
    "speculation": "errors",
    "values": "errors",
    "cpus": "",
    "interrupts": "",
    "errors": "",
}

# The same for the parts of rooms: modules and packages directly in them, besides errors and plain data.
PARTS = {
    "server": {
        "__init__": "app process",
        "batch": "app process",
        "process": "app middleware state routes responses generation protocol tracing engine_view wire",
        "app": "middleware routes state tracing wire",
        "middleware": "state wire",
        "routes": "state responses anthropic generation protocol engine_view wire",
        "state": "responses generation tracing engine_view wire",
        "responses": "generation protocol wire",
        "anthropic": "protocol",
        "generation": "protocol tracing wire",
        "protocol": "",
        "tracing": "",
        "engine_view": "",
        "wire": "",
    },
    "answers": {
        "__init__": "",
        "model_syntax": "forcing parsing syntaxes tools",
        "writer": "message parsing tools",
        "message": "tools",
        "choosing": "parsing syntaxes tools",
        "forcing": "literals syntaxes tools",
        "parsing": "literals syntaxes",
        "literals": "",
        "syntaxes": "",
        "tools": "",
    },
}

# Modules, or whole packages, in which jax is never loaded, by the package that they are in.
NO_JAX = {
    "jaxserve": "__main__ answers arguments bench chat chat_template cli config cpus decoding errors flags gpus "
    "interrupts logs metrics parse progress quantization request sampling_params scheduling server speculation "
    "structured tables token_pieces tokenizer unsupported values vllm_flags",
    "jaxserve.engine": "beam_search client early embedding frontend memory output process prompts remote replicas "
    "router scoring sizing stream subprocesses wire",
    "jaxserve.execution.programs": "workers",
    "jaxserve.loading": "affixes bounds builtin causality classifier dequantization generation_fields gguf "
    "gguf_config gguf_decoder gguf_families gguf_keys gguf_latents gguf_mixtures gguf_names gguf_rope gguf_sources "
    "gguf_tokenizer hub json_files mistral_pattern model_types multimodal overrides partial_files pickles "
    "quantization_files reranker reranking sentence_bert sentence_transformers tied_head tokenizer_files "
    "torch_activations",
    "jaxserve.planning": "commands measured times",
    "pallas_kernels.device": "code_values",
}
RUN_ELSEWHERE = "jaxserve.bench.peers."  # scripts for other interpreters, with packages that are not installed here
JAX = {"jax", "jaxlib", "optax", "orbax"}

# The functions in which a module of NO_JAX starts an engine or reads a model: everything before stays fast.
MAY_START_AN_ENGINE = {
    "jaxserve.cli": {
        *("jaxserve.convert", "jaxserve.engine.local", "jaxserve.llm", "jaxserve.overview", "jaxserve.planning.here"),
    },
    "jaxserve.planning.commands": {
        *("jaxserve.planning.ahead", "jaxserve.planning.compared", "jaxserve.planning.plan", "jaxserve.planning.text"),
        "pallas_kernels.deviceless",
    },
    "jaxserve.engine.early": {"jax"},
    "jaxserve.engine.process": {"jaxserve.engine.local"},
    "jaxserve.bench.bits_per_byte": {"jaxserve.convert", "jaxserve.llm"},
    "jaxserve.bench.full_load": {"jaxserve.engine.local"},
    "jaxserve.bench.kv_rounding": {"jaxserve.engine.local", "jaxserve.inspect.kv_rounding"},
    "jaxserve.bench.speculation": {"jaxserve.engine.local"},
    "jaxserve.bench.engine_run": {"jaxserve.engine.local", "jaxserve.engine.profile"},
    "jaxserve.bench.latency": {"jaxserve.engine.device", "jaxserve.engine.local", "jaxserve.engine.profile"},
    "jaxserve.bench.steps": {"jaxserve.engine.local", "jaxserve.engine.profile"},
    "jaxserve.bench.load": {
        "jax",
        "jaxserve.convert",
        "jaxserve.layers.layouts",
        "jaxserve.loading.huggingface",
        "jaxserve.loading.weights",
        "orbax.checkpoint",
        "jaxserve.models",
    },
}


class Import(NamedTuple):
    """One imported module, its location, and whether only a type checker sees it."""

    importer: str
    target: str
    line: int
    typing_only: bool


def _module_name(path: pathlib.Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_module_name(path): path for name in ("jaxserve", "pallas_kernels") for path in (ROOT / name).rglob("*.py")}


@functools.cache
def _nodes(module: str) -> list[ast.AST]:
    return [*ast.walk(ast.parse(MODULES[module].read_text()))]


def _imports(module: str) -> list[Import]:
    """Every import of a module; `from package import name` counts as the submodule where `name` is one."""
    found = []
    typing_only = {
        node
        for guard in _nodes(module)
        if isinstance(guard, ast.If) and ast.unparse(guard.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for statement in guard.body
        for node in ast.walk(statement)
    }
    for node in _nodes(module):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} has a relative import: write the whole name"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            exported = jaxserve._EXPORTS if node.module == "jaxserve" else {}
            targets = [
                name if name in MODULES else exported.get(name.removeprefix("jaxserve."), str(node.module))
                for name in names
            ]
        else:
            continue
        found += [Import(module, target, node.lineno, node in typing_only) for target in targets]
    return found


def _room(module: str) -> str:
    package, _, rest = module.partition(".")
    return rest.split(".")[0] if package == "jaxserve" and rest else package


def _is_ours(module: str) -> bool:
    return module.split(".")[0] in ("jaxserve", "pallas_kernels")


def _is_free_of_jax(module: str) -> bool:
    packages = [f"{package}.{name}." for package, names in NO_JAX.items() for name in names.split()]
    return module == "jaxserve" or f"{module}.".startswith(tuple(packages))


@pytest.fixture(scope="module")
def imports():
    return [found for module in sorted(MODULES) for found in _imports(module)]


def test_the_rules_are_a_hierarchy():
    graph = {room: allowed.split() for room, allowed in MAY_IMPORT.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError
    assert {room for allowed in graph.values() for room in allowed} <= graph.keys()


def test_every_room_has_a_rule():
    assert {_room(module) for module in MODULES} <= MAY_IMPORT.keys()


def test_arrows_point_down(imports):
    upward = [
        f"{found.importer}:{found.line} imports {found.target}"
        for found in imports
        if _is_ours(found.target)
        and _room(found.target) != _room(found.importer)
        and _room(found.target) not in MAY_IMPORT[_room(found.importer)].split()
    ]
    assert not upward, "against the table MAY_IMPORT:\n" + "\n".join(upward)


@pytest.mark.parametrize("room", PARTS)
def test_arrows_between_the_parts_of_a_room_point_down(room, imports):
    allowed = {part: parts.split() for part, parts in PARTS[room].items()}
    graphlib.TopologicalSorter(allowed).prepare()  # raises CycleError
    inside = f"jaxserve.{room}."

    def part(module: str) -> str:
        return module.removeprefix(inside).split(".")[0] if module.startswith(inside) else "__init__"

    assert {part(module) for module in MODULES if f"{module}.".startswith(inside)} == allowed.keys()
    upward = [
        f"{found.importer}:{found.line} imports {found.target}"
        for found in imports
        if f"{found.importer}.".startswith(inside)
        and found.target.startswith(inside)
        and part(found.target) not in (part(found.importer), *allowed[part(found.importer)])
    ]
    assert not upward, f"against the table PARTS[{room!r}]:\n" + "\n".join(upward)


def test_programs_are_made_below_the_runner(imports):
    """Only the runner in `execution` imports programs; the modules that programs are built from do not import them."""
    programs = "jaxserve.execution.programs"
    importers = {
        found.importer
        for found in imports
        if found.target.startswith(programs) and _room(found.importer) == "execution"
    }
    assert {module for module in importers if not module.startswith(programs)} == {"jaxserve.execution.runner"}
    assert not [found for found in imports if found.importer.startswith(programs) and "runner" in found.target]


def test_operations_use_the_public_names_of_others(imports):
    """What kernels have in common is in rooms of its own; an operation is no library of another."""
    common = {"device", "paging", "peers"}
    inside = []
    for found in imports:
        importer, target = found.importer.split("."), found.target.split(".")
        are_modules = importer[0] == target[0] == "pallas_kernels" and len(importer) == len(target) == 3
        if are_modules and target[1] not in {importer[1], *common}:
            inside.append(f"{found.importer}:{found.line} imports {found.target}")
    assert not inside


def test_a_start_goes_down_only(imports):
    """The steps of a start do not know each other's order, nor who asks for it."""
    order = ["startup", "report", "checkpoint", "device", "sizing"]
    steps = {f"jaxserve.engine.{name}": index for index, name in enumerate(order)}
    upward = [
        f"{found.importer}:{found.line} imports {found.target}"
        for found in imports
        if found.importer in steps and steps.get(found.target, len(order)) < steps[found.importer]
    ]
    assert not upward


def test_jax_is_named_in_no_module_that_must_not_load_it(imports):
    wrong = [
        f"{found.importer}:{found.line} imports {found.target}"
        for found in imports
        if _is_free_of_jax(found.importer)
        and not found.typing_only
        and found.target not in MAY_START_AN_ENGINE.get(found.importer, ())
        and (found.target.split(".")[0] in JAX or (_is_ours(found.target) and not _is_free_of_jax(found.target)))
    ]
    assert not wrong, "these must stay free of jax:\n" + "\n".join(wrong)


def test_imports_by_string_are_lazy_exports_and_families_only():
    users = {
        module
        for module in MODULES
        for node in _nodes(module)
        if getattr(node, "id", getattr(node, "attr", None)) in ("import_module", "__import__")
    }
    assert users <= {"jaxserve", "jaxserve.server", "jaxserve.models"}


def _python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_importing_the_modules_without_jax_loads_no_jax():
    modules = [module for module in sorted(MODULES) if _is_free_of_jax(module) and not module.startswith(RUN_ELSEWHERE)]
    culprits = _python(
        f"import importlib, sys\n"
        f"for name in {modules!r}:\n"
        f"    importlib.import_module(name)\n"
        f"    loaded = sys.modules.keys() & {JAX!r}\n"
        f"    if loaded:\n"
        f"        print(name, 'loads', *loaded)\n"
        f"        break\n"
    )
    assert not culprits


@pytest.mark.parametrize(
    ("module", "needed"),
    [
        ("jaxserve", set()),
        ("jaxserve.cli", set()),
        ("jaxserve.server.process.supervisor", {"asyncio", "zmq"}),
        ("jaxserve.loading.gguf_sources", {"asyncio", "numpy"}),
    ],
)
def test_import_is_cheap(module, needed):
    """What a server's parent imports is imported before the engine starts; engines import readers of GGUF files."""
    heavy = JAX | {"transformers", "tokenizers", "torch", "numpy", "starlette", "uvicorn", "httpx", "jinja2"}
    heavy |= {"asyncio", "tqdm", "huggingface_hub", "zmq", "gguf", "shtab"}
    assert _python(f"import sys, {module}; print(*sys.modules.keys() & {heavy - needed!r})") == ""


def test_exported_names():
    names = "AsyncLLM BeamSearchParams CompletionOutput LLM RequestOutput SamplingParams StructuredOutputs generate"
    assert sorted(jaxserve.__all__) == names.split()
    for name in jaxserve.__all__:
        assert getattr(jaxserve, name).__name__ == name
        assert name in dir(jaxserve)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        jaxserve.nothing  # noqa: B018
