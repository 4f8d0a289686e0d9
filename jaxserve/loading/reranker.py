"""What a reranker is, without the readers of its files: a server's parent starts sooner without what these import."""

import msgspec

SIGMOID = "torch.nn.modules.activation.Sigmoid"


class Reranker(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose next token after a pair says if the second text fits the first: plain data, part of EngineInfo.

    Attributes:
        no: the token, or its id, of a document that does not fit.
        yes: that of one that does. A score is made of the difference of the two logits.
        activation: a class of torch.nn that makes a score of it.
        is_qwen3: true if the prompt of a pair is Qwen3-Reranker's, unless there is a template.
    """

    no: str | int
    yes: str | int
    activation: str = SIGMOID
    is_qwen3: bool = False
