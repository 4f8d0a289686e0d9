// openai-node against the server of argv[2]: prints what came as one line of JSON.
const OpenAI = require("openai");

async function main() {
  const [, , baseURL, model] = process.argv;
  const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
  const messages = [{ role: "user", content: "Tell me of the sea." }];
  const result = {};

  result.models = (await client.models.list()).data.map((entry) => entry.id);

  const whole = await client.chat.completions.create({ model, messages, max_tokens: 16, temperature: 0 });
  result.whole = whole.choices[0].message.content;

  const stream = await client.chat.completions.create({ model, messages, max_tokens: 16, temperature: 0, stream: true });
  result.streamed = "";
  for await (const chunk of stream) result.streamed += chunk.choices[0].delta.content ?? "";

  const tool = {
    type: "function",
    function: {
      name: "sail",
      parameters: {
        type: "object",
        properties: { to: { enum: ["north", "south"] } },
        required: ["to"],
        additionalProperties: false,
      },
    },
  };
  const called = await client.chat.completions.create({
    model, messages, tools: [tool], tool_choice: "required", parallel_tool_calls: false, max_tokens: 200,
  });
  result.call = called.choices[0].message.tool_calls[0].function;

  const response = await client.responses.create({ model, input: "The sea", max_output_tokens: 8 });
  result.response = response.output_text;
  result.events = [];
  for await (const event of await client.responses.create({ model, input: "a", max_output_tokens: 2, stream: true })) {
    result.events.push(event.type);
  }

  const embeddings = await client.embeddings.create({ model, input: ["the sea", "a hill"] });
  result.embeddings = embeddings.data.map((entry) => entry.embedding.length);

  // Left in the middle: the server must not mind.
  const left = await client.completions.create({ model, prompt: "On and", max_tokens: 400, stream: true });
  for await (const chunk of left) {
    result.left = chunk.choices[0].text;
    break;
  }
  try {
    await client.completions.create({ model, prompt: "a", temperature: -1 });
  } catch (error) {
    result.error = [error.constructor.name, error.status, error.param];
  }
  console.log(JSON.stringify(result));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
