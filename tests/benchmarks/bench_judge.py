"""Questions a second of a judge, beside the limit of a server that answers each after 50 ms, 64 at a time.

The server is a process of its own. Its limit is 64 / 0.05 = 1,280 a second on a free machine; here, in turn
with the judge, it is what 64 connections get that send the same bytes again and again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pyarrow as pa

from trinity_operators.preparation import prepared
from trinity_operators.registry import build_operator
from trinity_operators.runner import run_operators

SCORE = json.dumps({"rationale": "so", "score": 7})
REPLY = json.dumps({"choices": [{"message": {"content": SCORE}}], "usage": {"total_tokens": 9}}).encode()


def serve(delay: float, told: Connection) -> None:
    """Answers on a free port, which it sends first."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(REPLY)
        while request := await reader.readuntil(b"\r\n\r\n"):
            (length,) = (
                int(line.split(b":")[1])
                for line in request.lower().split(b"\r\n")
                if line.startswith(b"content-length")
            )
            await reader.readexactly(length)
            await asyncio.sleep(delay)
            writer.write(head + REPLY)

    async def run() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=256)
        told.send(server.sockets[0].getsockname()[1])
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # clients that leave
        await server.serve_forever()

    asyncio.run(run())


def experiences(num_rows: int) -> pa.Table:
    messages: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": f"What is {number} + 1?"}] for number in range(num_rows)
    ]
    return pa.table(
        {
            "experience_id": [f"e{number}" for number in range(num_rows)],
            "messages": messages,
            "response_text": [f"{number + 1}" for number in range(num_rows)],
        }
    )


async def plain_rate(port: int, num_rows: int, in_flight: int) -> float:
    """Replies a second over plain sockets."""
    question = json.dumps({"messages": [{"role": "user", "content": "x" * 300}]}).encode()
    request = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(question) + question

    async def ask() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(num_rows // in_flight):
            writer.write(request)
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(REPLY))
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(ask() for _ in range(in_flight)))
    return num_rows / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    delay, in_flight = 0.05, 64
    near, far = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(delay, far), daemon=True)
    server.start()
    port = near.recv()
    url, limits = f"http://127.0.0.1:{port}/v1", list[float]()
    args = {"model": "tiny", "base_url": url, "max_in_flight": in_flight}
    judge, rows = build_operator("judge_score", args, base_dir=Path()), experiences(arguments.rows)
    rates, costs = list[float](), list[float]()
    with prepared([judge]):
        for _ in range(arguments.rounds):
            limits.append(asyncio.run(plain_rate(port, arguments.rows, in_flight)))
            started, before = time.perf_counter(), time.process_time()
            result = run_operators(
                [judge], rows, row_kind="experience", id_column="experience_id", stage="s", step=1
            )
            rates.append(arguments.rows / (time.perf_counter() - started))
            costs.append((time.process_time() - before) / arguments.rows)
            assert result.kept.all()
    server.kill()
    shares = [rate / limit for rate, limit in zip(rates, limits, strict=True)]
    load, cores = os.getloadavg()[0], os.cpu_count()
    print(f"load {load:.1f} on {cores} cores, {arguments.rows} rows, {in_flight} in flight")
    print(
        f"judge: median {statistics.median(rates):,.0f} questions/s, best {max(rates):,.0f}; "
        f"{statistics.median(costs) * 1e3:.2f} ms of a processor each"
    )
    print(f"server: median {statistics.median(limits):,.0f} replies/s, best {max(limits):,.0f}")
    print(f"share of the server's limit: median {statistics.median(shares):.2f}, best {max(shares):.2f}")


if __name__ == "__main__":
    main()
