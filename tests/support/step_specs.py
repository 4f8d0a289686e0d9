"""StepSpecs of large models, for tests that compile their steps for an H200 without one."""

from jaxserve.execution.programs.spec import ON_GPU, StepSpec


def make_spec(model, **sizes):
    """Describe the steps of a config.json, with the engine's default sizes."""
    sizes = {"max_model_len": 8192, "max_num_seqs": 256, "max_num_batched_tokens": 8192} | sizes
    return StepSpec(
        model=model, dtype="bfloat16", kernels="sm90", block_size=16, traits=ON_GPU, has_peers=True, **sizes
    )
