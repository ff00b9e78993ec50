"""DBOS: each workflow has five steps, each step's output is two messages of 2 KB. 16 threads run one workflow each at a
time. There is no queue, so no dequeuing counts."""

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from dbos import DBOS

STEPS = int(os.environ["BENCH_STEPS"])
TASKS = int(os.environ["BENCH_TASKS"])
TEXT = os.environ["BENCH_TEXT"]

url = os.environ["BENCH_DATABASE_URL"].replace("postgres://", "postgresql+psycopg://", 1)
DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR", "sys_db_pool_size": 20})


@DBOS.step()
def step(number: int) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": TEXT}, {"role": "tool", "content": TEXT}]


@DBOS.workflow()
def session(number: int) -> int:
    for at in range(STEPS):
        step(at)
    return number


DBOS.launch()
with ThreadPoolExecutor(16) as pool:
    list(pool.map(session, range(16)))
    print("ready", flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    list(pool.map(session, range(TASKS)))
    print(f"seconds {time.monotonic() - began}", flush=True)
    sys.stdin.readline()
os._exit(0)
