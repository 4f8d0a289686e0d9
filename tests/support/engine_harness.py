"""An engine without threads, on a golden checkpoint, and the naive answer to hold it against."""

import dataclasses
import functools

import jax
import numpy as np
from golden_folder import GOLDENS
from naive import greedy_choices, naive_greedy, naive_logits

from jaxserve.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.execution.programs.builder import StepBuilder
from jaxserve.execution.programs.spec import ON_CPU, StepSpec
from jaxserve.execution.runner import Runner
from jaxserve.layers.random_params import init_params
from jaxserve.loading.huggingface import load_config, load_params
from jaxserve.models import get_family, with_context
from jaxserve.request import EngineRequest
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduling.drafting import DraftPolicy
from jaxserve.scheduling.scheduler import SchedulerLimits, make_scheduler
from jaxserve.speculative import make_drafter

GREEDY = SamplingParams(temperature=0.0)
MAX_MODEL_LEN = 96


def tiny_config(model, **changes):
    """Return the options of an engine with few, small shapes for a golden checkpoint, or for that of a folder."""
    sizes = {"max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 4}
    options = {"kv_cache_memory": 2**20, "warmup": "none"}
    return EngineConfig(model=str(GOLDENS / model), **(sizes | options | changes))


class Model:
    """A golden checkpoint with a Runner of few, small shapes; schedulers come and go, the compiled steps stay.

    With `changes` to its config, which are all of it if there is no checkpoint, the weights are random. `drafter` is
    the config of a drafter with a checkpoint of its own, whose weights are random. `mesh` is there in place of one axis
    "tensor".
    """

    def __init__(
        self,
        name,
        *,
        tensor_parallel_size=1,
        mesh=None,
        corrupt_token=None,
        num_blocks=400,
        traits=ON_CPU,
        changes=None,
        speculation=None,
        drafter=None,
        kv_cache_dtype="auto",
        num_kept_states=0,
    ):
        fields = ({} if name is None else load_config(GOLDENS / name)) | (changes or {})
        self.speculation = speculation
        self.family = get_family(fields)
        config = self.family.config(fields)
        self.config = with_context(config, MAX_MODEL_LEN)
        self.vocab_size = self.config.vocab_size
        self.mesh = mesh = mesh or jax.make_mesh(
            (tensor_parallel_size,), ("tensor",), devices=jax.devices()[:tensor_parallel_size]
        )
        specs = self.family.param_specs(config)
        if changes:
            self.params = init_params(specs, dtype=np.dtype("float32"), mesh=mesh, seed=0)
        else:
            self.params = load_params(GOLDENS / name, specs, dtype=np.dtype("float32"), mesh=mesh, progress=False)
        self.drafter = make_drafter(speculation, fields, drafter, context=MAX_MODEL_LEN)
        if self.drafter is not None:
            self.params["drafter"] = init_params(self.drafter.specs(), dtype=np.dtype("float32"), mesh=mesh, seed=1)
        if corrupt_token is not None:
            self.params["embed"] = corrupted(self.params["embed"], corrupt_token)
        spec = StepSpec(
            model=fields,
            dtype="float32",
            block_size=4,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            kernels="xla",
            traits=traits,
            has_peers=False,
            max_logprobs=-1,
            speculation=speculation,
            drafter=drafter,
            kv_cache_dtype=kv_cache_dtype,
            num_kept_states=num_kept_states,
        )
        self.runner = Runner(StepBuilder(spec, mesh), self.params)
        self.runner.set_num_blocks(num_blocks)
        self.runner.allocate()
        self._naive = functools.cache(self._naive_greedy)

    def engine(
        self,
        *,
        overlap=True,
        kind="continuous",
        enable_prefix_caching=True,
        token_cost=0.0,
        matchers=None,
        **limits,
    ):
        """Return a new engine on this model's runner; `limits` override those of the scheduler. It drafts whatever time
        that takes.
        """
        by_rows = () if self.speculation is None else self.speculation.drafts_by_rows
        policy = DraftPolicy(by_rows, token_cost, is_late=self.drafter is not None)
        policy._record.time = lambda *args: None
        limits = {
            "num_blocks": self.runner.num_blocks,
            "block_size": self.runner.block_size,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 32,
            "max_model_len": MAX_MODEL_LEN,
            "windows": self.runner.layout.windows,
            "drafts": policy,
            "has_states": self.runner.layout.num_states > 0,
            "num_stages": self.runner.num_stages,
            "num_kept_states": self.runner.model.num_kept_states,
            "min_kept_tokens": 4,
        } | limits
        scheduler = make_scheduler(
            kind, SchedulerLimits(**limits), enable_prefix_caching=enable_prefix_caching, model_domain=b"test"
        )
        return Engine(scheduler, self.runner, overlap=overlap, matchers=matchers)

    def naive(self, prompt, num_tokens):
        """Greedy tokens by a full forward pass each."""
        return list(self._naive(tuple(prompt), num_tokens))

    def naive_logprobs(self, token_ids):
        """log_softmax of the logits at each position of a sequence, [T, V] float64."""
        padded = np.zeros(MAX_MODEL_LEN, np.int32)
        padded[: len(token_ids)] = token_ids
        logits = np.asarray(naive_logits(self.params, self.config, self.family, padded), np.float64)[: len(token_ids)]
        shifted = logits - logits.max(axis=1, keepdims=True)
        return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))

    def _naive_greedy(self, prompt, num_tokens):
        model = self.params, self.config, self.family
        with jax.set_mesh(self.mesh):
            return tuple(naive_greedy(*model, list(prompt), num_tokens, padded_length=MAX_MODEL_LEN))


def corrupted(embedding, token):
    """Return the embedding with a vector of NaN for this token."""
    return dataclasses.replace(embedding, values=embedding.values.at[token].set(np.nan))


def prompts(model, lengths, seed=0):
    """Return random prompts of these lengths."""
    random = np.random.default_rng(seed)
    return [random.integers(0, model.vocab_size, length).tolist() for length in lengths]


def request(name, prompt, max_tokens, params=GREEDY, **fields):
    """Return an EngineRequest that is its own group by default."""
    return EngineRequest(
        request_id=name,
        group_id=fields.pop("group_id", name),
        prompt_token_ids=list(prompt),
        params=params,
        max_tokens=max_tokens,
        **fields,
    )


def assert_naive(model, results, asked):
    """Check that requests, pairs of a prompt and a length by name, have the greedy tokens of full forward passes."""
    for name, (prompt, max_tokens) in asked.items():
        result = results[name]
        assert (result.finish_reason, len(result.token_ids)) == ("length", max_tokens), (name, result.error)
        with jax.set_mesh(model.mesh):
            chosen = greedy_choices(
                model.params, model.config, model.family, prompt, result.token_ids, padded_length=MAX_MODEL_LEN
            )
        assert result.token_ids == chosen, name


class Result:
    """What one request has returned so far."""

    def __init__(self):
        self.token_ids, self.logprobs, self.prompt_logprobs = [], [], []
        self.finish_reason = self.stop_reason = self.error = self.refusal = None
        self.num_cached_tokens = 0

    def add(self, output):
        assert self.finish_reason is None, "output after the last"
        self.token_ids += output.new_token_ids
        self.logprobs += output.logprobs or []
        assert output.prompt_logprobs != [], "log probabilities of the prompt, of which there are none"
        self.prompt_logprobs += output.prompt_logprobs or []
        self.num_cached_tokens = output.num_cached_tokens
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.error, self.refusal = output.error, output.refusal


def run(engine, requests, *, check=True):
    """Submit all requests at once and step until nothing is left; results by request id."""
    engine.add(list(requests))
    return drain(engine, {r.request_id: Result() for r in requests}, check=check)


def drain(engine, results, *, check=True, max_steps=5000):
    """Step until nothing is left, checking the scheduler after each step."""
    for _ in range(max_steps):
        if not engine.has_work:
            return results
        for output in engine.step():
            results[output.request_id].add(output)
        if check:
            engine.scheduler.check_integrity()
    raise AssertionError("the engine does not come to an end")
