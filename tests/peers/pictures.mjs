// Draws the console for its documentation: Debian's Chromium through npm's playwright-core. Prints one JSON object.
// Arguments: the server's address, and as JSON which pages, which single pictures, and the folders that they go to.
//
// A sheet shows one page three times: light, dark, and 390 px wide. With pngquant on the path the files are a third as large.
import { execFileSync } from "node:child_process";
import { createRequire } from "node:module";

const peers = createRequire(process.env.WAKEFUL_PEERS + "/browser/package.json");
const { chromium } = peers("playwright-core");
const [base, given] = process.argv.slice(2);
const { sheets, singles, sheetsTo, singlesTo } = JSON.parse(given);
const [wide, narrow, height, scale] = [1120, 390, 900, 0.625];
const told = { drawn: [], wide: [], broken: [] };

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM || "/usr/bin/chromium", args: ["--no-sandbox"] });

async function shown(path, colorScheme, size) {
  const context = await browser.newContext({ viewport: size, colorScheme });
  const page = await context.newPage();
  page.on("pageerror", (error) => told.broken.push(`${path}: ${error.message}`));
  const answer = await page.goto(`${base}/console${path}`);
  if (!answer.ok()) told.broken.push(`${path}: ${answer.status()}`);
  const isWide = await page.evaluate(() => document.documentElement.scrollWidth > window.innerWidth);
  if (isWide) told.wide.push(`${path} at ${size.width}`);
  const picture = await page.screenshot();
  await context.close();
  return `data:image/png;base64,${picture.toString("base64")}`;
}

function shrink(file) {
  try {
    execFileSync("pngquant", ["--force", "--strip", "--speed", "1", "--quality", "40-80", "--output", file, "64", file], { stdio: "ignore" });
  } catch {
    // Without pngquant the file is larger.
  }
  told.drawn.push(file);
}

for (const { name, path } of sheets) {
  const three = [
    await shown(path, "light", { width: wide, height }),
    await shown(path, "dark", { width: wide, height }),
    await shown(path, "light", { width: narrow, height }),
  ];
  const page = await browser.newPage({ viewport: { width: Math.ceil((2 * wide + narrow) * scale) + 64, height: Math.ceil(height * scale) + 32 } });
  const images = three.map((from, at) => `<img src="${from}" width="${(at < 2 ? wide : narrow) * scale}">`).join("");
  await page.setContent(`<body style="margin:16px;display:flex;gap:16px;background:#c9ced6">${images}</body>`);
  const file = `${sheetsTo}/${name}.png`;
  await page.screenshot({ path: file });
  await page.close();
  shrink(file);
}
for (const { name, path, theme, size } of singles) {
  const file = `${singlesTo}/${name}.png`;
  const from = await shown(path, theme, size);
  (await import("node:fs")).writeFileSync(file, Buffer.from(from.split(",")[1], "base64"));
  shrink(file);
}
await browser.close();
console.log(JSON.stringify(told));
