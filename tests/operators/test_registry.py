"""Operators by name: every spelling of a pipeline file, and the message for each that is wrong."""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import pkgutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

import trinity_operators
from trinity_data.config import OperatorConfig
from trinity_data.errors import ConfigError, OperatorError
from trinity_operators.base import Filter, Mapper
from trinity_operators.registry import (
    OPERATORS,
    build_operator,
    build_operators,
    data_juicer_names,
    is_built_in,
)

MY_OPS = """
from trinity_operators.base import Mapper

class Constant(Mapper):
    writes = ("constant",)

    def __init__(self, value: float, *, label_text: str = "x"):
        self.value = value

    def map(self, rows):
        return {"constant": [self.value] * rows.num_rows}

class Explodes(Mapper):
    def __init__(self):
        raise KeyError("no key")

    def map(self, rows):
        return {}

number = 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my_ops.py").write_text(MY_OPS)
    return tmp_path


def operator_classes() -> dict[str, type]:
    """Every public operator class of the package, but for the adapters of Data-Juicer and what stands in the
    place of others.
    """
    kinds = {}
    for info in pkgutil.iter_modules(trinity_operators.__path__):
        module = importlib.import_module(f"trinity_operators.{info.name}")
        for kind in vars(module).values():
            if not (
                inspect.isclass(kind) and issubclass(kind, Filter | Mapper) and not inspect.isabstract(kind)
            ):
                continue
            if kind.__module__ == module.__name__ and not kind.__name__.startswith(
                ("DataJuicer", "Function", "StoredAnswers", "_")
            ):
                kinds[f"{module.__name__}:{kind.__name__}"] = kind
    return kinds


def label_in_a_worker(config: OperatorConfig, base_dir: Path) -> str:
    return build_operators([config], base_dir)[0].label


def refusal(name: str, args: dict[str, object], base_dir: Path = Path()) -> str:
    with pytest.raises(OperatorError) as caught:
        build_operator(name, args, base_dir=base_dir)
    assert isinstance(caught.value, ConfigError)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_every_registered_name_is_the_name_of_its_class() -> None:
    for name, kind in OPERATORS.items():
        assert issubclass(kind, Filter | Mapper)
        assert kind.name == name


def test_every_operator_class_is_registered() -> None:
    assert set(operator_classes().values()) == set(OPERATORS.values())


def test_no_name_of_ours_hides_one_of_data_juicers() -> None:
    assert not OPERATORS.keys() & data_juicer_names()


def test_arguments_reach_the_operator() -> None:
    assert vars(build_operator("reward_filter", {"threshold": 1}, base_dir=Path()))["threshold"] == 1.0


def test_a_file_is_found_beside_the_pipeline_file(folder: Path) -> None:
    operator = build_operator("./my_ops.py:Constant", {"value": 2.5}, base_dir=folder)
    assert operator.label == "Constant"
    assert vars(operator)["value"] == 2.5


def test_a_file_is_found_in_the_working_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert (
        build_operator("my_ops.py:Constant", {"value": 1.0}, base_dir=folder / "pipelines").label
        == "Constant"
    )


def test_two_files_of_one_name_stay_apart_and_a_changed_one_is_read_again(folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    (other / "my_ops.py").write_text(MY_OPS.replace('("constant",)', '("other",)'))
    one = build_operator("./my_ops.py:Constant", {"value": 1.0}, base_dir=folder)
    two = build_operator("./my_ops.py:Constant", {"value": 1.0}, base_dir=other)
    assert (one.writes, two.writes) == (("constant",), ("other",))
    (folder / "my_ops.py").write_text(MY_OPS.replace('("constant",)', '("changed",)'))
    assert build_operator("./my_ops.py:Constant", {"value": 1.0}, base_dir=folder).writes == ("changed",)


def test_an_operator_is_built_again_in_another_process(folder: Path) -> None:
    config = OperatorConfig(name="./my_ops.py:Constant", args={"value": 1.0})
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(label_in_a_worker, config, folder).result() == "Constant"


def test_a_module_on_the_path_is_imported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "my_package_of_ops.py").write_text(MY_OPS)
    monkeypatch.syspath_prepend(folder)
    assert build_operator("my_package_of_ops:Constant", {"value": 1.0}, base_dir=Path()).label == "Constant"


def test_an_installed_package_offers_operators_by_entry_point(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "plugin_of_ops.py").write_text(MY_OPS)
    dist = folder / "plugin_of_ops-1.0.dist-info"
    dist.mkdir()
    (dist / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-of-ops\nVersion: 1.0\n")
    (dist / "entry_points.txt").write_text("[trinity_data.operators]\nconstant = plugin_of_ops:Constant\n")
    monkeypatch.syspath_prepend(folder)
    assert vars(build_operator("constant", {"value": 4.0}, base_dir=Path()))["value"] == 4.0


def test_entries_of_a_configuration_are_built_in_order(folder: Path) -> None:
    entries = [
        OperatorConfig(name="./my_ops.py:Constant", args={"value": 1.0}),
        OperatorConfig(name="reward_filter"),
    ]
    assert [op.label for op in build_operators(entries, folder)] == ["Constant", "reward_filter"]


def test_a_misspelt_name_gets_the_nearest_of_ours_or_of_data_juicers() -> None:
    ours = refusal("reward_fitler", {})
    assert "unknown operator 'reward_fitler'; known: " in ours
    assert "reward_std_filter" in ours
    assert ours.endswith("(did you mean 'reward_filter'?)")
    assert refusal("text_lenght_filter", {}).endswith("(did you mean 'text_length_filter'?)")


def test_an_error_names_the_position_of_the_operator() -> None:
    with pytest.raises(OperatorError, match=r"^operators\[1\]: unknown operator 'nothing_like_it'"):
        build_operators(
            [OperatorConfig(name="reward_filter"), OperatorConfig(name="nothing_like_it")], Path()
        )


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        (
            "reward_filter",
            {"treshold": 1.0},
            (
                "operator 'reward_filter': unknown argument 'treshold'; known: "
                "threshold (did you mean 'threshold'?)"
            ),
        ),
        (
            "reward_filter",
            {"threshold": "0.5"},
            "operator 'reward_filter': threshold: found '0.5'; Input should be a valid number",
        ),
        (
            "invalid_reward_filter",
            {"threshold": 1.0},
            "operator 'invalid_reward_filter': it takes no arguments, found 'threshold'",
        ),
        (
            "length_penalty",
            {"max_response_length": 10},
            "operator 'length_penalty': argument 'cache_length' is missing; "
            "its arguments: cache_length, max_response_length, penalty_factor",
        ),
        (
            "difficulty_filter",
            {"min_steps": 3, "max_steps": 2},
            (
                "operator 'difficulty_filter': the upper bound 2 lies below the lower bound 3: "
                "every row would be dropped"
            ),
        ),
        (
            "reward_shaping_mapper",
            {"reward_shaping_configs": [{"stats_key": "a", "op_type": "PLUS"}]},
            "operator 'reward_shaping_mapper': reward_shaping_configs.0.op_type: found 'PLUS'; "
            "Input should be 'ADD', 'SUB', 'MUL' or 'DIV'",
        ),
        (
            "grpo_advantage",
            {"epsilon": -1.0},
            "operator 'grpo_advantage': epsilon: found -1.0; Input should be greater than or equal to 0",
        ),
        (
            "./my_ops.py:Constant",
            {},
            "operator './my_ops.py:Constant': argument 'value' is missing; its arguments: label_text, value",
        ),
        ("./my_ops.py:Explodes", {}, "operator './my_ops.py:Explodes': KeyError: 'no key'"),
        ("./my_ops.py:Constnat", {}, "./my_ops.py has no 'Constnat' (did you mean 'Constant'?)"),
        (
            "./my_ops.py:number",
            {},
            "'./my_ops.py:number' is not an operator; "
            "it must be a subclass of trinity_data.Filter, trinity_data.Mapper or trinity_data.Expander, "
            "or a function under @trinity_data.filter or @trinity_data.mapper",
        ),
        (
            "no_such_module_here:Thing",
            {},
            "'no_such_module_here:Thing': there is no module 'no_such_module_here'; "
            "install its package or put it on PYTHONPATH; a file is named as ./file.py:Class",
        ),
    ],
)
def test_what_does_not_fit_is_refused(name: str, args: dict[str, object], message: str, folder: Path) -> None:
    assert refusal(name, args, folder) == message


def test_a_missing_file_is_reported_with_where_it_was_looked_for(folder: Path) -> None:
    message = refusal("./absent.py:Thing", {}, folder)
    assert message.startswith("there is no file './absent.py'; looked for ")
    assert str(folder / "absent.py") in message
    assert str(Path.cwd() / "absent.py") in message


def test_a_file_that_fails_to_import_is_reported_and_not_remembered(folder: Path) -> None:
    broken = folder / "broken.py"
    broken.write_text("raise RuntimeError('half-written')")
    assert refusal("./broken.py:Thing", {}, folder).endswith(
        "importing it failed: RuntimeError: half-written"
    )
    assert "importing it failed" in refusal("./broken.py:Thing", {}, folder)


def test_arguments_of_a_base_class_are_known_through_kwargs(folder: Path) -> None:
    (folder / "derived.py").write_text(
        "from trinity_operators.filters import RewardFilter\n"
        "class Derived(RewardFilter):\n"
        "    def __init__(self, extra: int = 1, **kwargs):\n"
        "        super().__init__(**kwargs)\n"
    )
    assert (
        vars(build_operator("./derived.py:Derived", {"threshold": 2.0}, base_dir=folder))["threshold"] == 2.0
    )
    assert "known: extra, threshold" in refusal("./derived.py:Derived", {"thresold": 2.0}, folder)


def test_the_names_of_operators_import_neither_data_juicer_nor_duckdb() -> None:
    code = (
        "import sys; from trinity_operators.registry import data_juicer_names as names;"
        "assert 'text_length_filter' in names(); assert not {'data_juicer', 'duckdb'} & set(sys.modules);"
        "print(len(names()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 150


def test_built_in_operators_are_distinguished_from_others(folder: Path) -> None:
    assert is_built_in(build_operator("exact_duplicate_filter", {}, base_dir=folder))
    assert not is_built_in(build_operator("text_length_filter", {"min_len": 1}, base_dir=folder))
