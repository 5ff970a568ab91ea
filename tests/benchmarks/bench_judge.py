"""Questions a second of a judge, beside the limit of a server that answers each after 50 ms, 64 at a time.

The server is a process of its own; its limit is 64 / 0.05 = 1,280 a second.
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

from trinity_operators.registry import build_operator
from trinity_operators.runner import prepared, run_operators

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    delay, in_flight = 0.05, 64
    near, far = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(delay, far), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{near.recv()}/v1"
    args = {"model": "tiny", "base_url": url, "max_in_flight": in_flight}
    judge, rows, rates = build_operator("judge_score", args, base_dir=Path()), experiences(arguments.rows), []
    with prepared([judge]):
        for _ in range(arguments.rounds):
            started = time.perf_counter()
            result = run_operators(
                [judge], rows, row_kind="experience", id_column="experience_id", stage="s", step=1
            )
            rates.append(arguments.rows / (time.perf_counter() - started))
            assert result.kept.all()
    server.kill()
    limit, median = in_flight / delay, statistics.median(rates)
    print(
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {arguments.rows} rows, {in_flight} in flight"
    )
    print(f"questions/s: median {median:,.0f}, best {max(rates):,.0f}; the server's limit is {limit:,.0f}")
    print(f"share of the limit: median {median / limit:.2f}, best {max(rates) / limit:.2f}")


if __name__ == "__main__":
    main()
