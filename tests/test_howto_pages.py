"""The Python of howto/algorithm.md, howto/engine.md and reference/python.md gives what the pages say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from trinity_data.config import OperatorConfig
from trinity_explorer.engines.fake import guess_arithmetic, script_from_file
from trinity_operators.llm_scores import RUBRIC_PROMPT, scores_of
from trinity_operators.registry import build_advantage, build_operators
from trinity_operators.runner import run_operators

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), flags=re.DOTALL)


def test_the_advantage_of_the_page_is_the_reward_minus_the_median_of_its_group(tmp_path: Path) -> None:
    (tmp_path / "advantages.py").write_text(blocks("howto/algorithm.md")[0])
    rows = pa.table(
        {
            "experience_id": [f"g/{number}/00" for number in range(5)],
            "group_id": ["a", "a", "a", "b", "b"],
            "rollout": [0, 1, 2, 0, 1],
            "reward": [0.0, 1.0, 5.0, 1.0, 0.0],
        }
    )
    own = build_operators([OperatorConfig(name="./advantages.py:MedianAdvantage")], tmp_path)
    operators = [*own, build_advantage("reinforce", {})]
    done = run_operators(
        operators, rows, row_kind="experience", id_column="experience_id", stage="rl", step=1
    )
    # medians 1 and 0.5
    np.testing.assert_allclose(done.values["advantage"], [-1.0, 0.0, 4.0, 0.5, -0.5])


def test_the_loss_of_the_page_is_minus_the_advantage_times_the_log_prob() -> None:
    import torch

    from trinity_trainer.algorithms.policy_losses import PolicyInputs

    names: dict[str, Any] = {}
    exec(blocks("howto/algorithm.md")[1], names)
    inputs = PolicyInputs(
        logprobs_BT=torch.tensor([[-1.0, -2.0]]),
        old_logprobs_BT=torch.tensor([[-1.0, -2.0]]),
        advantages_BT=torch.tensor([[0.5, -0.5]]),
        mask_BT=torch.tensor([[True, True]]),
    )
    loss = names["reinforce_loss"](inputs, scale=2.0)
    assert loss.per_token_BT.tolist() == [[1.0, -2.0]]
    assert loss.ratio_BT.tolist() == [[1.0, 1.0]]
    assert not loss.clipped_BT.any()


def test_the_engine_of_the_page_repeats_the_end_of_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    engine, use = blocks("howto/engine.md")
    exec(f"{engine}\n{use}", {})
    assert capsys.readouterr().out.strip() == use.rstrip().rpartition("# ")[2]


def test_the_answers_on_the_page_on_scores_by_a_model_can_be_read(tmp_path: Path) -> None:
    answer, script = re.findall(r"```json\n(.*?)```", (DOCS / "howto/judge.md").read_text(), flags=re.DOTALL)
    scores, rationale = scores_of(answer, ["right", "clear"])
    assert (scores, rationale[:16]) == ({"right": 5.0, "clear": 3.0}, "The sum is right")
    (tmp_path / "answers.json").write_text(script)
    ask = script_from_file(tmp_path / "answers.json")
    question = "How many apples are left?"
    about = RUBRIC_PROMPT.format(question=question, response="7", low=0, high=10, criteria="- right: Is it?")
    assert scores_of(ask(about, 1), ["right", "clear"])[0] == {"right": 8.0, "clear": 6.0}
    assert ask(question, 1) in ("The answer is 7.\n#### 7", "The answer is 9.\n#### 9", "I do not know.")
    with pytest.raises(ValueError, match="there is no JSON object in the answer 'The answer is"):
        scores_of(guess_arithmetic(about, 1), ["right", "clear"])


def test_the_query_of_the_page_on_python_reads_a_run(
    small_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = blocks("reference/python.md")
    exec(block.replace("project/name", str(small_run)), {})
    assert capsys.readouterr().out.split()[-1] == "1"
