"""Arguments of task operators that are the stage's, and priorities as an operator."""

from __future__ import annotations

from pathlib import Path

from trinity_data.config import OperatorConfig, TaskPipelineConfig
from trinity_operators.stage_arguments import with_priority, with_stage_values

VALUES = {"model_path": "models/small", "chat_template": None, "eval_tasksets": [{"path": "held_out.jsonl"}]}


def filled(tmp_path: Path, name: str, **args: object) -> dict[str, object]:
    (operator,) = with_stage_values([OperatorConfig(name=name, args=args)], VALUES, tmp_path)
    return operator.args


def test_the_file_takes_precedence_over_the_stage(tmp_path: Path) -> None:
    assert filled(tmp_path, "token_length_filter", max_length=9) == {
        "model_path": "models/small",
        "chat_template": None,
        "max_length": 9,
    }
    assert filled(tmp_path, "token_length_filter", model_path="other")["model_path"] == "other"
    assert filled(tmp_path, "contamination_filter") == {"eval_tasksets": VALUES["eval_tasksets"]}


def test_only_an_operator_that_asks_gets_arguments(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from trinity_data import Filter\n"
        "class Asks(Filter):\n    of_stage = ('model_path',)\n    def apply(self, rows): ...\n"
    )
    assert filled(tmp_path, "./mine.py:Asks") == {"model_path": "models/small"}
    assert filled(tmp_path, "difficulty_filter", max_steps=3) == {"max_steps": 3}
    # which its builder refuses
    assert filled(tmp_path, "no_such_filter") == filled(tmp_path, "./none.py:Filter") == {}


def test_priorities_are_the_last_operator() -> None:
    pipeline = TaskPipelineConfig(operators=(OperatorConfig(name="difficulty_filter"),), top_k=5)
    last = with_priority(pipeline).operators[-1]
    assert (last.name, last.args) == ("priority_filter", {"top_k": 5})
    weighted = TaskPipelineConfig(priority_weights={"difficulty": -1.0})
    assert with_priority(weighted).operators[0].args == {"weights": {"difficulty": -1.0}, "top_k": -1}
    assert with_priority(TaskPipelineConfig()).operators == ()
