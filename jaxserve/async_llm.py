"""AsyncLLM: the Python API for programs with an event loop. The engine runs in a thread of this process."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from jaxserve.engine.embedding import EmbeddingOutput
from jaxserve.engine.frontend import Frontend
from jaxserve.engine.output import RequestGroup
from jaxserve.engine.prompts import Prompt
from jaxserve.llm import LLM, Message
from jaxserve.request import Pooling, RequestOutput, SamplingParams
from jaxserve.tokenizer import Tokenizer


class AsyncLLM:
    """A model that generates in this process, for code that awaits.

        async with AsyncLLM("path/to/model") as llm:
            async for output in llm.generate("Once upon a time", SamplingParams(max_tokens=50)):
                print(output.outputs[0].text, end="")

    Options are those of `LLM`. Loading the model blocks: construct it before the event loop has other work, or in a
    thread. Any number of requests run at once; leaving an `async for`, or cancelling its task, aborts its request.
    """

    def __init__(self, *args: Any, **options: Any):
        """Load the model as `LLM` does. Raises StartupError."""
        self._llm = LLM(*args, **options)

    @classmethod
    def from_frontend(cls, frontend: Frontend) -> "AsyncLLM":
        """Return an AsyncLLM on an engine that runs already; closing it closes the engine."""
        made = cls.__new__(cls)
        made._llm = LLM.from_frontend(frontend)
        return made

    def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> AsyncGenerator[RequestOutput]:
        """Continue one prompt; yield new output as it arrives.

        Raises InvalidRequest, RequestFailed and EngineDead.
        """
        return self._stream(lambda: self._llm._prepare([prompt], sampling_params)[0])

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Run `generate` for the next message of a conversation, through the model's chat template."""

        def prepare() -> RequestGroup:
            prompt = self._llm._render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                chat_template_kwargs=chat_template_kwargs,
            )
            return self._llm._prepare([prompt], sampling_params)[0]

        return self._stream(prepare)

    async def embed(
        self, prompt: Prompt, *, pooling: Pooling = "last", dimensions: int | None = None, normalize: bool = True
    ) -> EmbeddingOutput:
        """Return the vector of one prompt, as `LLM.embed` does."""
        options: dict[str, Any] = {"pooling": pooling, "dimensions": dimensions, "normalize": normalize}
        (output,) = await asyncio.to_thread(lambda: self._llm.embed([prompt], use_tqdm=False, **options))
        return output

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer."""
        return self._llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the SamplingParams that the model's authors recommend."""
        return self._llm.get_default_sampling_params()

    def close(self) -> None:
        """Stop the engine and free the device. Idempotent; later calls raise EngineDead."""
        self._llm.close()

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
        run = self._llm._frontend.run([group], lambda _, delta: outputs.put_nowait(delta))
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
