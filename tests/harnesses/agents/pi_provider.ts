// Registers the gateway as pi's provider `leyden`. API: openai-completions (default), openai-responses, anthropic-messages.
const api = process.env.API ?? "openai-completions";
const baseUrl = api === "anthropic-messages" ? process.env.ANTHROPIC_BASE_URL : process.env.OPENAI_BASE_URL;

export default function (pi) {
  pi.registerProvider("leyden", {
    baseUrl,
    apiKey: "LEYDEN_KEY",
    api,
    models: [
      {
        id: process.env.LEYDEN_MODEL,
        name: process.env.LEYDEN_MODEL,
        reasoning: true,
        input: ["text"],
        cost: { input: 0, output: 0, cacheRead: 0, cacheWrite: 0 },
        contextWindow: 131072,
        maxTokens: 16384,
      },
    ],
  });
}
