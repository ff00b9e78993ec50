// Agents on Absurd: each model call and each charge is a step, as its documents write an agent. compare.rs says what they do.
import { createRequire } from "node:module";
import { open } from "node:fs/promises";
import { readFileSync } from "node:fs";
import { setTimeout as sleep } from "node:timers/promises";
const peers = process.env.AGENT_PEERS;
const require = createRequire(`${peers}/`);
const { Absurd } = require("absurd-sdk");
const pg = require("pg");

const number = (name) => Number(process.env[name]);
const sessions = number("AGENT_SESSIONS");
const between = number("AGENT_BETWEEN_MS");
// Without the parameters of our own driver.
const [url] = process.env.AGENT_DATABASE_URL.split("?");
const pool = new pg.Pool({ connectionString: url, max: 20 });
const app = new Absurd({ db: pool, queueName: "agents" });

async function ask(messages) {
  const answer = await fetch(`${process.env.AGENT_MODEL_URL}/chat/completions`, {
    method: "POST",
    body: JSON.stringify({ model: "test", stream: true, messages }),
  });
  if (!answer.ok) throw new Error(`the model says ${answer.status}`);
  const reply = { role: "assistant", content: "" };
  for (const line of (await answer.text()).split("\n")) {
    if (!line.startsWith("data: {")) continue;
    const delta = JSON.parse(line.slice(6)).choices[0]?.delta ?? {};
    reply.content += delta.content ?? "";
    if (delta.tool_calls) reply.tool_calls = delta.tool_calls.map(({ index, ...call }) => call);
  }
  return reply;
}

async function charge(session, call) {
  const file = await open(process.env.FIXTURE_EFFECTS, "a");
  await file.write(`charge ${session} ${call}\n`);
  await file.sync();
  await file.close();
  await sleep(number("FIXTURE_TAKE_MS"));
  return "Charged.";
}

app.registerTask({ name: "agent" }, async ({ session }, ctx) => {
  const messages = [{ role: "user", content: session }];
  for (let turn = 0; ; turn++) {
    const reply = await ctx.step(`model-${turn}`, () => ask(messages));
    messages.push(reply);
    if (!reply.tool_calls) return { turns: turn };
    const { id } = reply.tool_calls[0];
    const content = await ctx.step(`charge-${turn}`, () => charge(session, id));
    messages.push({ role: "tool", tool_call_id: id, content });
  }
});

const isFirst = process.env.AGENT_FIRST === "1";
if (isFirst) {
  await pool.query(readFileSync(`${peers}/absurd.sql`, "utf8"));
  await app.createQueue("agents");
}
const worker = await app.startWorker({ concurrency: sessions, onError: (error) => console.error(error) });
if (isFirst) {
  for (let n = 0; n < sessions; n++) {
    await app.spawn("agent", { session: `agent ${n}` }, { queue: "agents" });
    await sleep(between);
  }
}
for (;;) {
  const { rows } = await pool.query("select state, count(*)::int from absurd.t_agents group by state");
  const open = rows.filter(({ state }) => !["completed", "failed", "cancelled"].includes(state));
  const count = (name) => rows.find(({ state }) => state === name)?.count ?? 0;
  if (open.length === 0 && count("completed") + count("failed") === sessions) {
    console.log(`completed ${count("completed")}`);
    break;
  }
  await sleep(50);
}
await worker.close();
process.exit(0);
