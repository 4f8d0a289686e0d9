"""AsyncLLM: the Python API for programs with an event loop. The engine runs in a thread of this process."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from types import TracebackType
from typing import Unpack

from jaxserve.engine.beam_search import BeamSearchOutput, run_beams_async
from jaxserve.engine.embedding import ClassificationOutput, EmbeddingOutput
from jaxserve.engine.output import RequestGroup
from jaxserve.engine.prompts import Prompt
from jaxserve.local_model import ChatOptions, LocalModel, Message, classification_of, embedding_of, optional_flag
from jaxserve.request import Pooling, RequestOutput
from jaxserve.sampling_params import BeamSearchParams, SamplingParams


class AsyncLLM(LocalModel):
    """A model that generates in this process, for code that awaits.

        async with AsyncLLM("path/to/model") as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=50)):
                print(output.outputs[0].text, end="")

    Options are those of `LLM`. Loading the model blocks: construct it before the event loop has other work, or in a
    thread. Any number of requests run at once; leaving an `async for`, or cancelling its task, aborts its request.
    """

    def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AsyncGenerator[RequestOutput]:
        """Continue one prompt; yield new output as it arrives.

        Raises InvalidRequest, RequestFailed and EngineDead.
        """
        return self._stream(lambda: self._prepare([prompt], sampling_params)[0])

    def chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, **options: Unpack[ChatOptions]
    ) -> AsyncGenerator[RequestOutput]:
        """Run `generate` for the next message of a conversation, through the model's chat template."""
        return self._stream(lambda: self._prepare([self._render(messages, options)], sampling_params)[0])

    async def beam_search(self, prompt: Prompt, params: BeamSearchParams) -> BeamSearchOutput:
        """Search the most likely continuations of one prompt, as `LLM.beam_search` does."""
        (search,) = await asyncio.to_thread(self._prepare_beams, [prompt], params)
        await run_beams_async(self._frontend, [search])
        return search.result()

    async def embed(
        self,
        prompt: Prompt,
        *,
        pooling: Pooling | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        prompt_name: str | None = None,
    ) -> EmbeddingOutput:
        """Return the vector of one prompt, as `LLM.embed` does."""
        dimensions, normalize = self._checked_dimensions(dimensions), optional_flag("normalize", normalize)
        group = await self._pooled(prompt, pooling, prompt_name)
        return embedding_of(group, self._frontend.embedder, dimensions=dimensions, normalize=normalize)

    async def classify(self, prompt: Prompt) -> ClassificationOutput:
        """Return the probabilities of the labels of one prompt, as `LLM.classify` does."""
        head = self._head()
        return classification_of(await self._pooled(prompt, "last"), head)

    async def _pooled(self, prompt: Prompt, pooling: Pooling | None, prompt_name: str | None = None) -> RequestGroup:
        (group,) = await asyncio.to_thread(self._prepare_embeddings, [prompt], pooling, prompt_name)
        await self._frontend.run([group], lambda _index, _delta: None)
        return group

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    async def _stream(self, prepare: Callable[[], RequestGroup]) -> AsyncGenerator[RequestOutput]:
        """Run the request that `prepare` makes, in a thread since it tokenizes; yield its output as it arrives."""
        group = await asyncio.to_thread(prepare)
        outputs: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        run = self._frontend.run([group], lambda _, delta: outputs.put_nowait(delta))
        task = asyncio.create_task(run)
        task.add_done_callback(lambda _: outputs.put_nowait(None))
        try:
            while (delta := await outputs.get()) is not None:
                yield delta
                group.forget_logprobs()
            await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
