"""The public operation: the last of a decode step, after logits processors have had their say."""

from jaxtyping import Array, Float, Int32

from pallas_kernels.implementation import Implementation, check_implementation
from pallas_kernels.sampling.sm90 import sample_sm90
from pallas_kernels.sampling.xla import sample_xla


def sample(
    logits: Float[Array, "B V"],
    *,
    temperature: Float[Array, " B"],
    top_k: Int32[Array, " B"],
    top_p: Float[Array, " B"],
    min_p: Float[Array, " B"],
    uniform: Float[Array, "B 2"],
    implementation: Implementation = "xla",
) -> tuple[Int32[Array, " B"], Float[Array, " B"]]:
    """Return a token id of each row and the row's largest logit; logits are float32, and each row has its own
    parameters.

    A row of temperature 0 gets the lowest id among its largest logits. Any other has the weights exp((logit - largest)
    / temperature), of which the filters keep

    - those of the `top_k` largest logits, all of them if it is 0;
    - of these the fewest whose weights sum to the fraction `top_p`, all if it is 1 or more (Holtzman et al. 2020, "The
      Curious Case of Neural Text Degeneration");
    - of these the ones that weigh at least `min_p` of the largest (Nguyen et al. 2024, arXiv:2407.01082).

    Tokens that tie at a threshold are all kept. `uniform`, two numbers in [0, 1), then decides: the first among blocks
    of 512 tokens by their weights, the second within the block. So a row's token depends on nothing but the row, and
    implementations differ only in float32 rounding.

    A row whose largest logit is not finite (NaN counts as largest) has no distribution: its token is 0.

    "sm90" is a Mosaic kernel for Hopper GPUs, "xla" runs anywhere. Raises ValueError for an unknown implementation.
    """
    check_implementation(implementation)
    run = sample_sm90 if implementation == "sm90" else sample_xla
    return run(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, uniform=uniform)
