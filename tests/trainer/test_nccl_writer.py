"""Where the workers of vLLM meet the rank that sends over NCCL."""

from __future__ import annotations

import importlib.util
import socket
from threading import Thread

import pytest

from trinity_data.weight_sending import SendingGroup
from trinity_trainer.nccl_writer import meet_workers

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


def test_workers_meet_the_rank_at_a_port_that_was_never_free_in_between() -> None:
    from vllm.distributed.utils import StatelessProcessGroup

    meeting = socket.create_server(("127.0.0.1", 0))
    port = meeting.getsockname()[1]
    group = SendingGroup("127.0.0.1", port, 2, ())
    heard: list[object] = []

    def join() -> None:
        """As vLLM's worker does."""
        joined = StatelessProcessGroup.create("127.0.0.1", port, 1, 2)
        heard.append(joined.broadcast_obj(None, src=0))

    worker = Thread(target=join)
    worker.start()
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    members = meet_workers(meeting, group)
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    members.broadcast_obj("id", src=0)
    worker.join()
    assert heard == ["id"]
