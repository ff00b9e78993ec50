"""Agents on DBOS: each model call and each charge is a step of a workflow, as its documents write an agent."""

import os
import time
from urllib.parse import unquote, urlsplit

import agent
from dbos import DBOS, SetWorkflowID

# A socket's folder is no host name to SQLAlchemy, as it is to libpq.
given = urlsplit(agent.DATABASE_URL)
place, _, port = given.netloc.rpartition("@")[2].partition(":")
host = f"?host={unquote(place)}" + (f"&port={port}" if port else "")
url = f"postgresql+psycopg://{given.username}@{given.path}{host}"
DBOS(config={"name": "agents", "system_database_url": url, "log_level": "ERROR", "sys_db_pool_size": 20})


@DBOS.step()
def ask(messages: list[dict]) -> dict:
    return agent.ask(messages)


@DBOS.step()
def charge(session: str, call: str) -> str:
    return agent.charge(session, call)


@DBOS.workflow()
def run(session: str) -> int:
    messages = [{"role": "user", "content": session}]
    while True:
        reply = ask(messages)
        messages = [*messages, reply]
        if "tool_calls" not in reply:
            return len(messages)
        call = reply["tool_calls"][0]["id"]
        messages = [*messages, {"role": "tool", "tool_call_id": call, "content": charge(session, call)}]


# Goes on with the workflows that this executor has left.
DBOS.launch()
names = [f"agent {number}" for number in range(agent.SESSIONS)]
if agent.IS_FIRST:
    for name in names:
        with SetWorkflowID(name):
            DBOS.start_workflow(run, name)
        time.sleep(agent.BETWEEN_S)
for name in names:
    DBOS.retrieve_workflow(name).get_result()
print(f"completed {len(names)}", flush=True)
os._exit(0)
