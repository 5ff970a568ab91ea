"""A file with a working operator, and one with its test, for a user to change."""

from __future__ import annotations

import re
from enum import StrEnum

_HEAD = '''"""{title}."""

from __future__ import annotations

{imports}
'''

_FUNCTION = '''

@trinity_data.filter(reads=("prompt",), reason="the prompt has too few words")
def {name}(row: Mapping[str, Any], min_words: Annotated[int, Field(ge=0)] = 5) -> bool:
    """Keeps tasks whose prompt has at least `min_words` words."""
    return len(row["prompt"].split()) >= min_words
'''

_FILTER = '''

class {name}(Filter):
    """Keeps tasks whose prompt has at least `min_words` words; writes their number as a score."""

    reads = ("prompt",)
    writes = ("num_words",)

    def __init__(self, min_words: Annotated[int, Field(ge=0)] = 5) -> None:
        self.min_words = min_words

    def apply(self, rows: pa.Table) -> FilterResult:
        num_words = np.array([len(prompt.split()) for prompt in rows["prompt"].to_pylist()], dtype=np.float64)
        keep = num_words >= self.min_words
        return FilterResult(keep, "the prompt has too few words", num_words, {{"num_words": num_words}})
'''

_MAPPER = '''

class {name}(Mapper):
    """Takes `per_token` off the reward for each token of the response."""

    reads = ("reward", "response_length")
    writes = ("reward",)

    def __init__(self, per_token: Annotated[float, Field(ge=0)] = 0.001) -> None:
        self.per_token = per_token

    def map(self, rows: pa.Table) -> Mapping[str, Column]:
        lengths = float_column(rows, "response_length")
        return {{"reward": float_column(rows, "reward") - self.per_token * lengths}}
'''

_TEST = '''"""{title}, tested: by hand-computed values, and by the properties of every operator."""

from __future__ import annotations

{imports}

from {module} import {name}


{by_hand}


def test_it_has_the_properties_of_an_operator() -> None:
    checks = check_operator({build}, made_rows("{kind}"), "{kind}")
    assert [check for check in checks if check.status == "failed"] == []
'''

_BY_HAND = {
    "function": """def test_a_prompt_of_too_few_words_is_dropped() -> None:
    assert {name}({{"prompt": "one two three"}}, min_words=3)
    assert not {name}({{"prompt": "one two"}}, min_words=3)""",
    "filter": """def test_a_prompt_of_too_few_words_is_dropped() -> None:
    rows = pa.table({{"prompt": ["one two three", "one two"]}})
    assert {name}(min_words=3).apply(rows).keep.tolist() == [True, False]""",
    "mapper": """def test_each_token_costs() -> None:
    rows = pa.table({{"reward": [1.0, 0.0], "response_length": [10, 20]}})
    assert list({name}(per_token=0.5).map(rows)["reward"]) == [-4.0, -10.0]""",
}

_IMPORTS = {
    "function": (
        "from collections.abc import Mapping\nfrom typing import Annotated, Any\n\n"
        "from pydantic import Field\n\nimport trinity_data"
    ),
    "filter": (
        "from typing import Annotated\n\nimport numpy as np\nimport pyarrow as pa\n"
        "from pydantic import Field\n\nfrom trinity_data import Filter, FilterResult"
    ),
    "mapper": (
        "from collections.abc import Mapping\nfrom typing import Annotated\n\nimport pyarrow as pa\n"
        "from pydantic import Field\n\nfrom trinity_data import Column, Mapper, float_column"
    ),
}
_TEST_IMPORTS = (
    "from trinity_operators.testing.properties import check_operator\n"
    "from trinity_operators.testing.rows import made_rows"
)


class Template(StrEnum):
    FUNCTION = "function"
    FILTER = "filter"
    MAPPER = "mapper"


def object_name(name: str, template: Template) -> str:
    """`long_enough` as Python calls such a thing: a function so, a class `LongEnough`."""
    return name if template is Template.FUNCTION else "".join(part.capitalize() for part in name.split("_"))


def operator_files(name: str, template: Template) -> dict[str, str]:
    """Names and texts of the operator's file and its test's; `name` has small letters, digits and `_`."""
    assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
    names = {
        "name": object_name(name, template),
        "module": name,
        "title": f"The operator {name}",
        "kind": "experience" if template is Template.MAPPER else "task",
    }
    code = {Template.FUNCTION: _FUNCTION, Template.FILTER: _FILTER, Template.MAPPER: _MAPPER}[template]
    imports, build = _TEST_IMPORTS, names["name"]
    if template is Template.FUNCTION:
        imports = f"from trinity_operators.functions import built\n{imports}"
        build = f"lambda: built({names['name']})"
    else:
        imports = f"import pyarrow as pa\n\n{imports}"
    test = _TEST.format(**names, imports=imports, build=build, by_hand=_BY_HAND[template].format(**names))
    return {
        f"{name}.py": (_HEAD + code).format(**names, imports=_IMPORTS[template]),
        f"test_{name}.py": test,
    }
