"""LangGraph: each thread takes five steps of a graph, each adds two messages of 2 KB. Its Postgres checkpointer stores each
step. 16 threads run at a time."""

import asyncio
import operator
import os
import sys
import time
from typing import Annotated, TypedDict

from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import END, START, StateGraph
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool

STEPS = int(os.environ["BENCH_STEPS"])
TASKS = int(os.environ["BENCH_TASKS"])
TEXT = os.environ["BENCH_TEXT"]


class State(TypedDict):
    messages: Annotated[list[dict[str, str]], operator.add]
    step: int


async def step(state: State) -> dict:
    messages = [{"role": "assistant", "content": TEXT}, {"role": "tool", "content": TEXT}]
    return {"messages": messages, "step": state["step"] + 1}


async def main() -> None:
    options = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    url = os.environ["BENCH_DATABASE_URL"]
    async with AsyncConnectionPool(url, min_size=16, max_size=16, kwargs=options) as pool:
        saver = AsyncPostgresSaver(pool)
        await saver.setup()
        graph = StateGraph(State)
        graph.add_node("step", step)
        graph.add_edge(START, "step")
        graph.add_conditional_edges("step", lambda state: "step" if state["step"] < STEPS else END)
        app = graph.compile(checkpointer=saver)
        places = asyncio.Semaphore(16)

        async def thread(name: str) -> None:
            async with places:
                config = {"configurable": {"thread_id": name}, "recursion_limit": 100}
                # "sync": a step's checkpoint is stored before the next step begins.
                await app.ainvoke({"messages": [], "step": 0}, config, durability="sync")

        await asyncio.gather(*(thread(f"warm-{number}") for number in range(16)))
        print("ready", flush=True)
        sys.stdin.readline()
        began = time.monotonic()
        await asyncio.gather(*(thread(str(number)) for number in range(TASKS)))
        print(f"seconds {time.monotonic() - began}", flush=True)
        sys.stdin.readline()


asyncio.run(main())
