"""The vLLM engine against plain `transformers`, started as a run on this machine would start it."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.explorer.conftest import SAMPLING, SUMS, Bench, Conditions, put_tasks
from trinity_data.config import RolloutModelConfig
from trinity_data.dataset.task import Task, build_task_rows
from trinity_data.errors import EngineError
from trinity_data.nodes import ray_folder
from trinity_data.processes import descendants
from trinity_data.synthetic.model import write_weights
from trinity_data.tokenizer import load_tokenizer
from trinity_data.weights import Weights
from trinity_explorer.chat import ChatModel
from trinity_explorer.engines.actor import RemoteEngine
from trinity_explorer.engines.engine import Completion, Request, Sampling, Tokens
from trinity_explorer.engines.pool import EnginePool, build_engines
from trinity_explorer.rollout import RolloutRunner
from trinity_explorer.task_prober import TaskProber
from trinity_operators.base import FilterResult
from trinity_operators.pass_rate_probe import PassRateProbe
from trinity_operators.task_engines import connect_engines

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

LENGTHS = (3, 40, 1, 17)


@pytest.fixture(scope="module")
def engines(tiny_model: Path, ray_session: None) -> Iterator[EnginePool]:
    """One engine for the whole module; tests that load other weights put these back."""
    config = RolloutModelConfig(engine_type="vllm", seed=1)
    pool = asyncio.run(
        build_engines(
            config,
            max_model_len=256,
            model_path=str(tiny_model),
            tokenizer=load_tokenizer(str(tiny_model)),
            num_gpus=int(torch.cuda.is_available()),
            env={},
            max_restarts=1,
        )
    )
    yield pool
    asyncio.run(pool.close())


@pytest.fixture(scope="module")
def other_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other") / "version_1"
    write_weights(folder, vocab_size=len(load_tokenizer(str(tiny_model))), seed=1)
    return folder


def requests_of(sampling: Sampling, *, seed: int = 0, **changes: Any) -> list[Request]:
    draw = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, 250, (length,), generator=draw).tolist() for length in LENGTHS]
    return [Request(prompt, replace(sampling, seed=i, **changes)) for i, prompt in enumerate(prompts)]


def assert_logprobs_are_of(
    folder: Path, requests: Sequence[Request], completions: Sequence[Completion], temperature: float = 1.0
) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for request, completion in zip(requests, completions, strict=True):
        tokens = torch.tensor([request.prompt_token_ids + completion.token_ids])
        with torch.no_grad():
            logits = model(tokens).logits[0, len(request.prompt_token_ids) - 1 : -1] / temperature
        chosen = torch.tensor(completion.token_ids)[:, None]
        expected = torch.log_softmax(logits, -1).gather(-1, chosen)[:, 0].tolist()
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_the_sockets_of_an_engine_go_with_the_run(engines: EnginePool) -> None:
    # vLLM's own leave them behind when they are killed
    assert any(each.is_socket() for each in ray_folder().iterdir())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_the_models_own_forward_pass(
    engines: EnginePool, tiny_model: Path, sampling: Sampling, temperature: float
) -> None:
    requests = requests_of(sampling, temperature=temperature)
    completions = asyncio.run(engines.generate(requests))
    assert_logprobs_are_of(tiny_model, requests, completions, temperature)
    assert {completion.model_version for completion in completions} == {0}


def test_seeded_requests_of_different_lengths_answer_alike_together_and_alone(
    engines: EnginePool, sampling: Sampling
) -> None:
    requests = requests_of(sampling, seed=2)

    async def go() -> tuple[list[Completion], list[Completion]]:
        together = await engines.generate(requests)
        return together, [(await engines.generate([request]))[0] for request in requests]

    together, alone = asyncio.run(go())
    assert [completion.token_ids for completion in together] == [completion.token_ids for completion in alone]
    assert len({tuple(completion.token_ids) for completion in together}) == len(LENGTHS)


def test_an_answer_is_heard_token_by_token_and_is_the_same_as_unheard(
    engines: EnginePool, sampling: Sampling
) -> None:
    heard = list[Tokens]()

    async def run() -> tuple[Completion, Completion]:
        (request,) = requests_of(sampling, seed=5, min_tokens=24)[1:2]
        (whole,) = await engines.generate([request])
        return whole, await engines.stream(request, heard.append)

    whole, streamed = asyncio.run(run())
    assert streamed == whole and len(heard) > 3
    assert [token for part in heard for token in part.token_ids] == whole.token_ids
    assert [logprob for part in heard for logprob in part.logprobs] == whole.logprobs


def test_lengths_and_ends_are_kept(engines: EnginePool, sampling: Sampling) -> None:
    requests = requests_of(sampling, seed=3, min_tokens=5, max_tokens=9)
    for completion in asyncio.run(engines.generate(requests)):
        assert 5 <= len(completion.token_ids) <= 9
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 9


def test_after_a_reload_every_number_is_of_the_new_weights(
    engines: EnginePool, tiny_model: Path, other_model: Path, sampling: Sampling
) -> None:
    requests = requests_of(sampling, seed=4)

    async def go() -> list[list[Completion]]:
        answers = [await engines.generate(requests)]
        for version, folder in ((1, other_model), (2, tiny_model)):
            await engines.load_weights(Weights(version, str(folder)))
            answers.append(await engines.generate(requests))
        return answers

    before, after, back = asyncio.run(go())
    assert_logprobs_are_of(other_model, requests, after)
    assert {completion.model_version for completion in after} == {1}
    assert [c.token_ids for c in after] != [c.token_ids for c in before]
    assert [c.token_ids for c in back] == [c.token_ids for c in before]
    assert_logprobs_are_of(tiny_model, requests, back)


def test_requests_that_come_while_weights_are_loaded_name_those_that_answered(
    engines: EnginePool, tiny_model: Path, other_model: Path, sampling: Sampling
) -> None:
    requests, folders = requests_of(sampling, seed=4), {3: tiny_model, 4: other_model}

    async def go() -> list[list[Completion]]:
        await engines.load_weights(Weights(3, str(tiny_model)))
        loading, asked = asyncio.create_task(engines.load_weights(Weights(4, str(other_model)))), []
        while not loading.done():
            asked.append(asyncio.create_task(engines.generate(requests)))
            await asyncio.sleep(0.01)
        answers = [await each for each in asked]
        await engines.load_weights(Weights(5, str(tiny_model)))
        return answers

    for completions in asyncio.run(go()):
        for request, completion in zip(requests, completions, strict=True):
            assert_logprobs_are_of(folders[completion.model_version], [request], [completion])


def test_weights_that_come_during_answers_sample_the_tokens_to_come(
    engines: EnginePool, tiny_model: Path, other_model: Path, sampling: Sampling
) -> None:
    """Also where one answer sees three versions, and a score is asked for in the middle."""
    requests = requests_of(sampling, seed=4, min_tokens=200, max_tokens=200, reports_cuts=True)
    folders = {5: tiny_model, 6: other_model, 7: tiny_model}

    async def go() -> list[Completion]:
        answers = asyncio.create_task(engines.generate(requests))
        for version in (6, 7):
            # an answer by itself is some tokens of those under way
            await engines.generate([Request([5, 9], replace(sampling, max_tokens=8))])
            await engines.load_weights(Weights(version, str(folders[version])), during=True)
        assert not answers.done()
        return await answers

    asyncio.run(engines.load_weights(Weights(5, str(tiny_model))))
    completions = asyncio.run(go())
    models = {
        version: AutoModelForCausalLM.from_pretrained(folder).eval() for version, folder in folders.items()
    }
    for request, completion in zip(requests, completions, strict=True):
        spans = completion.version_spans
        assert spans is not None and [version for _, version in spans] == [5, 6, 7]
        assert completion.model_version == 5 and completion.banned_tokens is not None
        tokens = torch.tensor([request.prompt_token_ids + completion.token_ids])
        first = len(request.prompt_token_ids) - 1
        with torch.no_grad():
            logits = torch.cat(
                [
                    models[version](tokens).logits[0, first + start : first + end]
                    for (start, version), (end, _) in pairwise([*spans, (200, -1)])
                ]
            )
        logits[:, completion.banned_tokens[0]] = -torch.inf
        chosen = torch.tensor(completion.token_ids)[:, None]
        expected = torch.log_softmax(logits, -1).gather(-1, chosen)[:, 0].tolist()
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 5},
        {"top_k": 40, "top_p": 0.6, "temperature": 0.8},
        {"top_k": 6, "min_tokens": 4},
        {"min_tokens": 4},
    ],
    ids=str,
)
def test_the_sampled_part_of_the_vocabulary_gives_the_sampled_logprobs(
    engines: EnginePool, tiny_model: Path, sampling: Sampling, changes: dict[str, Any]
) -> None:
    requests = requests_of(sampling, seed=5, reports_cuts=True, **changes)
    completions = asyncio.run(engines.generate(requests))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    for request, completion in zip(requests, completions, strict=True):
        tokens = torch.tensor([request.prompt_token_ids + completion.token_ids])
        with torch.no_grad():
            logits_TV = model(tokens).logits[0, len(request.prompt_token_ids) - 1 : -1]
        logits_TV = logits_TV / request.sampling.temperature
        for t, token in enumerate(completion.token_ids):
            kept = completion.kept_tokens[t] if completion.kept_tokens else None
            banned = completion.banned_tokens[t] if completion.banned_tokens else None
            assert (kept is not None) == ("top_k" in changes)
            assert kept is None or (token in kept and len(kept) <= changes["top_k"])
            assert (banned is not None) == ("top_k" not in changes and t < 4)
            allowed = logits_TV[t].clone() if kept is None else logits_TV[t, kept]
            if banned is not None:
                allowed[banned] = -torch.inf
            expected = logits_TV[t, token] - allowed.logsumexp(-1)
            assert completion.logprobs[t] == pytest.approx(expected.item(), abs=1e-4)


def test_scores_are_those_of_the_models_own_forward_pass(engines: EnginePool, tiny_model: Path) -> None:
    sequences = [[5, 9, 14, 3, 200], list(range(20, 84))]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    scores = asyncio.run(engines.engines[0].engine.score(sequences))
    assert scores is not None
    for sequence, scored in zip(sequences, scores, strict=True):
        with torch.no_grad():
            logprobs_TV = torch.log_softmax(model(torch.tensor([sequence])).logits[0, :-1], -1)
        expected = logprobs_TV.gather(-1, torch.tensor(sequence[1:])[:, None])[:, 0]
        assert scored == pytest.approx(expected.tolist(), abs=1e-4)


def test_a_folder_without_weights_is_refused(engines: EnginePool, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="holds no weights of version 9"):
        asyncio.run(engines.load_weights(Weights(9, str(tmp_path))))


class EvenReplies:
    """Pays for a reply of an even number of characters."""

    async def run(self, task: Task, model: ChatModel) -> float:
        reply = await model.chat(task.messages)
        return float(len(reply.text) % 2 == 0)


def test_pass_rates_before_training_are_on_record_and_a_resume_asks_nothing(
    engines: EnginePool, bench: Bench, tiny_model: Path
) -> None:
    tasks = [{"prompt": f"What is {number} + 1?", "response": number + 1} for number in range(6)]
    rows = build_task_rows(
        SUMS, tasks, stage="rl", source="sums", source_rows=range(6), first_position=0
    ).for_operators()

    async def session() -> FilterResult:
        stage = bench.stage("explorer")
        runner = RolloutRunner(stage.explorer, engines, bench.template, lambda task: EvenReplies(), seed=7)
        prober = TaskProber(stage, bench.store, bench.status, Conditions())
        prober.open(runner, Weights(0, str(tiny_model)))
        probe = PassRateProbe(rollouts=8, runs=[])
        connect_engines([probe], prober, SUMS)
        probe.prepare()
        return await asyncio.to_thread(probe.apply, rows)

    first = asyncio.run(session())
    rates = np.asarray(first.scores["pass_rate"])
    assert len(set(rates.tolist())) > 1 and ((rates * 8) % 1 == 0).all()
    probes = bench.table("task_probes")
    assert {row["prompt"]: row["passes"] / 8 for row in probes} == dict(
        zip((str(task["prompt"]) for task in tasks), rates.tolist(), strict=True)
    )
    assert all((row["rollouts"], row["failed"], row["requests"]) == (8, 0, 8) for row in probes)
    assert first.totals["tokens"] == sum(row["tokens"] for row in probes) > 6 * 8 * 10
    used = engines.usage().tokens
    again = asyncio.run(session())
    np.testing.assert_array_equal(np.asarray(again.scores["pass_rate"]), rates)
    assert engines.usage().tokens == used and again.totals["tasks_on_record"] == 6
    assert bench.table("task_probes") == probes


@pytest.mark.slow
def test_rollouts_flow_again_after_the_engines_process_was_killed(
    engines: EnginePool, bench: Bench, tiny_model: Path, other_model: Path
) -> None:
    """vLLM's process, below the actor, which lives on."""
    (engine,) = engines.engines

    async def go() -> None:
        await engines.load_weights(Weights(7, str(other_model)))
        bench.more_of_explorer = {"max_timeout": 100.0}
        explorer = bench.explorer(put_tasks(bench.store, 3), engines=engines)
        step = asyncio.create_task(explorer.explore_step(1))
        while not engine.num_requests:
            await asyncio.sleep(0.01)
        assert isinstance(engine.engine, RemoteEngine)
        actor = await engine.engine.actor.__ray_call__.remote(lambda self: os.getpid())
        for process in descendants(actor):
            os.kill(process, signal.SIGKILL)
        assert await step

    asyncio.run(go())
    assert engine.limit.next_delay() is None, "it was started again"
    rows = bench.table("experiences")
    assert len(rows) == 12
    assert {(row["error"], row["attempt"], row["model_version"]) for row in rows} == {("", 0, 7)}
    # as if nothing had happened
    asked = [
        Request(row["token_ids"][: row["prompt_length"]], replace(SAMPLING, seed=row["seed"])) for row in rows
    ]
    answers = asyncio.run(engines.generate(asked))
    assert [row["token_ids"][row["prompt_length"] :] for row in rows] == [each.token_ids for each in answers]
    asyncio.run(engines.load_weights(Weights(8, str(tiny_model))))
