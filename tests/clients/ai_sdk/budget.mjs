// node budget.mjs BASE_URL MODEL: an object within a hundred tokens, as JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject } from "ai";
import { z } from "zod";

const [baseURL, name] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "pdserve", baseURL, apiKey: "none", supportsStructuredOutputs: true,
});
const { object } = await generateObject({
  model: provider(name),
  schema: z.object({ ok: z.boolean(), mood: z.enum(["glad", "sad"]) }),
  prompt: "Is 2 + 2 = 4?",
  temperature: 0,
  maxOutputTokens: 100,
  maxRetries: 0,
});
console.log(JSON.stringify(object));
