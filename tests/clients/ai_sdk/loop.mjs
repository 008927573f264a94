// node loop.mjs BASE_URL MODEL: what the AI SDK makes of a question with tools, as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "pdserve", baseURL, apiKey: "none", supportsStructuredOutputs: true, includeUsage: true,
});
const model = provider(name);
const found = { Oslo: "snowy, 3 degrees", Cairo: "sunny, 33 degrees" };
const get_weather = tool({
  description: "The weather in a city",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => found[city],
});
const asked = {
  model,
  tools: { get_weather },
  prompt: "What is the weather in Oslo and in Cairo?",
  temperature: 0,
  stopWhen: stepCountIs(4),
};

const generated = await generateText(asked);
const streamed = streamText(asked);
let streamedText = "";
for await (const piece of streamed.textStream) streamedText += piece;
const required = await generateText({
  ...asked, prompt: "What is the weather in Oslo?", toolChoice: "required", stopWhen: stepCountIs(1),
});
const { object } = await generateObject({
  model,
  schema: z.object({ city: z.string(), sky: z.string(), degrees: z.number().int() }),
  prompt: "Lima: foggy, 17 degrees.",
  temperature: 0,
});
const used = ({ usage }) => [usage.inputTokens, usage.outputTokens];
console.log(JSON.stringify({
  text: generated.text,
  steps: generated.steps.map((step) => step.finishReason),
  streamedText,
  streamedSteps: (await streamed.steps).map((step) => step.finishReason),
  usage: generated.steps.map(used),
  streamedUsage: (await streamed.steps).map(used),
  required: required.toolCalls.map(({ toolName, input }) => [toolName, input]),
  object,
}));
