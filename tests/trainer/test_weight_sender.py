"""Versions that real ranks hold and send: to members of a group in this process, and to vLLM."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.explorer.test_vllm_experts import write_experts
from tests.trainer.bench import Bench, put_rows
from tests.trainer.conftest import Ranks
from tests.trainer.test_worker import batch
from tests.trainer.test_worker_restarts import pid_of
from trinity_data.config import RolloutModelConfig
from trinity_data.errors import EngineError, WeightsGoneError
from trinity_data.gloo_group import GlooGroup
from trinity_data.restarts import RestartLimit
from trinity_data.shared_buffer import open_buffer
from trinity_data.store.store import Store
from trinity_data.tokenizer import load_tokenizer
from trinity_data.weight_links import BroadcastReader, BufferReader, WeightReader
from trinity_data.weight_sending import SendingGroup
from trinity_data.weights import Weights
from trinity_explorer.engines.actor import RemoteEngine
from trinity_explorer.engines.engine import Request, Sampling
from trinity_explorer.engines.pool import build_engines
from trinity_trainer.weight_sender import WeightSender
from trinity_trainer.worker_group import WorkerGroup

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=-1, min_tokens=0, max_tokens=4, seed=0)
# None: rank 0 broadcasts. Most tensors are smaller than a buffer of so many bytes, some are larger
WAYS = pytest.mark.parametrize("max_buffer", [None, 50_000], ids=["broadcast", "buffers"])
SEQUENCES = [[5, 9, 40, 3, 77, 12, 200, 31], [250, 1, 2, 3, 4, 5, 6, 7]]


def leave() -> None:
    raise EngineError("a member left")


class Member:
    """A receiver in this process, with two workers in threads, of which the first keeps what comes."""

    num_workers = 2

    def __init__(self) -> None:
        self.process: object = object()
        self.interrupt_after, self.interrupt = -1, leave
        """What happens in the first worker when it has so many tensors, and the second has left or waits."""
        self.version, self.tensors = -1, dict[str, torch.Tensor]()
        self.groups: list[SendingGroup] = []
        self.calls: list[str] = []
        self._readers: list[WeightReader] = []

    async def become_idle(self) -> None:
        self.tensors = {}

    async def receive_weights(
        self, version: int, group: SendingGroup, first_member: int, *, during: bool
    ) -> None:
        if group not in self.groups:
            self.groups.append(group)
            joins = (
                asyncio.to_thread(self._join, group, first_member + worker)
                for worker in range(self.num_workers)
            )
            self._readers = list(await asyncio.gather(*joins))
        self.calls.append("receive")
        try:
            taken, *_ = await asyncio.gather(
                *(asyncio.to_thread(self._take, reader, group) for reader in self._readers)
            )
        except RuntimeError as error:
            raise EngineError(f"{error}") from error
        self.version, self.tensors = version, taken

    @staticmethod
    def _join(group: SendingGroup, member: int) -> WeightReader:
        buffer = open_buffer(group.buffers, torch.device("cpu"), member) if group.buffers else None
        joined = GlooGroup.join(group.address, group.port, member, group.size)
        return BroadcastReader(joined) if buffer is None else BufferReader(buffer, joined)

    def _take(self, reader: WeightReader, group: SendingGroup) -> dict[str, torch.Tensor]:
        taken: dict[str, torch.Tensor] = {}
        try:
            for name, tensor in reader.read(group.tensors):
                taken[name] = tensor
                if len(taken) == self.interrupt_after:
                    self.interrupt()
        except RuntimeError:
            reader.close()  # as an engine does
            raise
        return taken

    async def sleep(self) -> None:
        self.calls.append("sleep")

    async def wake(self) -> None:
        self.calls.append("wake")


@pytest.fixture
def bench(ranks: Ranks, tmp_path: Path) -> Iterator[Bench]:
    """Of two ranks, which may be started again."""
    group, before = ranks.groups[2], ranks.groups[2].restarts
    group.restarts = RestartLimit(5)
    bench = Bench(ranks, tmp_path, Store.create_or_open(tmp_path / "store"), world_size=2)
    yield bench
    bench.store.close()
    group.restarts = before


def train_and_keep(group: WorkerGroup, ranks: Ranks, folder: Path, versions: range) -> dict[int, Weights]:
    """Each is trained one step further; its files, to compare with, are in the folder."""
    kept = {}
    for version in versions:
        ranks.run(group.train_step(batch(seed=version)))
        ranks.run(group.write_weights(folder / f"{version}"))
        ranks.run(group.keep_weights(version, dtype="float32"))
        kept[version] = Weights(version, "")
    return kept


def assert_as_in_the_file(member: Member, folder: Path, version: int) -> None:
    expected = load_file(folder / f"{version}" / "model.safetensors")
    assert member.version == version and member.tensors.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in member.tensors.items())


@WAYS
def test_each_member_gets_the_version_that_was_kept_and_a_group_stays(
    bench: Bench, tmp_path: Path, max_buffer: int | None
) -> None:
    group, ranks, members = bench.group, bench.ranks, [Member(), Member()]
    ranks.begin(2)
    sender = WeightSender(group, bench.trainer().workers, max_buffer=max_buffer)
    weights = train_and_keep(group, ranks, tmp_path, range(1, 3))
    for version in (1, 2):
        ranks.run(sender.send(weights[version], members, during=False))
        for member in members:
            assert_as_in_the_file(member, tmp_path, version)
    assert members[0].groups == members[1].groups and len(members[0].groups) == 1
    assert members[0].groups[0].size == (5 if max_buffer is None else 6)
    # another process in the place of one
    members[1].process = object()
    ranks.run(sender.send(weights[1], members, during=False))
    assert len(members[0].groups) == 2
    # of the versions before one nothing is left
    ranks.run(group.keep_weights(3, dtype="float32", forget_before=2))
    with pytest.raises(WeightsGoneError, match="version 1"):
        ranks.run(sender.send(weights[1], members, during=False))


@WAYS
def test_matrices_are_sent_in_the_format_of_the_engines(bench: Bench, max_buffer: int | None) -> None:
    ranks, member = bench.ranks, Member()
    group = ranks.begin(2)
    num_bytes, probe = ranks.run(group.keep_weights(1, dtype="bfloat16", sequences=((5, 6, 7),)))
    sender = WeightSender(group, bench.trainer().workers, max_buffer=max_buffer)
    ranks.run(sender.send(Weights(1, ""), [member], during=False))
    assert {t.dtype for t in member.tensors.values() if t.ndim > 1} == {torch.bfloat16}
    assert {t.dtype for t in member.tensors.values() if t.ndim == 1} == {torch.float32}
    assert num_bytes == sum(tensor.nbytes for tensor in member.tensors.values())
    assert probe is not None and len(probe.logprobs[0]) == 2


@WAYS
def test_a_member_that_leaves_fails_the_send_and_the_ranks_go_on(
    bench: Bench, tmp_path: Path, max_buffer: int | None
) -> None:
    group, ranks, member = bench.group, bench.ranks, Member()
    ranks.begin(2)
    sender = WeightSender(group, bench.trainer().workers, max_buffer=max_buffer)
    weights = train_and_keep(group, ranks, tmp_path, range(1, 2))
    member.interrupt_after = 5
    with pytest.raises(EngineError):
        ranks.run(sender.send(weights[1], [member], during=False))
    member.interrupt_after = -1
    ranks.run(sender.send(weights[1], [member], during=False))
    assert_as_in_the_file(member, tmp_path, 1)
    assert len(member.groups) == 2


@pytest.mark.parametrize(
    "max_buffer", [pytest.param(None, marks=pytest.mark.slow), 50_000], ids=["broadcast", "buffers"]
)
def test_ranks_that_die_in_a_send_are_started_again_and_send_the_version_again(
    bench: Bench, tmp_path: Path, max_buffer: int | None
) -> None:
    ranks, member = bench.ranks, Member()
    ranks.begin(2, "sft")
    put_rows(bench.store, 4)
    trainer = bench.trainer(last=4, publish_interval=1, save_interval=2, holds_versions=True)

    async def run() -> None:
        await trainer.replay(await trainer.restore())
        await trainer.train(2)  # with a checkpoint of its last step
        ids = await trainer.batches.next(3)
        assert ids is not None
        await trainer.train_step(3, ids)

    ranks.run(run())
    ranks.run(bench.group.write_weights(tmp_path / "3"))
    published = bench.synchronizer.published
    assert {each.folder for each in published.values()} == {""}
    assert bench.synchronizer.folders is not None
    bench.synchronizer.folders.remove(before=1)  # the engines have it
    pid = pid_of(bench.group, 1)

    def kill() -> None:
        member.interrupt_after = -1
        os.kill(pid, signal.SIGKILL)

    member.interrupt_after, member.interrupt = 3, kill
    trainer.sender.max_buffer = max_buffer
    if max_buffer is not None:
        ranks.run(trainer.sleep())
    ranks.run(trainer.sender.send(published[3], [member], during=False))
    assert_as_in_the_file(member, tmp_path, 3)
    if max_buffer is not None:  # the engine leaves the GPU to the new ranks until they sleep too
        assert member.calls == ["wake", "receive", "sleep", "wake", "receive"]
    # of those before the checkpoint of step 2, which cannot be made again, the one that the engines have
    assert sorted(bench.synchronizer.published) == [1, 2, 3]
    kinds = [event["kind"] for event in bench.store.table("events").to_pylist()]
    assert kinds.count("trainer_died") == kinds.count("trainer_restarted") == 1


def assert_logprobs_are_of(folder: Path, logprobs: list[list[float]]) -> None:
    model, ids = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), torch.tensor(SEQUENCES)
    with torch.no_grad():
        all_logprobs = torch.log_softmax(model(ids).logits[:, :-1], -1)
    expected = all_logprobs.gather(-1, ids[:, 1:, None])[..., 0].tolist()
    for found, wanted in zip(logprobs, expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.slow
@WAYS
def test_vllm_computes_with_what_two_ranks_sent(bench: Bench, tmp_path: Path, max_buffer: int | None) -> None:
    """Two engines: a version, the next in its place, that again in another process, and one in the middle of
    which an engine is killed.
    """
    group, ranks = bench.group, bench.ranks
    ranks.begin(2)
    weights = train_and_keep(group, ranks, tmp_path, range(1, 4))

    async def scores() -> list[list[list[float]]]:
        engines = await build_engines(
            RolloutModelConfig(engine_type="vllm", engine_num=2, seed=1),
            max_model_len=64,
            model_path=str(ranks.model),
            tokenizer=load_tokenizer(str(ranks.model)),
            num_gpus=0,
            shares_gpus=max_buffer is not None,
            receives_weights=True,
            env={},
            max_restarts=3,
        )
        sender = WeightSender(group, bench.trainer().workers, max_buffer=max_buffer)
        engines.sender = sender
        both, found = [each.engine for each in engines.engines], []
        assert isinstance(both[0], RemoteEngine)

        async def score_all() -> None:
            found.extend([await engine.score(SEQUENCES) or [] for engine in both])

        for version in (1, 2):
            await engines.load_weights(weights[version], during=version == 2)
            assert engines.model_version == version
            await score_all()
        ray.kill(both[0].process)
        (answer,) = await engines.generate([Request(SEQUENCES[0], SAMPLING)], preferred=0)
        assert answer.model_version == 2
        if (restart := engines.engines[0].restart) is not None:
            await asyncio.wait([restart])
        await score_all()
        loading = asyncio.create_task(engines.load_weights(weights[3]))
        while not group.turn.locked():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        ray.kill(both[0].process)
        await loading
        await score_all()
        await engines.close()
        return found

    for version, logprobs in zip((1, 1, 2, 2, 2, 2, 3, 3), ranks.run(scores()), strict=True):
        assert_logprobs_are_of(tmp_path / f"{version}", logprobs)


@pytest.mark.slow
@WAYS
def test_experts_are_sent_as_files_name_them(
    bench: Bench, tmp_path: Path, tiny_model: Path, max_buffer: int | None
) -> None:
    group, ranks, members = bench.group, bench.ranks, [Member(), Member()]
    write_experts(tmp_path / "model", tiny_model, 0)
    try:
        ranks.run(group.load_model(str(tmp_path / "model")))
        ranks.run(group.start_stage(ranks.spec("grpo"), reference_path=str(tmp_path / "model")))
        weights = train_and_keep(group, ranks, tmp_path, range(1, 2))
        sender = WeightSender(group, bench.trainer().workers, max_buffer=max_buffer)
        ranks.run(sender.send(weights[1], members, during=False))
    finally:
        ranks.run(group.load_model(str(ranks.model)))
    for member in members:
        assert_as_in_the_file(member, tmp_path, 1)
        assert any("experts.0." in name for name in member.tensors)
