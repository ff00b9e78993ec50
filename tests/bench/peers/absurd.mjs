// Absurd: each task has five steps, each step stores two messages of 2 KB as its checkpoint.
import { Absurd } from "absurd-sdk";
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import pg from "pg";

const url = process.env.BENCH_DATABASE_URL;
const tasks = Number(process.env.BENCH_TASKS);
const steps = Number(process.env.BENCH_STEPS);
const text = process.env.BENCH_TEXT;

const pool = new pg.Pool({ connectionString: url, max: 20 });
const app = new Absurd({ db: pool, queueName: "bench" });
let left = tasks;
let drained;
const over = new Promise((resolve) => (drained = resolve));
app.registerTask({ name: "session" }, async (_, ctx) => {
  for (let step = 0; step < steps; step++) {
    await ctx.step(`step-${step}`, async () => [
      { role: "assistant", content: text },
      { role: "tool", content: text },
    ]);
  }
  return { done: true };
});
// The schema as `absurdctl init` applies it; scripts/setup takes it from that program.
await pool.query(readFileSync(new URL("absurd.sql", import.meta.url), "utf8"));
await app.createQueue("bench");
for (let task = 0; task < tasks; task++) await app.spawn("session", {}, { queue: "bench" });
console.log("ready");
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
await lines.next();
const began = process.hrtime.bigint();
await app.startWorker({ concurrency: 16, batchSize: 16, pollInterval: 0.02, onError: (error) => console.error(error) });
const watch = setInterval(async () => {
  const { rows } = await pool.query(
    "select exists (select from absurd.t_bench where state <> 'completed') as of_the_bench",
  );
  if (!rows[0].of_the_bench) drained();
}, 20);
await over;
clearInterval(watch);
console.log(`seconds ${Number(process.hrtime.bigint() - began) / 1e9}`);
await lines.next();
process.exit(0);
