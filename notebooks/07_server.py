# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A server in a notebook
#
# [![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)](https://colab.research.google.com/)
#
# The engine behind `LLM` also answers over HTTP, with the API that OpenAI's clients speak. Here a server runs beside the
# notebook, and we talk to it: plain text, a stream, JSON that follows a schema, a tool call, embeddings. The model is tiny,
# so what it says makes little sense; the form of its answers is right anyway.

# %%
# On Colab, upload this notebook and the source as jaxserve.zip, or let SOURCE be "jaxserve[cuda12] @ git+https://..." with
# the address of a repository. Where the package is installed already, this cell does nothing.
import importlib.util

SOURCE = "./jaxserve.zip[cuda12]"
if importlib.util.find_spec("jaxserve") is None:
    get_ipython().run_line_magic("pip", f"install -q '{SOURCE}'")

# %%
import json
import socket
import subprocess
import sys
import tempfile
import time

import httpx

# %% [markdown]
# ## Start
#
# In a terminal this is `jaxserve serve scribe-2m`. It listens on this machine only, and `--warmup none` compiles steps
# when they are first needed: good for a notebook, wrong for a server with users.

# %%
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]

log = tempfile.TemporaryFile("w+")
server = subprocess.Popen(
    [sys.executable, "-m", "jaxserve", "serve", "scribe-2m", "--port", str(port), "--max-model-len", "512",
     "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--kv-cache-memory", str(2**24), "--warmup", "none"],
    stdout=log, stderr=subprocess.STDOUT,
)
client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=300)


def is_ready():
    """Return true once the server takes requests. A server that has ended raises."""
    if server.poll() is not None:
        log.seek(0)
        raise RuntimeError(log.read())
    try:
        return client.get("/health").status_code == 200
    except httpx.TransportError:
        return False


while not is_ready():
    time.sleep(0.2)
model = client.get("/v1/models").json()["data"][0]["id"]
print("ready:", model.rsplit("/", 1)[-1])

# %% [markdown]
# ## A request
#
# It is a POST with a JSON body; a client library only wraps it. What is the answer besides the text?

# %%
answer = client.post("/v1/completions", json={
    "model": model, "prompt": "Once upon a time", "max_tokens": 16, "temperature": 0,
}).json()
print(json.dumps({key: answer[key] for key in ("object", "choices", "usage")}, indent=1)[:700])

# %% [markdown]
# What is wrong is refused by name, before it runs.

# %%
wrong = client.post("/v1/completions", json={"model": model, "prompt": "Once", "temperature": -1})
print(wrong.status_code, wrong.json()["error"]["message"])
assert wrong.status_code == 400

# %% [markdown]
# ## A stream
#
# With `"stream": true` the text comes in pieces as it is made: each event is a line that begins with `data: `.

# %%
body = {"model": model, "messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 24, "stream": True,
        "temperature": 0}
pieces = []
with client.stream("POST", "/v1/chat/completions", json=body) as response:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content") or "")
print(len(pieces), "pieces:", pieces[:8])

# %% [markdown]
# ## The same by a client library
#
# OpenAI's package needs only the address. The key is checked if the server was given one.

# %%
try:
    import openai
except ImportError:
    get_ipython().run_line_magic("pip", "install -q openai")
    import openai

api = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
chat = api.chat.completions.create(
    model=model, messages=[{"role": "user", "content": "Who are you?"}], max_tokens=16, temperature=0
)
print(repr(chat.choices[0].message.content), chat.usage.total_tokens, "tokens")

# %% [markdown]
# ## JSON that follows a schema
#
# A model of two million parameters has never learned JSON. Can it answer in it? Yes: in each step, only tokens that may
# continue a valid answer can be drawn.

# %%
schema = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
structured = api.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Describe a person."}],
    response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
    max_tokens=60,
    temperature=0,
)
person = json.loads(structured.choices[0].message.content)
print(person)
assert set(person) == {"name", "age"}

# %% [markdown]
# ## A tool call
#
# A tool is a name and a schema of arguments. `tool_choice="required"` makes the model call one, and its arguments follow
# the schema. Running the tool is the caller's work.

# %%
weather = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
called = api.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is the weather in Rome?"}],
    tools=[weather],
    tool_choice="required",
    max_tokens=60,
    temperature=0,
)
[call] = called.choices[0].message.tool_calls
print(call.function.name, json.loads(call.function.arguments))
assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")

# %% [markdown]
# ## Embeddings
#
# The hidden state of the last token is a vector for the whole text. Which two of these are the closest?

# %%
texts = ["The cat sat on the mat.", "A cat was sitting on a mat.", "Taxes are due in April."]
vectors = [item.embedding for item in api.embeddings.create(model=model, input=texts).data]
for first, second in ((0, 1), (0, 2), (1, 2)):
    cosine = sum(a * b for a, b in zip(vectors[first], vectors[second]))
    print(f"{cosine:.3f}  {texts[first]} | {texts[second]}")

# %% [markdown]
# ## What the server counts
#
# `/metrics` is read by Prometheus. The address of the server in a browser is a playground, and `/docs` is the API.

# %%
counters = ("request_success_total", "prompt_tokens_total", "generation_tokens_total")
for line in client.get("/metrics").text.splitlines():
    name, _, value = line.rpartition(" ")
    if not line.startswith("#") and name.split("{")[0].endswith(counters) and float(value):
        print(name.split("{")[0], float(value))

# %%
server.terminate()
print("exit code", server.wait(timeout=60))

# %% [markdown]
# ## Without HTTP: AsyncLLM
#
# A program with an event loop of its own, as this notebook is, needs no server. `AsyncLLM` runs the engine in a thread
# and streams into the loop. Leaving the loop early aborts the request.

# %%
import asyncio

from jaxserve import AsyncLLM, SamplingParams


async def tell(llm, prompt):
    """Return a short continuation, and how many pieces it came in."""
    text, count = "", 0
    async for output in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)):
        text, count = text + output.outputs[0].text, count + 1
    return prompt, text, count


async with AsyncLLM("scribe-2m", max_model_len=128, max_num_seqs=4, kv_cache_memory=2**22, warmup="none",
                    progress=False) as llm:
    for prompt, text, count in await asyncio.gather(tell(llm, "The sea was"), tell(llm, "My dear friend,")):
        print(f"{prompt}|{text} ({count} pieces)")
