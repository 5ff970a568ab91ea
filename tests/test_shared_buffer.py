"""Memory that one process fills and others read, and what goes through it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from threading import Thread

import pytest
import torch

from trinity_data.gloo_group import GlooGroup, Rendezvous
from trinity_data.shared_buffer import SharedBuffer, open_buffer
from trinity_data.weight_links import BufferReader, BufferWriter
from trinity_data.weight_sending import BufferOffer, TensorFormat

CPU = torch.device("cpu")
READ = """
import json, sys, torch
from trinity_data.shared_buffer import open_buffer
from trinity_data.weight_sending import BufferOffer
offer, device = BufferOffer(**json.loads(sys.argv[1])), torch.device(sys.argv[2])
data = open_buffer([offer], device, 0)
print(data.device.type, data.sum().item(), flush=True)
sys.stdin.readline()
print(data.sum().item(), flush=True)
data[:2] = 9
if device.type == "cuda":
    torch.cuda.synchronize()
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_another_process_reads_what_is_written_after_it_has_opened_the_buffer(device: str) -> None:
    buffer = SharedBuffer(1000, torch.device(device))
    offer = json.dumps(asdict(buffer.offer()))  # plain values
    buffer.data.fill_(1)
    wait_for(device)
    command = [sys.executable, "-c", READ, offer, device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        assert reader.stdout.readline() == f"{device} 1000\n"
        buffer.withdraw()
        buffer.data[:500] = 3
        wait_for(device)
        print(file=reader.stdin, flush=True)
        assert reader.stdout.readline() == "2000\n"
        assert reader.wait() == 0
    assert buffer.data[:3].tolist() == [9, 9, 3]


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def test_a_file_is_of_this_user_alone_and_has_no_name_once_it_is_withdrawn() -> None:
    buffer = SharedBuffer(100, CPU)
    path = Path(str(buffer.offer().opening["path"]))
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    again = Path(str(buffer.offer().opening["path"]))
    assert again != path and not path.parent.exists()
    buffer.withdraw()
    assert not again.parent.exists()
    buffer.data.fill_(1)
    buffer.close()


def test_a_buffer_that_memory_has_no_room_for_is_an_error_and_not_the_end_of_the_process() -> None:
    with pytest.raises(OSError, match="Errno"):
        SharedBuffer(1 << 60, CPU).offer()


def test_a_worker_opens_the_buffer_of_its_device_and_several_workers_share_several_out() -> None:
    first, second = SharedBuffer(10, CPU), SharedBuffer(10, CPU)
    offers = [BufferOffer("GPU-1", 10, {}), first.offer(), second.offer()]
    first.data.fill_(1)
    second.data.fill_(2)
    assert [int(open_buffer(offers, CPU, number)[0]) for number in (2, 3, 4)] == [1, 2, 1]
    with pytest.raises(RuntimeError, match=r"no rank of the trainer is on this engine's device, .* GPU-1"):
        open_buffer(offers[:1], CPU, 0)


@pytest.mark.parametrize("num_bytes", [7, 64, 104, 1000])
def test_tensors_arrive_whole_however_they_lie_in_the_buffer(num_bytes: int) -> None:
    """Of 104 bytes in all, which fill a buffer several times, once, or in part."""
    torch.manual_seed(0)
    sent = {
        "matrix": torch.randn(4, 5).t(),
        "half": torch.randn(11).bfloat16(),
        "none": torch.empty(0, 3),
        "flags": torch.tensor([True, False]),
    }
    formats = [
        TensorFormat(name, str(each.dtype).removeprefix("torch."), tuple(each.shape))
        for name, each in sent.items()
    ]
    assert sum(each.nbytes for each in sent.values()) == 104
    meeting, buffer = Rendezvous("127.0.0.1"), SharedBuffer(num_bytes, CPU)
    opened = open_buffer([buffer.offer()], CPU, 0)
    got: list[dict[str, torch.Tensor]] = []

    def read() -> None:
        reader = BufferReader(opened, GlooGroup.join("127.0.0.1", meeting.port, 1, 2))
        got.extend(dict(reader.read(formats)) for _ in range(2))
        reader.close()

    thread = Thread(target=read)
    thread.start()
    writer = BufferWriter(buffer.data, GlooGroup(meeting.store, 0, 2, address="127.0.0.1"))
    for sign in (1, -1):
        writer.write(iter({name: each if sign > 0 else each.flip(0) for name, each in sent.items()}.items()))
    thread.join()
    writer.close()
    for version, change in zip(got, (lambda each: each, lambda each: each.flip(0)), strict=True):
        assert version.keys() == sent.keys()
        assert all(torch.equal(version[name], change(each)) for name, each in sent.items())
