// A person with a browser: Debian's Chromium through npm's playwright-core, and npm's axe-core. Prints one JSON object.
// Arguments: the server's address, and as JSON the ids of what is there.
import { createRequire } from "node:module";

const peers = createRequire(process.env.WAKEFUL_PEERS + "/browser/package.json");
const { chromium } = peers("playwright-core");
const axe = peers.resolve("axe-core/axe.min.js");
const [base, given] = process.argv.slice(2);
const { failed, pages, chat } = JSON.parse(given);
const root = base + "/console";

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM || "/usr/bin/chromium", args: ["--no-sandbox"] });
const told = { clicks: {}, serious: [], elsewhere: [], ran: [], broken: [], wide: [], covered: [], whilePaused: [], live: false, first: "", streams: false, ended: false };

async function person(options) {
  const context = await browser.newContext({ viewport: { width: 1280, height: 800 }, ...options });
  const page = await context.newPage();
  page.on("request", (request) => { if (!request.url().startsWith(base + "/")) told.elsewhere.push(request.url()); });
  page.on("dialog", (dialog) => { told.ran.push(`${page.url()}: ${dialog.message()}`); dialog.dismiss(); });
  page.on("pageerror", (error) => told.broken.push(`${page.url()}: ${error.message}`));
  page.on("console", (line) => { if (line.type() === "error") told.broken.push(`${page.url()}: ${line.text()}`); });
  return page;
}

const status = async (id) => (await (await fetch(`${base}/v1/sessions/${id}`)).json()).status;
// Waits for what the session's stream tells.
async function became(id, wanted) {
  const stream = await fetch(`${base}/v1/sessions/${id}/stream`);
  if (await status(id) === wanted) return stream.body.cancel();
  for await (const _ of stream.body) if (await status(id) === wanted) return;
}

// From the overview to a run that was retried.
for (const [way, options] of [["mouse", {}], ["without JavaScript", { javaScriptEnabled: false }]]) {
  const page = await person(options);
  await page.goto(root + "/");
  await page.click(`a.row-link[href$="${failed[way]}"]`);
  await page.waitForSelector("text=Why it failed");
  await page.click("button:text-is('Retry')");
  await page.waitForSelector(".note.good");
  told.clicks[way] = 2;
  await became(failed[way], "completed");
  await page.context().close();
}
{
  const page = await person({});
  await page.goto(root + "/");
  let presses = 0;
  // The first row is the newest failed session.
  await page.keyboard.press("j"); presses += 1;
  for (let tries = 0; tries < 20; tries += 1) {
    const href = await page.evaluate(() => document.activeElement.getAttribute("href") || "");
    if (href.endsWith(failed.keyboard)) break;
    await page.keyboard.press("j"); presses += 1;
  }
  await Promise.all([page.waitForNavigation(), page.keyboard.press("Enter")]); presses += 1;
  await page.waitForSelector("text=Why it failed");
  await page.keyboard.press("a"); presses += 1;
  const act = await page.evaluate(() => document.activeElement.textContent);
  if (act !== "Retry") told.broken.push(`the first act is ${act}`);
  await page.keyboard.press("Enter"); presses += 1;
  await page.waitForSelector(".note.good");
  told.clicks.keyboard = presses;
  await became(failed.keyboard, "completed");
  await page.context().close();
}

// What is said is seen without loading the page again.
{
  const page = await person({});
  await page.goto(`${root}/chat/${chat}`);
  await page.fill("textarea[name=text]", "Are you there?");
  await page.click("button:text-is('Send')");
  await page.waitForURL(/#say$/);
  await page.waitForFunction(() => [...document.querySelectorAll(".said")].at(-1)?.textContent.includes("Here I am."));
  told.live = true;
  const focused = await page.evaluate(() => document.activeElement.id);
  if (focused !== "say") told.broken.push(`after a message the focus is on "${focused}"`);
  // What a person has clicked in the chat keeps nothing from it.
  const before = await page.locator(".said").count();
  await page.evaluate(() => {
    const one = document.querySelector('[data-part="said"] .said');
    one.tabIndex = -1;
    one.focus();
  });
  const other = await page.context().newPage();
  await other.goto(`${root}/chat/${chat}`);
  await other.fill("textarea[name=text]", "Are you there?");
  await other.click("button:text-is('Send')");
  await other.waitForURL(/#say$/);
  await page.waitForFunction((before) => document.querySelectorAll(".said").length >= before + 2, before);
  await page.context().close();
}

// The browser fetches a page's icon by itself, and when it likes.
const byThePage = (url) => !url.endsWith("/healthz") && !url.includes("/assets/icon.");

// A page that is paused asks for nothing, however long it stays open; then it goes on. The driver moves the page's clock.
{
  const page = await person({});
  await page.clock.install();
  await page.goto(root + "/");
  await page.keyboard.press("p");
  page.on("request", (request) => told.whilePaused.push(request.url()));
  await page.clock.fastForward(600_000);
  await page.evaluate(() => fetch(location.origin + "/healthz"));
  told.whilePaused = told.whilePaused.filter(byThePage);
  const paused = told.whilePaused;
  told.whilePaused = [];
  const again = page.waitForRequest(root + "/");
  await page.keyboard.press("p");
  await page.clock.fastForward(10_000);
  await again;
  await page.context().close();
  told.whilePaused = paused;
}

// A page in a hidden tab asks for nothing either, and looks again when a person opens the tab.
for (const path of ["/", `/chat/${chat}`]) {
  const page = await person({});
  await page.clock.install();
  await page.goto(root + path);
  const hide = (hidden) => page.evaluate((hidden) => {
    Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
    document.dispatchEvent(new Event("visibilitychange"));
  }, hidden);
  await hide(true);
  const asked = [];
  page.on("request", (request) => asked.push(request.url()));
  await page.clock.fastForward(600_000);
  await page.evaluate(() => fetch(location.origin + "/healthz"));
  told.whilePaused.push(...asked.filter(byThePage));
  const again = page.waitForRequest(root + path);
  await hide(false);
  await again;
  await page.context().close();
}

// A page says that the server is away, and when it is back, and goes on.
{
  const page = await (await browser.newContext()).newPage();
  await page.clock.install();
  await page.goto(root + "/");
  const away = async (state) => {
    await page.clock.fastForward(30_000);
    return page.waitForSelector("[data-away]", { state, timeout: 20_000 }).then(() => true, () => false);
  };
  await page.context().setOffline(true);
  told.away = [await away("visible")];
  // The notice lies over nothing that can be pressed.
  told.covered = await page.evaluate(() => [...document.querySelectorAll("main :is(a, button, input, textarea)")]
    .filter((one) => {
      const { left, top, width, height } = one.getBoundingClientRect();
      const over = width > 0 && document.elementFromPoint(left + width / 2, top + height / 2);
      return over && over.closest("[data-away]");
    }).map((one) => one.outerHTML));
  await page.context().setOffline(false);
  told.away.push(await away("hidden"));
  await page.context().close();
}

// A stream that a proxy refuses is opened again, and a page whose login has ended says so.
{
  const page = await (await browser.newContext()).newPage();
  await page.clock.install();
  let opened = 0;
  const isStream = (url) => url.pathname.endsWith("/stream");
  await page.route(isStream, (route) => {
    opened += 1;
    return opened === 1 ? route.fulfill({ status: 502, body: "" }) : route.continue();
  });
  await page.goto(`${root}/chat/${chat}`);
  await page.waitForSelector("[data-away]", { state: "visible" });
  const again = page.waitForRequest((request) => isStream(new URL(request.url())), { timeout: 20_000 });
  await page.clock.fastForward(6_000);
  told.streams = await again.then(() => true, () => false);
  await page.goto(root + "/");
  await page.route(root + "/", (route) => route.fulfill({ status: 403, contentType: "text/html", body: "<p>no</p>" }));
  await page.clock.fastForward(30_000);
  told.ended = await page.waitForSelector("[data-ended]", { state: "visible", timeout: 20_000 }).then(() => true, () => false);
  await page.context().close();
}

// A call waits for approval. It would be the first card of the overview, so it comes after the presses above.
{
  const asked = await fetch(`${base}/v1/chat/till/messages`, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ text: "charge me" }) });
  const { session_id } = await asked.json();
  await became(session_id, "needs_attention");
  pages.push(`/sessions/${session_id}`, "/chat/till");
  // Enter in the field of the reason decides nothing, with a script or without. The key leads to the first button that is seen.
  for (const options of [{}, { javaScriptEnabled: false }]) {
    const page = await person(options);
    await page.goto(`${root}/sessions/${session_id}`);
    await page.fill(".asks input[name=reason]", "too dear");
    await page.keyboard.press("Enter");
    if (options.javaScriptEnabled !== false) {
      await page.evaluate(() => document.activeElement.blur());
      await page.keyboard.press("a");
      told.first = await page.evaluate(() => document.activeElement.textContent);
    }
    await page.goto(`${root}/sessions/${session_id}`);
    if (await status(session_id) !== "needs_attention") told.broken.push("Enter decided for a call");
    await page.context().close();
  }
}

// Every page in both themes, wide and narrow.
for (const [colorScheme, width] of [["light", 1280], ["dark", 1280], ["light", 390], ["dark", 390]]) {
  const page = await person({ colorScheme, viewport: { width, height: 844 } });
  for (const path of pages) {
    await page.goto(root + path);
    if (await page.evaluate(() => document.documentElement.scrollWidth > window.innerWidth)) told.wide.push(`${path} at ${width}`);
    // With WAKEFUL_SHOTS=FOLDER a picture of each page stays there, for a person to look at.
    if (process.env.WAKEFUL_SHOTS) {
      const name = path.replace(/[^a-z0-9=]+/gi, "_").slice(0, 60);
      await page.screenshot({ path: `${process.env.WAKEFUL_SHOTS}/${name}-${colorScheme}-${width}.png`, fullPage: true });
    }
    // The pages' own policy forbids scripts from elsewhere; this one comes from the driver.
    const source = (await import("node:fs")).readFileSync(axe, "utf8");
    await page.evaluate(source);
    const { violations } = await page.evaluate(() => axe.run(document, { resultTypes: ["violations"] }));
    for (const { id, impact, nodes } of violations.filter(({ impact }) => impact === "serious" || impact === "critical")) {
      told.serious.push(`${path} ${colorScheme} ${width}: ${impact} ${id}: ${nodes[0].html.slice(0, 200)}`);
    }
  }
  await page.context().close();
}
await browser.close();
console.log(JSON.stringify(told));
