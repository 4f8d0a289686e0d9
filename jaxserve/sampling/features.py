"""The parts of a step that a request needs besides the model and an argmax, as a set of bits.

The runner ORs the bits of a step's rows and uploads the result; parts that no row needs do not run.
"""

import enum

from jaxserve.request import EngineRequest, Pooling
from jaxserve.sampling.filters import LOGIT_FILTERS
from jaxserve.sampling_params import PARAMETERS


class Feature(enum.IntFlag):
    """One bit for each optional part of a step."""

    RANDOM = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    PENALTIES = 16
    LOGIT_BIAS = 32
    ALLOWED_TOKENS = 64
    BAD_WORDS = 128
    MIN_TOKENS = 256
    LOGPROBS = 512
    LOGPROB_TOKEN_IDS = 1024
    LOGIT_FILTERS = 2048
    LAST_POOLING = 4096  # the hidden state of the last token is read
    SUM_POOLING = 8192  # the hidden states of all prompt tokens are summed
    FIRST_POOLING = 16384  # with SUM_POOLING: only the first token counts
    WEIGHTED_POOLING = 32768  # with SUM_POOLING: the k-th token counts k times
    ROOT_POOLING = 65536  # with SUM_POOLING: divided by the root of the number of tokens
    MAX_POOLING = 131072  # the maximum over all prompt tokens

    PROCESSORS = PENALTIES | LOGIT_BIAS | ALLOWED_TOKENS | BAD_WORDS | MIN_TOKENS
    EXTRAS = PROCESSORS | LOGPROB_TOKEN_IDS  # these need more of a request than its scalars
    FILTERS = TOP_K | TOP_P | MIN_P
    PLAIN = RANDOM | FILTERS  # all that a step without processors and logprobs supports
    POOLING = LAST_POOLING | SUM_POOLING | MAX_POOLING


OF_NUMBER = {
    "top_k": Feature.TOP_K,
    "top_p": Feature.TOP_P,
    "min_p": Feature.MIN_P,
    "presence_penalty": Feature.PENALTIES,
    "frequency_penalty": Feature.PENALTIES,
    "repetition_penalty": Feature.PENALTIES,
    **dict.fromkeys(LOGIT_FILTERS, Feature.LOGIT_FILTERS),
}
"""What a parameter needs whose value is not one of its neutral ones."""

_POOLING: dict[Pooling, Feature] = {
    "last": Feature.LAST_POOLING,
    "mean": Feature.SUM_POOLING,
    "cls": Feature.SUM_POOLING | Feature.FIRST_POOLING,
    "weightedmean": Feature.SUM_POOLING | Feature.WEIGHTED_POOLING,
    "mean_sqrt_len": Feature.SUM_POOLING | Feature.ROOT_POOLING,
    "max": Feature.MAX_POOLING,
}


def features(request: EngineRequest) -> int:
    """Return the features that a request needs in each of its steps."""
    params = request.params
    needed = Feature(0)
    for name, feature in OF_NUMBER.items():
        if not is_neutral(name, getattr(params, name)):
            needed |= feature
    if params.is_greedy:
        needed &= Feature.PENALTIES
    else:
        needed |= Feature.RANDOM
    if params.logit_bias:
        needed |= Feature.LOGIT_BIAS
    if params.allowed_token_ids is not None or request.grammar:  # a grammar's mask changes in each step
        needed |= Feature.ALLOWED_TOKENS
    if request.bad_word_ids:
        needed |= Feature.BAD_WORDS
    if params.min_tokens > 0 and request.stop_token_ids:
        needed |= Feature.MIN_TOKENS
    if params.logprobs is not None:
        needed |= Feature.LOGPROBS
    if params.logprob_token_ids:
        needed |= Feature.LOGPROB_TOKEN_IDS
    if request.pooling is not None:
        needed |= _POOLING[request.pooling]
    return int(needed)


def is_neutral(name: str, value: float) -> bool:
    """Return true if a parameter that is a number asks for nothing with this value."""
    return value in (PARAMETERS[name].neutral or ())


def has_extras(request: EngineRequest) -> bool:
    """Return true if a request needs `admit_extras` besides `admit`: for a processor, or for tokens that it names."""
    return bool(features(request) & Feature.EXTRAS)
