"""The transformers engine against plain `transformers`, which is independent of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, TopKLogitsWarper, TopPLogitsWarper

from trinity_data.errors import EngineError
from trinity_data.weights import Weights
from trinity_explorer.engines.engine import Completion, Request, Sampling
from trinity_explorer.engines.transformers import TransformersEngine

# the first is there twice, as a group asks it
PROMPTS = [[5, 9, 14], [40, 41, 42, 43, 44, 45, 46, 47], [7], [100, 3, 88, 12, 60], [5, 9, 14]]


@pytest.fixture(scope="module")
def reference(tiny_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def other_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same shape with other weights."""
    from trinity_data.synthetic.model import write_weights
    from trinity_data.tokenizer import load_tokenizer

    folder = tmp_path_factory.mktemp("other") / "version_5"
    write_weights(folder, vocab_size=len(load_tokenizer(str(tiny_model))), seed=1)
    return folder


def requests_of(sampling: Sampling, **changes: Any) -> list[Request]:
    return [Request(prompt, replace(sampling, seed=i, **changes)) for i, prompt in enumerate(PROMPTS)]


def engine_of(folder: Path, max_num_seqs: int | None = None) -> TransformersEngine:
    return TransformersEngine(str(folder), dtype=None, max_num_seqs=max_num_seqs)


def answers(engine: TransformersEngine, requests: Sequence[Request]) -> list[Completion]:
    return asyncio.run(engine.generate(requests))


def logits_after(reference: Any, request: Request, completion: Completion) -> torch.Tensor:
    """The reference's logits at each generated token."""
    tokens = request.prompt_token_ids + completion.token_ids
    with torch.no_grad():
        logits: torch.Tensor = reference(torch.tensor([tokens])).logits[0].double()
    return logits[len(request.prompt_token_ids) - 1 : -1]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, -1, 1.0), (0.7, -1, 1.0), (1.0, 20, 1.0), (1.3, -1, 0.6), (0.9, 8, 0.5)],
)
def test_logprobs_are_of_the_distribution_that_was_sampled(
    tiny_model: Path, reference: Any, sampling: Sampling, temperature: float, top_k: int, top_p: float
) -> None:
    requests = requests_of(sampling, temperature=temperature, top_k=top_k, top_p=top_p)
    for request, completion in zip(requests, answers(engine_of(tiny_model), requests), strict=True):
        scaled = logits_after(reference, request, completion) / temperature
        if top_k > 0:
            scaled = TopKLogitsWarper(top_k)(None, scaled)
        if top_p < 1:
            scaled = TopPLogitsWarper(top_p)(None, scaled)
        chosen = torch.tensor(completion.token_ids)
        expected = torch.log_softmax(scaled, -1).gather(-1, chosen[:, None])[:, 0]
        assert completion.logprobs == pytest.approx(expected.tolist(), abs=1e-5)
        assert min(completion.logprobs) > -20


def test_the_same_seed_gives_the_same_answer_whatever_the_batch(tiny_model: Path, sampling: Sampling) -> None:
    requests = requests_of(sampling, temperature=1.0)
    together = answers(engine_of(tiny_model), requests)
    alone = [answers(engine_of(tiny_model), [request])[0] for request in requests]
    reversed_in_pairs = answers(engine_of(tiny_model, max_num_seqs=2), requests[::-1])[::-1]
    tokens = [completion.token_ids for completion in together]
    assert [completion.token_ids for completion in alone] == tokens
    assert [completion.token_ids for completion in reversed_in_pairs] == tokens


def test_other_seeds_give_other_answers(tiny_model: Path, sampling: Sampling) -> None:
    requests = [Request(PROMPTS[0], replace(sampling, seed=seed)) for seed in range(8)]
    assert len({tuple(completion.token_ids) for completion in answers(engine_of(tiny_model), requests)}) == 8


def test_sampled_tokens_have_the_frequencies_of_the_distribution(
    tiny_model: Path, reference: Any, sampling: Sampling
) -> None:
    request = Request(PROMPTS[0], replace(sampling, max_tokens=1, top_k=4))
    drawn = answers(
        engine_of(tiny_model), [Request(PROMPTS[0], replace(request.sampling, seed=s)) for s in range(2000)]
    )
    expected = TopKLogitsWarper(4)(None, logits_after(reference, request, drawn[0])).softmax(-1)[0]
    for token in expected.nonzero()[:, 0].tolist():
        share = sum(completion.token_ids == [token] for completion in drawn) / len(drawn)
        # four standard deviations of a share of 2000 draws are at most 0.045
        assert share == pytest.approx(expected[token].item(), abs=0.045)


def test_greedy_is_what_generate_calls_greedy(tiny_model: Path, reference: Any, sampling: Sampling) -> None:
    requests = requests_of(sampling, temperature=0.0, max_tokens=24)
    for request, completion in zip(requests, answers(engine_of(tiny_model), requests), strict=True):
        prompt = torch.tensor([request.prompt_token_ids])
        generated = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24
        )
        assert completion.token_ids == generated[0, prompt.shape[1] :].tolist()


def test_an_end_token_stops_and_min_tokens_forbid_it(tiny_model: Path, sampling: Sampling) -> None:
    engine = engine_of(tiny_model)
    # an engine for which half of the vocabulary ends an answer
    engine.eos_token_ids = torch.arange(0, engine.model.config.vocab_size, 2)
    requests = [
        Request([7], replace(sampling, seed=seed, min_tokens=seed % 5, max_tokens=12)) for seed in range(40)
    ]
    completions = answers(engine, requests)
    for request, completion in zip(requests, completions, strict=True):
        ended = completion.token_ids[-1] % 2 == 0
        assert all(token % 2 for token in completion.token_ids[:-1])
        assert len(completion.token_ids) > request.sampling.min_tokens
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or len(completion.token_ids) == 12
    assert any(len(completion.token_ids) == seed % 5 + 1 for seed, completion in enumerate(completions))


def test_each_request_has_its_own_length(tiny_model: Path, sampling: Sampling) -> None:
    lengths = [1, 2, 9, 30, 4]
    requests = [Request(p, replace(sampling, max_tokens=n)) for p, n in zip(PROMPTS, lengths, strict=True)]
    engine = engine_of(tiny_model)
    engine.eos_token_ids = torch.tensor([10**6])
    completions = answers(engine, requests)
    assert [len(completion.token_ids) for completion in completions] == lengths
    assert {completion.finish_reason for completion in completions} == {"length"}


def test_after_a_reload_answers_and_versions_are_those_of_the_new_weights(
    tiny_model: Path, other_model: Path, sampling: Sampling
) -> None:
    requests = requests_of(sampling, max_tokens=8)

    async def go() -> tuple[list[Completion], list[Completion]]:
        engine = engine_of(tiny_model)
        before = await engine.generate(requests)
        await engine.load_weights(Weights(5, str(other_model)))
        return before, await engine.generate(requests)

    before, after = asyncio.run(go())
    fresh = answers(engine_of(other_model), requests)
    assert [completion.logprobs for completion in after] == [completion.logprobs for completion in fresh]
    assert [completion.token_ids for completion in after] == [completion.token_ids for completion in fresh]
    assert all(one.logprobs != other.logprobs for one, other in zip(before, after, strict=True))
    assert [completion.model_version for completion in [*before, *after]] == [0] * len(PROMPTS) + [5] * len(
        PROMPTS
    )


def test_weights_that_are_not_this_models_are_refused(tiny_model: Path, tmp_path: Path) -> None:
    engine = engine_of(tiny_model)
    with pytest.raises(EngineError, match="does not hold this model's weights"):
        asyncio.run(engine.load_weights(Weights(1, str(tmp_path))))
    assert engine.model_version == 0


def test_a_token_id_that_there_is_not_fails_its_request_instead_of_hanging(
    tiny_model: Path, sampling: Sampling
) -> None:
    async def go() -> list[Completion]:
        engine = engine_of(tiny_model)
        with pytest.raises(IndexError):
            await asyncio.wait_for(engine.generate([Request([10**6], sampling)]), 5)
        return await engine.generate([Request([1], replace(sampling, max_tokens=2))])

    assert len(asyncio.run(go())[0].token_ids) >= 1


def test_weights_that_come_during_answers_sample_the_tokens_to_come(
    tiny_model: Path, other_model: Path, sampling: Sampling
) -> None:
    folders, requests = (
        {0: tiny_model, 5: other_model},
        requests_of(sampling, min_tokens=200, max_tokens=200, reports_cuts=True),
    )

    async def go() -> tuple[list[Completion], list[Completion]]:
        engine = engine_of(tiny_model)
        answers = asyncio.create_task(engine.generate(requests))
        while not engine._is_sampling:
            await asyncio.sleep(0.001)
        for _ in range(3):  # each before another token
            assert len(await engine.score([[5, 9, 14]])) == 1
        await engine.load_weights(Weights(5, str(other_model)), during=True)
        assert not answers.done()
        return await answers, await engine.generate(requests)

    during, after = asyncio.run(go())
    assert {each.model_version for each in after} == {5}
    assert [each.version_spans for each in after] == [None] * len(PROMPTS)
    (spans,) = {tuple(each.version_spans or ()) for each in during}
    assert [version for _, version in spans] == [0, 5] and 0 < spans[1][0] < 200
    models = {
        version: AutoModelForCausalLM.from_pretrained(folder).eval() for version, folder in folders.items()
    }
    for request, completion in zip(requests, during, strict=True):
        logits = torch.cat(
            [
                logits_after(models[version], request, completion)[start:end]
                for (start, version), (end, _) in pairwise([*spans, (200, -1)])
            ]
        )
        assert completion.banned_tokens is not None
        logits[:, completion.banned_tokens[0]] = -torch.inf
        chosen = torch.tensor(completion.token_ids)[:, None]
        expected = torch.log_softmax(logits, -1).gather(-1, chosen)[:, 0].tolist()
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)
