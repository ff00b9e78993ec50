// Fills and works Absurd's queues by its own SDK. `node absurd.mjs VERB`, with ABSURD_URL and WAKEFUL_PEERS.
import { createRequire } from "node:module";
import { appendFileSync, existsSync, readFileSync, watch } from "node:fs";
import { dirname } from "node:path";
const require = createRequire(`${process.env.WAKEFUL_PEERS}/absurd/`);
const { Absurd, TaskContext } = require(process.env.ABSURD_SDK ?? "absurd-sdk");
const pg = require("pg");

// The tests' server has no TLS, and this driver takes `prefer` for a demand.
const url = process.env.ABSURD_URL.replace(/sslmode=[^&]*/, "");
const pool = new pg.Pool({ connectionString: url, max: 24 });
const quiet = { log() {}, info() {}, warn() {}, error() {} };
const number = (name, usual) => Number(process.env[name] ?? usual);

// ---- messages ----

const vercelTurn = (i, step, text) => [
  { role: "assistant", content: [{ type: "text", text: `Step ${step} of ${i}. ${text}` },
    { type: "tool-call", toolCallId: `call_${i}_${step}`, toolName: "look", input: { step, at: { x: 1.5, y: null } } }] },
  { role: "tool", content: [{ type: "tool-result", toolCallId: `call_${i}_${step}`, toolName: "look",
    output: step % 3 ? { type: "text", value: `seen ${step}` } : { type: "json", value: { seen: [step], "é": "ü" } } }] },
];
const piUsage = (step) => ({ input: 10 + step, output: 5, cacheRead: 3, cacheWrite: 0, totalTokens: 18 + step,
  cost: { input: 0, output: 0, cacheRead: 0, cacheWrite: 0, total: 0.001 } });
const piAsks = (i, step) => ({ role: "assistant", api: "anthropic-messages", provider: "anthropic", model: "claude",
  content: [{ type: "thinking", thinking: "Hm.", thinkingSignature: "c2ln" }, { type: "text", text: `Step ${step}.` },
    { type: "toolCall", id: `toolu_${i}_${step}`, name: "look", arguments: { step } }],
  usage: piUsage(step), stopReason: "toolUse", timestamp: 1700000000000 + step });
const piGot = (i, step, details) => ({ role: "toolResult", toolCallId: `toolu_${i}_${step}`, toolName: "look",
  content: [{ type: "text", text: `seen ${step}` }], ...(details ? { details } : {}), isError: step % 7 === 0,
  timestamp: 1700000000001 + step });
const piDone = (step) => ({ role: "assistant", api: "anthropic-messages", provider: "anthropic", model: "claude",
  content: [{ type: "text", text: "Done." }], usage: piUsage(step), stopReason: "stop", timestamp: 1700000000002 });

// ---- agents ----

const hold = async (params, ctx, step) => {
  if (params.at !== step) return;
  if (params.fate === "fail") throw new Error("the provider is gone");
  if (params.fate === "wait") await ctx.awaitEvent(`approved:${params.i}`);
  if (params.fate === "nap") await ctx.sleepFor("nap", 3600);
  if (params.fate === "nul") await ctx.step("agent-loop", async () => ({ newMessages: [{ role: "assistant", content: "a\u0000b" }] }));
  if (params.fate === "lone") await ctx.step("agent-loop", async () => ({ newMessages: [{ role: "assistant", content: "a\ud800b" }] }));
};

const agents = {
  // (a) the seed's own
  "reply-email": async (params, ctx) => {
    for (let step = 1; step <= params.steps; step++) {
      await hold(params, ctx, step);
      await ctx.step("agent-loop", async () => step < params.steps
        ? { appendedMessages: [piAsks(params.i, step), piGot(params.i, step, step === 2 ? { type: "sentEmail", to: ["bob@example.org"], subject: "Hi" } : undefined)],
            finishReason: "tool-calls", usage: { inputTokens: 100 + step, outputTokens: 7, cachedInputTokens: 50, costCents: 0.25 },
            executedLocalToolCount: 1, conversationUpdates: [{ key: "last", value: step }, { key: `fact-${step % 5}`, value: { of: step } }] }
        : { appendedMessages: [piDone(step)], finishReason: "stop", usage: { inputTokens: 9, outputTokens: 1, cachedInputTokens: 0, costCents: 0 }, executedLocalToolCount: 0 });
    }
    return { replied: true };
  },
  // (b) Absurd's example of an agent loop
  "weather-agent": async (params, ctx) => {
    await ctx.step("initial-message", async () => ({ role: "user", content: params.prompt }));
    const text = params.bytes ? "x".repeat(params.bytes) : "";
    for (let step = 1; step <= params.steps; step++) {
      await hold(params, ctx, step);
      await ctx.step("agent-loop", async () => step < params.steps
        ? { newMessages: vercelTurn(params.i, step, text), finishReason: "tool-calls" }
        : { newMessages: [{ role: "assistant", content: [{ type: "text", text: "Sunny. 🌞" }] }], finishReason: "stop" });
    }
    return "Sunny.";
  },
  // (c) its pattern for pi-ai
  "run-agent": async (params, ctx) => {
    const say = (message) => ctx.step("message", async () => ({ message }));
    await say({ role: "user", content: params.userMessage, timestamp: 1700000000000 });
    for (let step = 1; step < params.steps; step++) {
      await say(piAsks(params.i, step));
      await hold(params, ctx, step);
      await say(piGot(params.i, step));
    }
    await say(piDone(params.steps));
  },
  // an agent of one's own, that the configuration declares
  "own-agent": async (params, ctx) => {
    for (let step = 1; step <= params.steps; step++) {
      await ctx.step("turn", async () => ({ said: [
        { who: "ai", text: `Turn ${step}.`, asks: step < params.steps ? [{ no: `n${params.i}.${step}`, tool: "look", with: { step } }] : [] },
        ...(step < params.steps ? [{ who: "tool", got: [{ no: `n${params.i}.${step}`, said: `seen ${step}` }] }] : []) ],
        tokens: [step, 1] }));
    }
  },
  // (a) later: the messages are in a table of the program, and a step points at the last one
  "reply-slim": async (params, ctx) => {
    const record = async (message) => (await pool.query(`insert into conversation_records (conversation_id, message_number, body)
      select $1, coalesce(max(message_number), 0) + 1, $2 from conversation_records where conversation_id = $1
      returning message_number::int as n`, [params.conversationId, message])).rows[0].n;
    await record({ role: "user", content: params.prompt });
    for (let step = 1; step <= params.steps; step++) {
      await ctx.step("agent-loop", async () => {
        const said = step < params.steps ? vercelTurn(params.i, step, "") : [{ role: "assistant", content: `Done ${params.i}.` }];
        let toMessageNumber;
        for (const message of said) toMessageNumber = await record(message);
        return { toMessageNumber, finishReason: step < params.steps ? "tool-calls" : "stop",
          usage: { inputTokens: 100 + step, outputTokens: 7, cachedInputTokens: 50, costCents: 0.25 }, executedLocalToolCount: said.length - 1 };
      });
    }
  },
  // no agent
  "nightly-report": async (params, ctx) => {
    const rows = await ctx.step("fetch", async () => [1, 2, 3]);
    await ctx.step("send", async () => ({ sent: rows.length }));
  },
};

const stepsOf = (i) => (i % 4 === 0 ? ((i * 37) % 200) + 1 : (i % 15) + 1);
const paramsOf = (name, i, more) => ({ i, steps: stepsOf(i), ...(name === "run-agent" ? { systemPrompt: "Be brief.", userMessage: `Question ${i}?` } : { prompt: `Weather ${i}?` }), ...more });

function registered(queueName) {
  const app = new Absurd({ db: pool, queueName, log: quiet });
  for (const [name, handler] of Object.entries(agents)) app.registerTask({ name, defaultMaxAttempts: 1 }, handler);
  return app;
}

async function settled(queue, open) {
  for (;;) {
    const { rows } = await pool.query(`select count(*)::int as n from absurd."t_${queue}" t join absurd."r_${queue}" r on r.run_id = t.last_attempt_run
      where t.state in ('pending', 'running') or (t.state = 'sleeping' and r.available_at < now() + interval '60 s')`);
    if (rows[0].n <= open) return;
    await new Promise((done) => setTimeout(done, 50));
  }
}

const verbs = {
  async schema() {
    await pool.query(readFileSync(`${process.env.WAKEFUL_PEERS}/absurd/${process.env.ABSURD_SQL ?? "absurd.sql"}`, "utf8"));
  },
  // FINISHED tasks that end well, of three shapes, and some of every other kind, in two queues.
  async fill() {
    const finished = number("FINISHED", 1000);
    const app = registered("default"), parted = registered("parted");
    await app.createQueue("default");
    await parted.createQueue("parted", { storageMode: "partitioned" });
    const spawn = (to, name, params, options) => to.spawn(name, params, options);
    const ids = {};
    const names = ["reply-email", "weather-agent", "run-agent"];
    for (let i = 0; i < finished; i++) {
      const name = names[i % 3];
      const params = paramsOf(name, i, i % 10 === 1 ? { conversationId: `thread-${i % 50}` } : {});
      const options = i % 6 === 0 ? { idempotencyKey: `key-${i}` } : {};
      await spawn(i % 5 === 4 ? parted : app, name, params, options);
    }
    let i = 100000;
    for (const name of names) {
      for (const fate of ["fail", "wait", "nap"]) {
        ids[`${fate} ${name}`] = (await spawn(app, name, paramsOf(name, ++i, { steps: 14, at: 12, fate }))).taskID;
      }
    }
    for (const fate of ["nul", "lone"]) {
      ids[fate] = (await spawn(app, "weather-agent", paramsOf("weather-agent", ++i, { steps: 4, at: 2, fate }))).taskID;
    }
    ids.big = (await spawn(app, "weather-agent", paramsOf("weather-agent", ++i, { steps: 4, bytes: 5 << 20 }))).taskID;
    ids.longest = (await spawn(app, "weather-agent", paramsOf("weather-agent", ++i, { steps: 200, bytes: 2048 }))).taskID;
    ids.woken = (await spawn(app, "weather-agent", paramsOf("weather-agent", ++i, { steps: 5, at: 3, fate: "wait" }))).taskID;
    await app.emitEvent(`approved:${i}`, { by: "ann" });
    ids.report = (await spawn(app, "nightly-report", {})).taskID;
    for (let n = 0; n < 3; n++) ids.own = (await spawn(app, "own-agent", { i: ++i, steps: 12 })).taskID;
    const workers = [await app.startWorker({ concurrency: 12, batchSize: 12, pollInterval: 0.02, onError() {} }),
      await parted.startWorker({ concurrency: 8, batchSize: 8, pollInterval: 0.02, onError() {} })];
    await settled("default", 0);
    await settled("parted", 0);
    await Promise.all(workers.map((worker) => worker.close()));
    // What the worker would touch is made after it has ended.
    ids.cancelled = (await spawn(app, "weather-agent", paramsOf("weather-agent", ++i, { steps: 3 }))).taskID;
    await app.cancelTask(ids.cancelled);
    ids.running = (await spawn(app, "weather-agent", paramsOf("weather-agent", ++i, { steps: 3 }))).taskID;
    await app.claimTasks({ batchSize: 1, claimTimeout: 3600, workerId: "w" });
    ids.pending = (await spawn(app, "weather-agent", paramsOf("weather-agent", ++i, { steps: 3 }))).taskID;
    // A newer attempt that is not the task's: Absurd hides its checkpoints, and those that are not committed.
    ids.hidden = ids.woken;
    await pool.query(`insert into absurd.r_default (run_id, task_id, attempt, state, available_at)
      values ('00000000-0000-7000-8000-000000000001', $1, 2, 'failed', now())`, [ids.hidden]);
    await pool.query(`insert into absurd.c_default (task_id, checkpoint_name, state, status, owner_run_id) values
      ($1, 'agent-loop#77', '{"newMessages": [{"role": "assistant", "content": "hidden"}]}', 'committed', '00000000-0000-7000-8000-000000000001'),
      ($1, 'agent-loop#78', '{"newMessages": [{"role": "assistant", "content": "pending"}]}', 'pending', null)`, [ids.hidden]);
    console.log(JSON.stringify(ids));
  },
  // Tasks of the slim shape: three of one conversation, one after the other, and one of another.
  async slim() {
    await pool.query(`create table conversation_records (conversation_id text, message_number bigint, body jsonb not null,
      primary key (conversation_id, message_number))`);
    const app = registered("default");
    await app.createQueue("default");
    const ids = {};
    for (const [i, conversationId] of ["thread", "thread", "other", "thread"].entries()) {
      ids[`slim ${i}`] = (await app.spawn("reply-slim", { i, steps: 11 + i, conversationId, prompt: `Question ${i}?` })).taskID;
    }
    const worker = await app.startWorker({ concurrency: 1, pollInterval: 0.02, onError() {} });
    await settled("default", 0);
    await worker.close();
    console.log(JSON.stringify(ids));
  },
  // Spawns RATE tasks a second until the file STOP exists. Where they go is the switch: the file SWITCH.
  async produce() {
    const app = new Absurd({ db: pool, queueName: "live", log: quiet });
    await app.createQueue("live");
    const began = Date.now();
    for (let i = 0; !existsSync(process.env.STOP); i++) {
      const key = `task-${i}`, params = { prompt: key };
      if (existsSync(process.env.SWITCH)) {
        const answer = await fetch(`${process.env.WAKEFUL}/v1/triggers/absurd`, { method: "POST",
          headers: { "content-type": "application/json", authorization: `Bearer ${process.env.TOKEN}` },
          body: JSON.stringify({ taskName: "live", params, options: { queue: "live", idempotencyKey: key } }) });
        if (answer.status >= 300) throw new Error(`${answer.status} ${await answer.text()}`);
        appendFileSync(process.env.SPAWNED, `${key} here\n`);
      } else {
        await app.spawn("live", params, { queue: "live", idempotencyKey: key });
        appendFileSync(process.env.SPAWNED, `${key} absurd\n`);
      }
      const wait = began + (i + 1) * 1000 / number("RATE", 20) - Date.now();
      if (wait > 0) await new Promise((done) => setTimeout(done, wait));
    }
  },
  // Absurd's worker of the live tasks: two steps with a nap or a wait between them, then the effect.
  async work() {
    const app = new Absurd({ db: pool, queueName: "live", log: quiet });
    await app.createQueue("live");
    app.registerTask({ name: "live", defaultMaxAttempts: 3 }, async (params, ctx) => {
      const key = params.prompt, n = Number(key.split("-")[1]);
      await ctx.step("initial-message", async () => ({ role: "user", content: key }));
      await ctx.step("agent-loop", async () => {
        await new Promise((done) => setTimeout(done, 50 + (n % 5) * 100));
        return { newMessages: vercelTurn(n, 1, ""), finishReason: "tool-calls" };
      });
      await ctx.sleepFor("nap", 1 + (n % 4) * 2);
      await ctx.step("agent-loop", async () => {
        appendFileSync(process.env.EFFECTS, `${key}\n`);
        return { newMessages: [{ role: "assistant", content: "Done." }], finishReason: "stop" };
      });
    });
    await app.startWorker({ concurrency: 16, batchSize: 16, claimTimeout: 60, pollInterval: 0.05, onError() {} });
    // The test makes this file when the worker is to stop.
    await new Promise((done) => {
      const stop = () => { if (existsSync(process.env.STOP_WORK)) { folder.close(); done(); } };
      const folder = watch(dirname(process.env.STOP_WORK), stop);
      stop();
    });
    await app.close();
  },
  // What a worker of Absurd does when it resumes TASK: it loads all checkpoints. The best of ten, and their bytes.
  async resume() {
    const { rows: [task] } = await pool.query("select task_id, last_attempt_run as run_id from absurd.t_default where task_id = $1", [process.env.TASK]);
    let best = Infinity, bytes = 0;
    for (let n = 0; n < 10; n++) {
      const began = process.hrtime.bigint();
      const ctx = await TaskContext.create({ log: quiet, taskID: task.task_id, con: pool, queueName: "default", task, claimTimeout: 60, onLeaseExtended() {} });
      best = Math.min(best, Number(process.hrtime.bigint() - began) / 1e6);
      bytes = [...ctx.checkpointCache.values()].reduce((sum, state) => sum + JSON.stringify(state).length, 0);
    }
    console.log(JSON.stringify({ ms: best, bytes }));
  },
};

await verbs[process.argv[2]]();
process.exit(0);
