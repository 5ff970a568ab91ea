"""Workflows and rewards that hurt whoever runs them.

Loaded by the processes of workflows, never by the tests.
"""

import asyncio
import ctypes
import json
import os
import re
import sys
import time

import sibling

from trinity_explorer.rewards.reward import Reward


class Works:
    """Right for even seeds, and the rewards say which process it was."""

    async def run(self, task, model):
        reply = await model.chat(task.messages)
        return Reward(1.0, {"one": 1.0}, {"pid": os.getpid(), "text": float(reply.text)})


class Does:
    """What the task is called, once the model has answered; all others take a while and earn 1."""

    def __init__(self, factor: float = 1.0):
        self.factor = factor

    async def run(self, task, model):
        await model.chat(task.messages)
        if task.task_id not in DEEDS:
            await asyncio.sleep(0.3)
            return 1.0
        result = DEEDS[task.task_id](task)
        return await result if asyncio.iscoroutine(result) else result


def segfault(task):
    ctypes.string_at(0)


def eat_memory(task):
    held = []
    while True:
        held.append(bytearray(64 << 20))


def recurse(task):
    return recurse(task)


def fork(task):
    os.fork()
    return 1.0


def flood(task):
    for _ in range(10_000):
        print("x" * 1000)
    return 1.0


def mutate(task):
    task.messages[0]["content"] = "THINK " + task.messages[0]["content"]
    task.columns["more"] = 1
    return float(task.messages[0]["content"].count("THINK"))


def change_json(task):
    json.dumps = None
    return 1.0


def hold_interpreter(task):
    return float(bool(re.match(r"(a+)+$", "a" * 40 + "b")))


def interrupt(task):
    raise KeyboardInterrupt


async def sleep(task):
    await asyncio.sleep(100)


DEEDS = {
    "raise": lambda task: [][1],
    "exit": lambda task: sys.exit(3),
    "os_exit": lambda task: os._exit(7),
    "interrupt": interrupt,
    "segfault": segfault,
    "memory": eat_memory,
    "recurse": recurse,
    "fork": fork,
    "flood": flood,
    "mutate": mutate,
    "chdir": lambda task: os.chdir("/") or 1.0,
    "json": change_json,
    "block": lambda task: time.sleep(100),
    "hold": hold_interpreter,
    "sleep": sleep,
    "none": lambda task: None,
    "list": lambda task: [1.0],
    "text": lambda task: "good",
    "nan": lambda task: float("nan"),
    "env": lambda task: float(os.environ["OF_WORKFLOWS"]),
    "sibling": lambda task: sibling.SEVEN,
}
