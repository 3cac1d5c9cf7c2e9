// Vercel AI SDK. API: responses (default), chat, compat, anthropic. STREAM=1: streamText.
import { execSync } from "node:child_process";
import { createRequire } from "node:module";

const require = createRequire(import.meta.url);
const { generateText, streamText, stepCountIs, tool } = require("ai");
const { z } = require("zod");

const model = process.env.LEYDEN_MODEL;
const makers = {
  responses: () => require("@ai-sdk/openai").openai(model),
  chat: () => require("@ai-sdk/openai").openai.chat(model),
  compat: () =>
    require("@ai-sdk/openai-compatible").createOpenAICompatible({
      name: "leyden",
      baseURL: process.env.OPENAI_BASE_URL,
      apiKey: process.env.OPENAI_API_KEY,
    })(model),
  anthropic: () =>
    require("@ai-sdk/anthropic").createAnthropic({
      baseURL: `${process.env.ANTHROPIC_BASE_URL}/v1`,
      apiKey: process.env.ANTHROPIC_API_KEY,
    })(model),
};
const bash = tool({
  description: "Run a shell command",
  inputSchema: z.object({ command: z.string() }),
  execute: async ({ command }) => execSync(command).toString(),
});
const options = {
  model: makers[process.env.API ?? "responses"](),
  system: "You run commands.",
  prompt: process.argv[2],
  stopWhen: stepCountIs(6),
  tools: { bash },
};
if (process.env.STREAM) {
  const result = streamText({ ...options, onError: ({ error }) => { throw error; } });
  let text = "";
  for await (const delta of result.textStream) text += delta;
  console.log(JSON.stringify(text));
} else {
  console.log(JSON.stringify((await generateText(options)).text));
}
