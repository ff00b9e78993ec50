"""What the agents in Python share: a model call, and a charge without an idempotency key. compare.rs says what they do."""

import json
import os
import time
import urllib.request

SESSIONS = int(os.environ["AGENT_SESSIONS"])
BETWEEN_S = int(os.environ["AGENT_BETWEEN_MS"]) / 1000
IS_FIRST = os.environ["AGENT_FIRST"] == "1"
# Without the parameters of our own driver, which others refuse.
DATABASE_URL = os.environ["AGENT_DATABASE_URL"].partition("?")[0]


def ask(messages: list[dict]) -> dict:
    """Asks the model, and returns its reply as a message."""
    body = json.dumps({"model": "test", "stream": True, "messages": messages}).encode()
    with urllib.request.urlopen(f"{os.environ['AGENT_MODEL_URL']}/chat/completions", body) as answer:
        lines = answer.read().decode().splitlines()
    reply = {"role": "assistant", "content": ""}
    for line in lines:
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            reply["content"] += delta.get("content") or ""
            if "tool_calls" in delta:
                reply["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in delta["tool_calls"]]
    return reply


def charge(session: str, call: str) -> str:
    """Charges a card: a line in a file, and then the time until the service answers."""
    with open(os.environ["FIXTURE_EFFECTS"], "a") as effects:
        effects.write(f"charge {session} {call}\n")
        effects.flush()
        os.fsync(effects.fileno())
    time.sleep(int(os.environ["FIXTURE_TAKE_MS"]) / 1000)
    return "Charged."
