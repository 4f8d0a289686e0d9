"""What drafters with weights draft, compared with the published mathematics on whole sequences, and how their
checkpoints are read.
"""

import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from depths import quick_first
from engine_harness import Model, Result, request, run, tiny_config
from golden_folder import GOLDENS
from naive import dense_cache, one_sequence
from safetensors.numpy import save_file

from jaxserve.config import EngineConfig
from jaxserve.engine.drafter import read_drafter
from jaxserve.engine.startup import start_engine
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.execution.programs.kinds import Forward
from jaxserve.layers.batch import KVCache, LayerStep
from jaxserve.layers.params import path_name
from jaxserve.layers.rope import rotations
from jaxserve.loading.eagle3 import is_head, read_head
from jaxserve.loading.huggingface import load_config, load_params, source_shapes
from jaxserve.models import get_family
from jaxserve.sampling_params import SamplingParams
from jaxserve.speculation import parse_speculation
from jaxserve.speculative import make_drafter

K = 3
LENGTH = 24
TARGET = {
    "model_type": "llama", "vocab_size": 32, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
HEAD = TARGET | {"num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 3, "rope_theta": 100.0}
DRAFT_VOCAB = 12
IDS = np.sort(np.random.default_rng(3).permutation(32)[:DRAFT_VOCAB])
PROMPT = [1, 5, 3, 2, 9, 17, 30]


def tensors(prefix, *, num_kv_heads=3, has_embedding=False, has_map=True):
    """Return a head's tensors by their published names."""
    rng, size, kv_size = np.random.default_rng(0), 24, 6 * num_kv_heads
    vocab = DRAFT_VOCAB if has_map else 32
    shapes = {
        "fc": (size, 3 * size), "norm": (size,), "lm_head": (vocab, size),
        f"{prefix}.input_layernorm": (size,), f"{prefix}.hidden_norm": (size,),
        f"{prefix}.post_attention_layernorm": (size,),
        f"{prefix}.self_attn.q_proj": (2 * kv_size, 2 * size), f"{prefix}.self_attn.k_proj": (kv_size, 2 * size),
        f"{prefix}.self_attn.v_proj": (kv_size, 2 * size), f"{prefix}.self_attn.o_proj": (size, 2 * kv_size),
        f"{prefix}.mlp.gate_proj": (20, size), f"{prefix}.mlp.up_proj": (20, size),
        f"{prefix}.mlp.down_proj": (size, 20),
    }  # fmt: skip
    if has_embedding:
        shapes["embed_tokens"] = (32, size)
    found = {f"{name}.weight": rng.normal(size=shape).astype(np.float32) * 0.4 for name, shape in shapes.items()}
    if has_map:
        found |= {"d2t": IDS - np.arange(DRAFT_VOCAB), "t2d": np.isin(np.arange(32), IDS)}
    return found


def write_head(directory, style, *, num_kv_heads=3, **changes):
    """Write a head in one of the published formats, or one that shares the target's LM head; returns its tensors."""
    fields = {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    if style == "speculators":
        fields |= {
            "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_config": {},
            "norm_before_residual": True,
            "transformer_layer_config": HEAD | {
                "num_attention_heads": 2 * num_kv_heads, "num_key_value_heads": num_kv_heads,
            },
        }  # fmt: skip
    else:
        fields |= HEAD | {"architectures": ["LlamaForCausalLMEagle3"]}
    if style == "shared":
        fields["draft_vocab_size"] = 32
    prefix = "layers.0" if style == "speculators" else "midlayer"
    has_embedding, has_map = style == "speculators", style != "shared"
    own = tensors(prefix, num_kv_heads=num_kv_heads, has_embedding=has_embedding, has_map=has_map)
    if style == "shared":
        del own["lm_head.weight"]
    (directory / "config.json").write_text(json.dumps(fields | changes))
    save_file(own, directory / "model.safetensors")
    return own


def norm(x, weight):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * weight


def head_of(own, of_target, *, adds_normed):
    """Return a function from token ids and features to the last hidden state and the most likely next token: the layer
    of EAGLE-3 on a whole sequence, in float64.
    """
    weights = {name.removesuffix(".weight").replace("layers.0.", "midlayer."): w for name, w in own.items()}
    table = weights.get("embed_tokens", of_target["embed"])
    lm_head = weights.get("lm_head", of_target["lm_head"])
    ids = np.arange(len(lm_head)) + own.get("d2t", 0)

    def layer(name):
        return weights[f"midlayer.{name}"].astype(np.float64)

    def rotated(x):
        angles = np.arange(len(x))[:, None] * 100.0 ** -(np.arange(3) / 3)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = x[..., :3], x[..., 3:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def run(token_ids, features):
        feature = norm(features, layer("hidden_norm"))
        stream = feature if adds_normed else features
        x = np.concatenate([norm(table[token_ids], layer("input_layernorm")), feature], axis=-1)
        q, k, v = ((x @ layer(f"self_attn.{name}_proj").T).reshape(len(x), -1, 6) for name in "qkv")
        q, k, v = rotated(q), np.repeat(rotated(k), 2, axis=1), np.repeat(v, 2, axis=1)
        scores = np.einsum("qhd,khd->hqk", q, k) * 6**-0.5
        scores = np.where(np.tril(np.ones((len(x), len(x)), bool)), scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended = np.einsum("hqk,khd->qhd", scores / scores.sum(axis=-1, keepdims=True), v)
        stream = stream + attended.reshape(len(x), -1) @ layer("self_attn.o_proj").T
        y = norm(stream, layer("post_attention_layernorm"))
        gate = y @ layer("mlp.gate_proj").T
        stream = stream + (gate / (1 + np.exp(-gate)) * (y @ layer("mlp.up_proj").T)) @ layer("mlp.down_proj").T
        return stream[-1], ids[np.argmax(norm(stream[-1], weights["norm"]) @ lm_head.T)]

    return run


def padded(values):
    return np.pad(values, [(0, LENGTH - len(values)), *[(0, 0)] * (np.ndim(values) - 1)])


def dense(specs):
    return KVCache(pools=tuple(map(dense_cache, specs)), num_blocks=1, block_size=1)


def streams_of(model, *layers):
    """Return a function from token ids to the residual streams before these layers of a model, or behind all."""
    family, config = model.family, model.config

    @jax.jit
    def run(params, token_ids):
        batch = one_sequence(token_ids)
        x, found = family.embed(params, config, batch), []
        for first, end in itertools.pairwise((0, *layers)):
            cache = dense(family.kv_specs(config))
            x = family.run(params, config, x, batch, cache, range(first, end))[0] if first < end else x
            found.append(x)
        return jnp.concatenate(found, axis=1)

    def of(token_ids):
        with model.runner.model.on_mesh():
            return np.asarray(run(model.params, padded(np.array(token_ids, np.int32))))[: len(token_ids)]

    return of


def chain(run, token_ids, features):
    """Return K drafts behind a sequence: each feature goes with the token after it, then with the draft after it."""
    pairs, features, drafts = list(token_ids[1:]), list(features[: len(token_ids) - 1]), []
    for _ in range(K):
        hidden, draft = run(np.array(pairs), np.array(features))
        drafts.append(int(draft))
        pairs, features = [*pairs, drafts[-1]], [*features, hidden]
    return drafts


def verified(model, monkeypatch, prompt=PROMPT, num_tokens=10, **limits):
    """Return the known tokens before each step that verifies drafts, and these drafts, as far as the request may have
    them: keys and values of others have no block.
    """
    runner, seen = model.runner, []
    run = runner._run

    def spying(program, *arguments):
        made = run(program, *arguments)
        if isinstance(program, Forward) and program.bucket.num_columns:
            seen.append(np.asarray(made.rows.drafts)[0].tolist())
        return made

    monkeypatch.setattr(runner, "_run", spying)
    engine, result = model.engine(overlap=False, **limits), Result()
    engine.add([request("a", prompt, num_tokens)])
    steps = []
    while engine.has_work:
        before, num_seen = prompt + result.token_ids, len(seen)
        for output in engine.step():
            result.add(output)
        if len(seen) > num_seen:
            steps.append((before, seen[-1][: len(prompt) + num_tokens - len(before) - 1]))
    monkeypatch.undo()
    assert len(steps) >= 4
    return steps


@pytest.mark.parametrize("style", ["original", "speculators", "shared"])
def test_an_eagle3_head_drafts_as_published(tmp_path, monkeypatch, style):
    own = write_head(tmp_path, style)
    speculation = parse_speculation({"method": "eagle3", "model": "x", "num_speculative_tokens": K})
    model = Model(
        None, changes=TARGET, speculation=speculation.up_to(1, step_tokens=32), drafter=read_head(str(tmp_path))
    )
    mesh = jax.make_mesh((1,), ("tensor",), devices=jax.devices()[:1])
    specs = model.drafter.specs()
    model.params["drafter"] = load_params(tmp_path, specs, dtype=np.dtype("float32"), mesh=mesh, progress=False)
    of_target = {name: np.asarray(model.params[name].values) for name in ("embed", "lm_head")}
    run = head_of(own, of_target, adds_normed=style == "speculators")
    streams = streams_of(model, 0, 1, 3)
    # Twice: the second one begins with blocks of the first, and its last features.
    for prompt in (PROMPT, [*PROMPT[:5], 8, 8, 7]):
        for token_ids, drafts in verified(model, monkeypatch, prompt, max_num_batched_tokens=4):
            assert drafts == chain(run, token_ids, streams(token_ids) @ own["fc.weight"].T)[: len(drafts)]
    # No program copies all features, those of one row included.
    forwards = [compiled.as_text() for program, compiled in model.runner.steps.items() if isinstance(program, Forward)]
    assert not [text for text in forwards if re.search(r"= f32\[(400,4|1600),24\]\S* copy\(", text)]


@pytest.mark.parametrize(
    "name", quick_first(["qwen3_next_biases", "glm4_moe_qk_norm", "deepseek_v3_groups", "qwen3_5_biases"])
)
def test_a_further_layer_drafts(monkeypatch, name):
    """What is around the layer is written here once more; Qwen's has no LM head, and continues with normed states."""
    speculation = parse_speculation({"method": "deepseek_mtp", "num_speculative_tokens": K})
    model = Model(name, speculation=speculation.up_to(1, step_tokens=32))
    own, config, drafter, is_qwen = model.params["drafter"], model.config, model.drafter, name.startswith("qwen")
    streams, layer = streams_of(model, config.num_layers), drafter._layer
    head = (model.params if is_qwen else own)["lm_head"]

    @jax.jit
    def last(params, token_ids, features, index):
        batch = one_sequence(token_ids)
        token = params["embed"].values[token_ids]
        token = token if is_qwen else token.at[0].set(0)
        x = jnp.concatenate([layer.norm(token, own["token_norm"]), layer.norm(features, own["feature_norm"])], axis=1)
        x = x @ own["joined"].array().T
        step = LayerStep(batch, dense_cache(layer.mixer.cache_spec), rotations(layer.mixer.rope, batch.positions))
        stream, update, _ = layer.run(own["layer"], x, None, step, consumer="stream")
        hidden = stream + update
        normed = layer.norm(hidden, own["norm"])
        return (normed if is_qwen else hidden)[index], normed[index] @ head.values.T

    def run(token_ids, features):
        arguments = padded(token_ids.astype(np.int32)), padded(features.astype(np.float32)), len(features) - 1
        with model.runner.model.on_mesh():
            hidden, logits = last(model.params, *arguments)
        return np.asarray(hidden), np.argmax(logits)

    for token_ids, drafts in verified(model, monkeypatch):
        assert drafts == chain(run, token_ids, streams(token_ids))[: len(drafts)]


def write_random(directory, fields, specs):
    """Write a model of random weights, for which these specs are read."""
    rng, directory = np.random.default_rng(1), directory / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields))
    found = {name: rng.normal(size=shape).astype(np.float32) * 0.4 for name, shape in source_shapes(specs).items()}
    save_file(found, directory / "model.safetensors")
    return directory


def from_files(folder, kind):
    """Write a target and what drafts for it; return the target's folder and the options."""
    fields, options = TARGET, {"model": str(folder), "method": None}
    if kind.endswith("mtp"):
        fields = load_config(GOLDENS / {"mtp": "glm4_moe_qk_norm", "qwen3_next_mtp": "qwen3_next_biases"}[kind])
        fields |= {"moe_intermediate_size": 12, "shared_expert_intermediate_size": 14}  # for two devices
        options = {"method": kind}
    family = get_family(fields)
    specs = family.param_specs(family.config(fields))
    if kind.endswith("mtp"):
        specs = {"model": specs, "further": make_drafter(parse_speculation(options), fields, None, context=96).specs()}
    model = write_random(folder, fields, specs)
    if kind == "draft model":
        return model, {"model": str(model), "num_speculative_tokens": 2}
    if kind == "eagle3":
        proposals = [{"proposal_type": "greedy", "speculative_tokens": 2}]
        write_head(folder, "speculators", num_kv_heads=4, speculators_config={"proposal_methods": proposals})
    return model, options


@pytest.mark.parametrize(
    ("kind", "quantization"),
    quick_first(
        [
            *[("eagle3", "int4"), ("eagle3", None), ("draft model", None), ("draft model", "fp8")],
            *[("mtp", None), ("mtp", "int8"), ("qwen3_next_mtp", None)],
        ]
    ),
)
def test_an_engine_from_files_on_two_devices_with_8_bits(tmp_path, kind, quantization):
    """A whole start; the text is that of the same engine without drafts. The drafter's matrices alone are rounded."""
    model, options = from_files(tmp_path, kind)
    config = tiny_config(
        model,
        speculative_config=options | {"quantization": quantization},
        kv_cache_dtype="fp8",
        kv_cache_memory=2**17,
        max_model_len=32,
        max_num_seqs=1,
        max_num_batched_tokens=8,
        tensor_parallel_size=2,
    )
    engine, _ = start_engine(config, mesh=None, progress=False)
    params, schemes = engine.runner.state["params"], engine.runner.builder.spec.schemes
    held = {path_name(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    codes = {name.removesuffix(".parts.codes"): dtype for name, dtype in held.items() if name.endswith(".codes")}
    params = [SamplingParams(temperature=0.0, speculative_decoding=drafts) for drafts in (False, True)]
    texts = [run(engine, [request("r", PROMPT, 16, each)])["r"].token_ids for each in params]
    stats = engine.stats()
    engine.close()
    assert len(texts[0]) == 16
    assert texts[0] == texts[1]
    assert stats.spec_decode_num_drafts > 0
    assert {scheme.codes for scheme in schemes.values()} == {quantization} - {None}
    assert all(name.startswith("drafter.") for name in schemes)
    assert codes == {name: scheme.kind.dtype for name, scheme in schemes.items()}
    if kind == "draft model" and quantization is None:
        assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens


def test_a_head_that_names_no_number_of_drafts(tmp_path):
    write_head(tmp_path, "speculators")
    config = EngineConfig(speculative_config={"method": "eagle3", "model": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"num_speculative_tokens is missing, and .* does not name a number"):
        read_drafter(config, "target", TARGET, progress=False)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"norm_before_fc": True}, "norm_before_fc is not supported"),
        ({"shiny": 1}, "shiny is not supported"),
        ({"speculators_model_type": "peagle"}, "'peagle' is not eagle3"),
        ({"transformer_layer_config": HEAD | {"num_hidden_layers": 2}}, "num_hidden_layers must be 1"),
        ({"transformer_layer_config": HEAD | {"model_type": "qwen3"}}, "'qwen3' is not supported"),
        ({"transformer_layer_config": HEAD | {"vocab_size": 20}}, "outside the vocabulary of 20"),
        ({"draft_vocab_size": "many"}, "draft_vocab_size must be a positive integer"),
    ],
)
def test_heads_that_are_refused(tmp_path, changes, complaint):
    write_head(tmp_path, "speculators", **changes)
    with pytest.raises(CheckpointError, match=complaint):
        read_head(str(tmp_path))


def test_a_part_of_the_vocabulary_needs_an_lm_head(tmp_path):
    write_head(tmp_path, "shared", draft_vocab_size=DRAFT_VOCAB)
    with pytest.raises(CheckpointError, match="draft_vocab_size is 12, but there is no lm_head"):
        read_head(str(tmp_path))


@pytest.mark.parametrize(
    ("method", "target", "changes", "complaint"),
    [
        ("eagle3", {"num_hidden_layers": 3}, {}, "must be three of the 3"),
        ("eagle3", {"hidden_size": 32}, {}, "is for a hidden size of 24, but .* has 32"),
        ("eagle3", {"model_type": "gemma3n_text", "num_kv_shared_layers": 0}, {}, "the model's layers have several"),
        ("eagle3", {"vocab_size": 40}, {}, "is for a vocabulary of 32 tokens, but .* has 40"),
        ("mtp", {}, {}, "not supported for a llama model"),
        ("mtp", {"model_type": "deepseek_v3", "num_nextn_predict_layers": 0}, {}, "num_nextn_predict_layers is 0"),
        ("mtp", {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 2}, {}, "mtp_num_hidden_layers is 2"),
        (
            "mtp",
            {"model_type": "qwen3_5_text", "mtp_use_dedicated_embeddings": True},
            {},
            "_dedicated_embeddings is true",
        ),
    ],
)
def test_drafters_of_other_models_are_refused(tmp_path, method, target, changes, complaint):
    write_head(tmp_path, "original", **changes)
    assert is_head(json.loads((tmp_path / "config.json").read_text()))
    speculation = parse_speculation({"method": method, "model": "x", "num_speculative_tokens": 1})
    with pytest.raises(ConfigError, match=complaint):
        make_drafter(speculation, TARGET | target, read_head(str(tmp_path)), context=96)
