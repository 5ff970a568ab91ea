"""A small agent: asks the endpoint for sums in sessions of two turns, and posts a reward for each.

python pipelines/serve/agent.py JOB_FOLDER [NUMBER_OF_TASKS]
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from pathlib import Path

from openai import AsyncOpenAI

SESSIONS_OF_A_TASK = 4


async def try_task(task: int, url: str, token: str) -> float:
    """One session; its reward."""
    session = uuid.uuid4().hex
    async with AsyncOpenAI(
        base_url=f"{url}/tasks/sum-{task}/sessions/{session}/v1", api_key=token, max_retries=5
    ) as client:
        (model,) = (await client.models.list()).data
        messages = [{"role": "user", "content": f"What is {task} + {task % 7}?"}]
        for following in ("Are you sure?", ""):
            answer = await client.chat.completions.create(model=model.id, messages=messages)
            text = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            if following:
                messages.append({"role": "user", "content": following})
        # what an agent is rewarded for is its own affair: here the right number, and otherwise digits
        reward = 1.0 if str(task + task % 7) in text else sum(map(str.isdigit, text)) / (1 + len(text))
        await client.post("/feedback", cast_to=object, body={"reward": reward})
    return reward


async def main(job: Path, num_tasks: int) -> None:
    serve = json.loads((job / "serve.json").read_text())
    rewards = await asyncio.gather(
        *(
            try_task(task, serve["url"], serve["token"])
            for task in range(num_tasks)
            for _ in range(SESSIONS_OF_A_TASK)
        )
    )
    print(f"{len(rewards)} sessions, mean reward {sum(rewards) / len(rewards):.3f}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8))
