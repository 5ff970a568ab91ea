from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trinity_data.errors import ConfigError, EngineError, RolloutError, TemplateError
from trinity_data.tokenizer import USUAL_CHARS, ChatTemplate, load_tokenizer
from trinity_data.weights import Weights
from trinity_explorer.chat import (
    MAX_REQUESTS_PER_CALL,
    ChatClient,
    RequestBatcher,
    changed_sampling,
    check_cuts,
    check_messages,
)
from trinity_explorer.engines.engine import Completion, Request, Sampling
from trinity_explorer.engines.fake import FakeEngine, guess_arithmetic, script_from_file
from trinity_explorer.engines.pool import EnginePool

CHAT = ({"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 3"})


class CountingEngine:
    """Answers every request with its own seed as the only token."""

    name = "counting"

    def __init__(self, *, broken: bool = False, delay: float = 0.0) -> None:
        self.calls: list[int] = []
        self.broken, self.delay = broken, delay

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        self.calls.append(len(requests))
        await asyncio.sleep(self.delay)
        if self.broken:
            raise EngineError("gone")
        return [Completion([request.sampling.seed], [-1.0], "stop", 3) for request in requests]

    async def load_weights(self, weights: Weights, *, during: bool = False) -> None:
        self.calls.append(-weights.version)

    async def close(self) -> None: ...


def ask(engine: CountingEngine, sampling: Sampling, count: int) -> list[int]:
    async def go() -> list[int]:
        batcher = RequestBatcher(EnginePool([engine]))
        requests = [Request([1], replace(sampling, seed=seed)) for seed in range(count)]
        completions = await asyncio.gather(*(batcher.generate(request) for request in requests))
        return [completion.token_ids[0] for completion in completions]

    return asyncio.run(go())


def test_a_group_asks_in_one_call_and_each_try_gets_its_own_answer(sampling: Sampling) -> None:
    engine = CountingEngine()
    assert ask(engine, sampling, 8) == list(range(8))
    assert engine.calls == [8]


def test_a_large_group_asks_in_pieces(sampling: Sampling) -> None:
    engine = CountingEngine()
    assert ask(engine, sampling, MAX_REQUESTS_PER_CALL + 5) == list(range(MAX_REQUESTS_PER_CALL + 5))
    assert engine.calls == [MAX_REQUESTS_PER_CALL, 5]


def test_every_waiting_try_hears_of_a_dead_engine(sampling: Sampling) -> None:
    async def go() -> list[object]:
        batcher = RequestBatcher(EnginePool([CountingEngine(broken=True)]))
        return list(
            await asyncio.gather(
                *(batcher.generate(Request([1], sampling)) for _ in range(3)), return_exceptions=True
            )
        )

    assert [str(error) for error in asyncio.run(go())] == ["gone"] * 3


def test_requests_go_to_the_least_busy_engine_and_the_time_is_counted_once(sampling: Sampling) -> None:
    engines = [CountingEngine(delay=0.05), CountingEngine(delay=0.05)]

    async def go() -> EnginePool:
        pool = EnginePool(engines)
        calls = [[Request([1], sampling)] * size for size in (4, 1, 2)]
        await asyncio.gather(*(pool.generate(requests) for requests in calls))
        return pool

    usage = asyncio.run(go()).usage()
    assert [engine.calls for engine in engines] == [[4], [1, 2]]
    assert usage.tokens == 7
    assert 0.04 < usage.busy_seconds < 0.095


def test_weights_are_loaded_once_by_all_engines() -> None:
    engines = [CountingEngine(), CountingEngine()]

    async def go() -> int:
        pool = EnginePool(engines)
        for version in (2, 2, 3):
            await pool.load_weights(Weights(version, "nowhere"))
        return pool.model_version

    assert asyncio.run(go()) == 3
    assert [engine.calls for engine in engines] == [[-2, -3], [-2, -3]]


def test_a_chat_is_encoded_by_the_models_own_template(template: ChatTemplate, tokenizer: Any) -> None:
    expected = tokenizer.apply_chat_template(list(CHAT), add_generation_prompt=True, tokenize=True)
    assert template.encode(CHAT).token_ids == list(expected["input_ids"])
    assert tokenizer.decode(template.encode(CHAT).token_ids) == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n2 + 3<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_pipeline_files_template_takes_precedence_over_it(tokenizer: Any) -> None:
    own = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
    template = ChatTemplate(tokenizer, own, max_prompt_tokens=None, truncate=False)
    assert tokenizer.decode(template.encode(CHAT).token_ids) == "Add.;2 + 3;"


def test_a_long_prompt_keeps_its_beginning_or_is_refused(tokenizer: Any) -> None:
    prompt = ChatTemplate(tokenizer, None, max_prompt_tokens=None, truncate=False).encode(CHAT).token_ids
    limit = len(prompt) - 3
    cut = ChatTemplate(tokenizer, None, max_prompt_tokens=limit, truncate=True)
    assert cut.encode(CHAT) == (prompt[:-3], True)
    refusing = ChatTemplate(tokenizer, None, max_prompt_tokens=limit, truncate=False)
    with pytest.raises(TemplateError, match=f"has {len(prompt)} tokens, model.max_prompt_tokens is {limit}"):
        refusing.encode(CHAT)


def test_changes_of_sampling_hold_for_one_reply(
    tokenizer: Any, template: ChatTemplate, sampling: Sampling
) -> None:
    async def go() -> ChatClient:
        engine = FakeEngine(tokenizer, script=lambda prompt, seed: "a b c d e f")
        model = ChatClient(RequestBatcher(EnginePool([engine])), template, sampling)
        await model.chat(CHAT, max_tokens=2)
        await model.chat(CHAT)
        return model

    first, second = asyncio.run(go()).replies
    assert (len(first.completion.token_ids), first.completion.finish_reason) == (2, "length")
    assert (second.text, second.completion.finish_reason) == ("a b c d e f", "stop")


def test_the_fake_engine_answers_the_same_prompt_and_seed_alike(
    tokenizer: Any, template: ChatTemplate, sampling: Sampling
) -> None:
    async def answers(seeds: Sequence[int]) -> list[str]:
        engine = FakeEngine(tokenizer, script=guess_arithmetic)
        prompt = template.encode([{"role": "user", "content": "What is 3 + 4?"}]).token_ids
        requests = [Request(prompt, replace(sampling, seed=seed)) for seed in seeds]
        return [template.decode(completion.token_ids) for completion in await engine.generate(requests)]

    forwards, backwards = asyncio.run(answers(range(30))), asyncio.run(answers(range(29, -1, -1)))
    assert forwards == backwards[::-1]
    assert set(forwards) == {f"The answer is {n}.\n#### {n}" for n in (7, -1, 3)}


def test_a_script_file_answers_by_the_first_fragment_that_fits(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    file.write_text('{"apples": ["#### 1", "#### 2"], "": ["#### 3"]}')
    script = script_from_file(file)
    assert {script("of 5 apples", seed) for seed in range(20)} == {"#### 1", "#### 2"}
    assert script("of 5 pears", 0) == "#### 3"


@pytest.mark.parametrize("text", ["[1]", "{", '{"a": "b"}', '{"a": []}'])
def test_a_script_file_of_another_shape_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "script.json").write_text(text)
    with pytest.raises(ConfigError, match=r"explorer\.rollout_model\.script: .*script\.json"):
        script_from_file(tmp_path / "script.json")


def test_few_prompts_of_an_unusual_length_are_remembered(tiny_model: Path) -> None:
    template = ChatTemplate(load_tokenizer(str(tiny_model)), None, max_prompt_tokens=8, truncate=True)
    for number in range(12):
        long = ({"role": "user", "content": f"{number} + 3 " * (USUAL_CHARS // 6 + 1)},)
        assert len(template.encode(long).token_ids) == len(template.encode(CHAT).token_ids) == 8
    assert template._encode.cache_info().currsize == 1
    assert template._encode_long.cache_info().currsize == 8


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": float("nan")}, "temperature is nan; allowed is a number from 0"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0}, "top_p is 0; allowed is a number above 0 and up to 1"),
        ({"top_k": 0}, "top_k is 0; allowed is -1 or a count from 1"),
        ({"max_tokens": 33}, "max_tokens is 33; allowed is a count from 1 to 32"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"seed": 2**31}, "seed is 2147483648"),
        ({"temprature": 1.0}, "unknown sampling argument 'temprature'.*did you mean 'temperature'"),
    ],
)
def test_what_cannot_be_sampled_with_is_refused(
    sampling: Sampling, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(RolloutError, match=said):
        changed_sampling(sampling, changes)


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hello", "takes a list of messages, found 'hello'"),
        ([], "takes a list of messages"),
        (["hello"], r"messages\[0\] is 'hello'"),
        ([{"role": "user"}], r"messages\[0\] has no 'content'; it has role"),
        ([{"content": "x"}], r"messages\[0\] is \{'content': 'x'\}"),
    ],
)
def test_what_is_no_chat_is_refused(messages: Any, said: str) -> None:
    with pytest.raises(RolloutError, match=said):
        check_messages(messages)


def test_tools_and_tool_calls_reach_the_chat_template(tokenizer: Any) -> None:
    own = (
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}"
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<{{ c.function.name }}>{% endfor %};{% endfor %}"
    )
    template = ChatTemplate(tokenizer, own, max_prompt_tokens=None, truncate=False)
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {}}}],
    }
    result = {"role": "tool", "content": "5", "name": "add"}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    prompt = template.encode([*CHAT[1:], call, result], tools).token_ids
    assert tokenizer.decode(prompt) == "[add]user:2 + 3;assistant:<add>;tool:5;"


def test_a_chat_that_vllm_cannot_name_the_kept_tokens_of_is_refused(sampling: Sampling) -> None:
    trained = replace(sampling, temperature=1.0, top_p=0.9, top_k=-1, reports_cuts=True)
    with pytest.raises(RolloutError, match=r"top_p 0.9 with top_k -1; vllm names at most 1024 .* give top_k"):
        check_cuts(trained, "vllm")
    with pytest.raises(RolloutError, match="top_k 2000"):
        check_cuts(replace(trained, top_p=1.0, top_k=2000), "vllm")
    for allowed in (
        replace(trained, top_k=50),
        replace(trained, temperature=0.0),
        replace(trained, reports_cuts=False),
    ):
        check_cuts(allowed, "vllm")
    check_cuts(trained, "transformers")


def test_a_process_of_a_workflow_loads_no_engine() -> None:
    heavy = {"ray", "torch", "transformers", "vllm"}
    program = f"import sys, trinity_explorer.workflows.process_main; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
