// The AI SDK against the server of argv[2]: prints what came as one line of JSON.
const { generateObject, generateText, streamText, tool } = require("ai");
const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { z } = require("zod");

async function use(model) {
  const common = { model, temperature: 0, maxRetries: 0 };
  const question = { role: "user", content: "Tell me of the sea." };
  const result = {};

  const whole = await generateText({ ...common, messages: [question], maxOutputTokens: 16 });
  result.whole = whole.text;

  result.streamed = "";
  const stream = streamText({ ...common, messages: [question], maxOutputTokens: 16 });
  for await (const part of stream.textStream) result.streamed += part;

  const messages = [question, ...whole.response.messages, { role: "user", content: "And then?" }];
  result.second = (await generateText({ ...common, messages, maxOutputTokens: 16 })).text;

  const ship = z.object({ masts: z.number().int().min(1).max(5), isOld: z.boolean() });
  result.object = (await generateObject({ ...common, schema: ship, prompt: "A ship?", maxOutputTokens: 300 })).object;

  const sail = tool({ description: "Sail away.", inputSchema: z.object({ to: z.enum(["north", "south"]) }) });
  const called = await generateText({
    ...common, tools: { sail }, toolChoice: "required", prompt: "Sail!", maxOutputTokens: 200,
  });
  const { toolName, input } = called.toolCalls[0];
  result.call = { toolName, input };
  return result;
}

async function main() {
  const [, , baseURL, model] = process.argv;
  const compatible = createOpenAICompatible({
    name: "server", baseURL, apiKey: "none", supportsStructuredOutputs: true,
  });
  const openai = createOpenAI({ baseURL, apiKey: "none" });
  const result = { compatible: await use(compatible(model)), openai: await use(openai(model)) };
  console.log(JSON.stringify(result));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
