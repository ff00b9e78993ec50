// A receiver of webhooks that somebody else's library verifies: npm's standardwebhooks. Prints its address, then one JSON line a
// request: the verified event, or why it was refused. Argument: the secret.
import { createRequire } from "node:module";
import { createServer } from "node:http";

const peers = createRequire(process.env.WAKEFUL_PEERS + "/webhooks/package.json");
const { Webhook } = peers("standardwebhooks");
const receiver = new Webhook(process.argv[2]);
const other = new Webhook("whsec_" + Buffer.from("another secret of the test").toString("base64"));

const server = createServer((request, response) => {
  const parts = [];
  request.on("data", (part) => parts.push(part));
  request.on("end", () => {
    const body = Buffer.concat(parts).toString("utf8");
    const told = { id: request.headers["webhook-id"] };
    try {
      told.event = receiver.verify(body, request.headers);
      try { other.verify(body, request.headers); told.anybody = true; } catch { told.anybody = false; }
      try { receiver.verify(body + " ", request.headers); told.altered = true; } catch { told.altered = false; }
    } catch (error) {
      told.refused = String(error);
    }
    console.log(JSON.stringify(told));
    response.writeHead(told.refused ? 401 : 204).end();
  });
});
server.listen(0, "127.0.0.1", () => console.log(JSON.stringify({ url: `http://127.0.0.1:${server.address().port}/hook` })));
