"""Agents on LangGraph: a node for the model and a node for its tool, and a checkpoint in Postgres after each."""

import asyncio
import operator
from typing import Annotated, TypedDict

import agent
from langgraph.checkpoint.postgres.aio import AsyncPostgresSaver
from langgraph.graph import END, START, StateGraph
from psycopg.rows import dict_row
from psycopg_pool import AsyncConnectionPool


class State(TypedDict):
    session: str
    messages: Annotated[list[dict], operator.add]


async def model(state: State) -> dict:
    return {"messages": [await asyncio.to_thread(agent.ask, state["messages"])]}


async def tools(state: State) -> dict:
    call = state["messages"][-1]["tool_calls"][0]["id"]
    content = await asyncio.to_thread(agent.charge, state["session"], call)
    return {"messages": [{"role": "tool", "tool_call_id": call, "content": content}]}


async def main() -> None:
    options = {"autocommit": True, "prepare_threshold": 0, "row_factory": dict_row}
    async with AsyncConnectionPool(agent.DATABASE_URL, min_size=agent.SESSIONS, kwargs=options) as pool:
        saver = AsyncPostgresSaver(pool)
        if agent.IS_FIRST:
            await saver.setup()
        graph = StateGraph(State)
        graph.add_node("model", model)
        graph.add_node("tools", tools)
        graph.add_edge(START, "model")
        graph.add_conditional_edges("model", lambda state: "tools" if "tool_calls" in state["messages"][-1] else END)
        graph.add_edge("tools", "model")
        app = graph.compile(checkpointer=saver)

        async def thread(number: int) -> None:
            name = f"agent {number}"
            config = {"configurable": {"thread_id": name}, "recursion_limit": 100}
            if agent.IS_FIRST:
                await asyncio.sleep(number * agent.BETWEEN_S)
                given = {"session": name, "messages": [{"role": "user", "content": name}]}
            else:
                # Nothing goes on by itself: a program must know which threads were cut off, and call each again.
                if not (await app.aget_state(config)).next:
                    return
                given = None
            # "sync": a node's checkpoint is stored before the next node begins.
            await app.ainvoke(given, config, durability="sync")

        await asyncio.gather(*(thread(number) for number in range(agent.SESSIONS)))
    print(f"completed {agent.SESSIONS}", flush=True)


asyncio.run(main())
