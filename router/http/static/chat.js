// The chat; each answer has its timeline.

import { $, ask, element } from "./dom.js";
import { timeline } from "./timeline.js";

let messages = [], answering = null;

async function* events(body) {
  let rest = "";
  for await (const text of pieces(body.pipeThrough(new TextDecoderStream()))) {
    const frames = (rest + text).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (frame.startsWith("data: {")) yield JSON.parse(frame.slice(6)); // the last is [DONE]
    }
  }
}

async function* pieces(stream) { // some browsers cannot iterate streams
  const reader = stream.getReader();
  for (let got = await reader.read(); !got.done; got = await reader.read()) yield got.value;
}

async function send(question) {
  const conversation = messages; // a new chat may begin meanwhile
  const text = element("p", { className: "said" });
  const who = element("span", { className: "who" }, "Model");
  const answer = element("li", { ariaBusy: "true" }, who, text);
  const user = { role: "user", content: question };
  $("answers").append(element("li", {}, element("span", { className: "who" }, "You"),
    element("p", { className: "said" }, question)), answer);
  let said = "";
  answering = new AbortController();
  $("send").disabled = !($("stop").disabled = false);
  try {
    const response = await ask("v1/chat/completions", {
      method: "POST",
      signal: answering.signal,
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({
        messages: [...conversation, user], stream: true, timeline: true,
        max_tokens: $("max-tokens").valueAsNumber, // an empty field is NaN, which becomes null:
        temperature: $("temperature").valueAsNumber, // the server takes its default
      }),
    });
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices[0]?.delta;
      const content = delta?.content ?? "";
      const between = content && !said && text.textContent ? "\n\n" : ""; // after the thought
      text.append((delta?.reasoning_content ?? "") + between + content);
      said += content;
      if (event.pdserve) answer.append(timeline(event.pdserve.timeline, event.usage));
    }
  } catch (error) {
    const why = error.name === "AbortError" ? "stopped" : error.message;
    answer.append(element("p", { className: "bad", role: "alert" }, why));
  } finally {
    if (said) conversation.push(user, { role: "assistant", content: said });
    answer.ariaBusy = "false";
    answering = null;
    $("send").disabled = !($("stop").disabled = true);
  }
}

$("chat").addEventListener("submit", (event) => {
  event.preventDefault();
  const question = $("question").value.trim();
  if (!question || answering) return;
  $("question").value = "";
  send(question);
});
$("question").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("chat").requestSubmit();
});
document.addEventListener("keydown", (event) => event.key === "Escape" && answering?.abort());
$("stop").addEventListener("click", () => answering?.abort());
$("clear").addEventListener("click", () => {
  answering?.abort();
  messages = [];
  $("answers").replaceChildren();
});
