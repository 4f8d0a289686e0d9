"""Scores of pairs by a model that was trained for them: by its classification head, or by its next token. No jax.

Other models compare the embeddings of the two texts (`embedding`).
"""

import dataclasses

import numpy as np

from jaxserve.engine.embedding import pooled_vector
from jaxserve.engine.frontend import Frontend
from jaxserve.engine.output import RequestGroup
from jaxserve.engine.prompts import Truncation
from jaxserve.errors import InvalidRequest
from jaxserve.loading.classifier import ClassificationHead
from jaxserve.loading.reranker import Reranker
from jaxserve.loading.reranking import QWEN3_INSTRUCTION, QWEN3_PREFIX, QWEN3_SUFFIX, has_pair_roles
from jaxserve.loading.torch_activations import read_activation
from jaxserve.request import Pooling, TruncationSide
from jaxserve.sampling_params import SamplingParams
from jaxserve.tokenizer import Tokenizer

NO_INSTRUCTION = "this model compares embeddings, for which there is no instruction: write it into the texts"


@dataclasses.dataclass(frozen=True)
class PairScorer:
    """Scores a text, the document, for another one, the query. One of `head` and `reranker` is None."""

    frontend: Frontend
    head: ClassificationHead | None
    reranker: Reranker | None

    def prepare(
        self,
        query: str,
        document: str,
        *,
        request_id: str,
        instruction: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        truncate_prompt_tokens: int | None = None,
        truncation_side: TruncationSide = "left",
    ) -> RequestGroup:
        """Prepare the group whose result `score` reads. Raises InvalidRequest as `Frontend.prepare` does.

        Truncation shortens the longer one of the two texts, and nothing of what is around them.
        """
        room = self.frontend.client.info.max_model_len - (self.head is None)  # one token is written
        truncation = Truncation(limit=truncate_prompt_tokens, side=truncation_side, room=room)
        token_ids = self._encode_within(query, document, instruction, truncation)
        if self.head is not None:
            return self.frontend.prepare_embedding(
                token_ids, pooling="last", request_id=request_id, priority=priority, cache_salt=cache_salt
            )
        params = SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=0, logprob_token_ids=self._answers()
        )
        return self.frontend.prepare(token_ids, params, request_id=request_id, priority=priority, cache_salt=cache_salt)

    def score(self, group: RequestGroup, *, use_activation: bool = True) -> float:
        """Return the score of a pair whose group has finished, or its logit."""
        if self.head is not None:
            assert group.embedding is not None, "a finished pooling request has a vector"
            logit = self.head.logits(pooled_vector(group.embedding))[0]
            activation = self.head.score_activation
        else:
            assert self.reranker is not None
            (output,) = group.result().outputs
            assert output.logprobs, "log probabilities were requested"
            no, yes = (output.logprobs[0][token_id].logprob for token_id in self._answers())
            logit = yes - no
            activation = read_activation(self.reranker.activation, field="activation_fn")
        return float(activation(np.array([logit], np.float64))[0]) if use_activation else float(logit)

    def _answers(self) -> tuple[int, int]:
        assert self.reranker is not None
        no, yes = (_token_id(self.frontend.tokenizer, token) for token in (self.reranker.no, self.reranker.yes))
        return no, yes

    def _encode_within(self, query: str, document: str, instruction: str | None, truncation: Truncation) -> list[int]:
        """Return the prompt of a pair, of texts that are so short that it has no more tokens than it may have."""
        tokenizer, limit = self.frontend.tokenizer, truncation.num_tokens(self.frontend.client.info.max_model_len)
        token_ids = self._encode(query, document, instruction)
        if limit is None or len(token_ids) <= limit:
            return token_ids
        parts = [tokenizer.encode(text, add_special_tokens=False) for text in (query, document)]
        sizes = [len(part) for part in parts]
        while (excess := len(token_ids) - limit) > 0:
            if not any(sizes):
                raise InvalidRequest(
                    f"truncate_prompt_tokens is {limit}, but {len(token_ids)} tokens are around the texts of each pair",
                    param="truncate_prompt_tokens",
                )
            for _ in range(min(excess, sum(sizes))):
                sizes[int(sizes[1] >= sizes[0])] -= 1
            texts = [
                tokenizer.decode(truncation.kept(part, size), skip_special_tokens=False)
                for part, size in zip(parts, sizes, strict=True)
            ]
            token_ids = self._encode(*texts, instruction)
        return token_ids

    def _encode(self, query: str, document: str, instruction: str | None) -> list[int]:
        """Return the prompt of a pair: by the template for pairs, else as the model was trained."""
        tokenizer, embedder = self.frontend.tokenizer, self.frontend.embedder
        if instruction is None and embedder.default_prompt is not None:
            instruction = embedder.prompts[embedder.default_prompt] or None
        if embedder.lowercases:
            query, document = query.lower(), document.lower()
        own, variables = self.frontend.pair_template
        chat = tokenizer.chat_template
        template = chat if chat is not None and has_pair_roles(chat) else own
        if template is not None:
            messages = [] if instruction is None else [{"role": "system", "content": instruction}]
            messages += [{"role": "query", "content": query}, {"role": "document", "content": document}]
            text = tokenizer.render_chat_template(
                messages,
                chat_template=template,
                add_generation_prompt=bool(variables.get("add_generation_prompt")),
                template_kwargs={name: value for name, value in variables.items() if name != "add_generation_prompt"},
            )
            return tokenizer.encode(text, add_special_tokens=False)
        if self.reranker is not None:
            if not self.reranker.is_qwen3:
                return tokenizer.encode((instruction or "") + query + document)
            if query.startswith("<|im_start|>"):  # the client has written the prompt
                return tokenizer.encode(query + document)
            body = f"<Instruct>: {instruction or QWEN3_INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
            return tokenizer.encode(QWEN3_PREFIX + body + QWEN3_SUFFIX)
        assert self.head is not None
        query = (instruction or "") + query
        return tokenizer.encode_pair(query, document) if self.head.has_pairs else tokenizer.encode(query + document)


def pair_scorer(frontend: Frontend) -> PairScorer | None:
    """Return what scores pairs, None for a model that embeds texts.

    Raises InvalidRequest for a head of several labels, as none of them is the score.
    """
    if (head := frontend.head) is not None:
        if len(head.labels) != 1:
            raise InvalidRequest(
                f"this model's classification head has {len(head.labels)} labels, and a score needs a head of one: "
                "/classify has the probability of each",
                param="model",
            )
        return PairScorer(frontend, head, None)
    reranker = frontend.client.info.reranker
    return None if reranker is None else PairScorer(frontend, None, reranker)


def check_pair_options(scorer: PairScorer, *, pooling: Pooling | None) -> None:
    """Raise InvalidRequest for what only the comparison of embeddings has."""
    if pooling not in (None, "last") or (pooling is not None and scorer.reranker is not None):
        raise InvalidRequest(f"this model scores pairs, and not by embeddings: pooling {pooling!r}", param="pooling")


def shortened(text: str, tokenizer: Tokenizer, max_tokens: int | None) -> str:
    """Return the beginning of a text that has `max_tokens` tokens; 0 and None do not limit it."""
    if not max_tokens or len(token_ids := tokenizer.encode(text, add_special_tokens=False)) <= max_tokens:
        return text
    return tokenizer.decode(token_ids[:max_tokens], skip_special_tokens=False)


def _token_id(tokenizer: Tokenizer, token: str | int) -> int:
    if isinstance(token, int):
        return token
    token_id = tokenizer.vocabulary_id(token)
    if token_id is None:
        raise InvalidRequest(
            f"this model's classifier_from_token names {token!r}, which its tokenizer does not have", param="model"
        )
    return token_id
