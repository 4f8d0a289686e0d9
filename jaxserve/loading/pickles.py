"""The reason why pickled weights are refused, wherever they are found. No jax."""

PICKLED_SUFFIXES = (".bin", ".pt", ".pth")


def why_not_read(model: str) -> str:
    """Return the end of a sentence about the pickled weights of `model`, a directory or an id of the hub: what to
    do.
    """
    return (
        "which are not read: a pickle can run any code. Where you trust it, make safetensors of it with transformers "
        f"and torch: AutoModelForCausalLM.from_pretrained({model!r}).save_pretrained(NEW_DIRECTORY)"
    )
