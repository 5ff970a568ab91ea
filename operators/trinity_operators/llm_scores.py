"""Scores that a language model gives to responses. A response that gets none has an error, never a 0."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from string import Formatter
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from trinity_data.errors import OperatorError, did_you_mean
from trinity_operators.asynchronous import AsyncMapper, Row
from trinity_operators.endpoint import (
    LONGEST_PAUSE_SECONDS,
    ROLLOUT_MODEL,
    URL_VARIABLE,
    Answer,
    Endpoint,
    LanguageModel,
)
from trinity_operators.row_answer import RowAnswer

PROMPT = """Question:
{question}

Response:
{response}

How good is the response? Answer with a JSON object: {{"rationale": "<one sentence>", "score": <number>}},
where {low} is the worst score and {high} the best."""

RUBRIC_PROMPT = """Question:
{question}

Response:
{response}

Score the response by each of these criteria, where {low} is the worst score and {high} the best:
{criteria}

Answer with a JSON object that has the name of each criterion with its score as a number, and "rationale" with
one sentence."""

_COLUMNS = {"question": "messages", "response": "response_text"}
"""What a field of a prompt is made of, where it is not the column of that name."""
_NUMBER = r"[-+]?\d+(?:\.\d+)?"


class ScoreArgs(BaseModel):
    """The arguments of every operator that asks a language model about each row."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    base_url: str | None = None
    prompt: str | None = None
    """None is the operator's own."""
    scale: tuple[float, float] = (0.0, 10.0)
    score: Annotated[str, Field(min_length=1)]
    """The name of the score."""
    max_tokens: Annotated[int, Field(gt=0)] = 256
    temperature: Annotated[float, Field(ge=0)] = 0.0
    max_in_flight: Annotated[int, Field(gt=0)] = 64
    max_retries: Annotated[int, Field(ge=0)] = 5
    timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds for one request."""


class JudgeScoreArgs(ScoreArgs):
    score: Annotated[str, Field(min_length=1)] = "judge_score"


class Criterion(BaseModel):
    """One line of a rubric."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$")]
    """Part of the name of its score."""
    asks: str
    """What is scored, in a sentence."""
    weight: Annotated[float, Field(gt=0)] = 1.0

    def __str__(self) -> str:
        """As the prompt has it."""
        return f"- {self.name}: {self.asks}"


class RubricScoreArgs(ScoreArgs):
    score: Annotated[str, Field(min_length=1)] = "rubric_score"
    criteria: Annotated[list[Criterion], Field(min_length=1)]
    one_by_one: bool = False
    """A question for each criterion, in place of one with all of them."""


class LanguageModelScore(AsyncMapper):
    """Shared by the operators that ask a language model about each row."""

    default_prompt = PROMPT
    own_fields: tuple[str, ...] = ("low", "high")
    """Fields of the prompt that are no columns."""

    def __init__(self, args: ScoreArgs) -> None:
        if not args.scale[0] < args.scale[1]:
            raise OperatorError(
                f"scale is {list(args.scale)}; the lowest score comes first, then the highest"
            )
        url = args.base_url or ("" if args.model == ROLLOUT_MODEL else os.environ.get(URL_VARIABLE, ""))
        self.args, self.prompt = args, args.prompt or self.default_prompt
        names = {name for _, name, _, _ in Formatter().parse(self.prompt) if name is not None}
        self._fields = sorted(names - set(self.own_fields))
        self.reads = tuple(_COLUMNS.get(name, name) for name in self._fields)
        self.writes = (args.score,)
        self.model, self.max_in_flight = args.model, args.max_in_flight
        self.row_timeout = (args.timeout + LONGEST_PAUSE_SECONDS) * (args.max_retries + 1)
        self._endpoint: LanguageModel | None = None
        if url:
            self._endpoint = Endpoint(
                args.model,
                url,
                max_in_flight=args.max_in_flight,
                max_retries=args.max_retries,
                timeout=args.timeout,
            )

    def asks_model_of(self, names: Collection[str]) -> bool:
        return not self.args.base_url and super().asks_model_of(names)

    def connect_models(self, models: Mapping[str, LanguageModel]) -> None:
        if self.asks_model_of(models):
            self._endpoint = models[self.model]

    def replace_model(self, by: Callable[[LanguageModel], LanguageModel]) -> None:
        """Asks what `by` makes of the model, where it has an address."""
        if self._endpoint is not None:
            self._endpoint = by(self._endpoint)

    def check_model(self, names: Collection[str]) -> None:
        if self._endpoint is None and self.model not in names:
            of_the_run = f"; the models of the run are {', '.join(names)}" if names else ""
            raise OperatorError(
                f"there is no address of model {self.model!r}; set base_url, or {URL_VARIABLE}{of_the_run}"
                f"{did_you_mean(self.model, names)}"
            )

    @property
    def language_model(self) -> LanguageModel:
        """Raises OperatorError where it is the run's and there is no run."""
        self.check_model(())
        assert self._endpoint is not None
        return self._endpoint

    async def start(self) -> None:
        await self.language_model.start()

    async def stop(self) -> None:
        if self._endpoint is not None:
            await self._endpoint.stop()

    async def ask(self, row: Row, **own_fields: Any) -> Answer:
        """The model's answer to the prompt about this row."""
        values = {name: _field(name, row) for name in self._fields}
        low, high = (f"{end:g}" for end in self.args.scale)
        content = self.prompt.format(**values, low=low, high=high, **own_fields)
        return await self.language_model.ask(
            [{"role": "user", "content": content}],
            max_tokens=self.args.max_tokens,
            temperature=self.args.temperature,
        )

    def check_scale(self, score: float, text: str) -> float:
        """The score; ValueError where it is not on the scale."""
        low, high = self.args.scale
        if not low <= score <= high:
            raise ValueError(f"the score {score:g} is not from {low:g} to {high:g}: {text[:80]!r}")
        return score


class JudgeScore(LanguageModelScore):
    """The score that a language model gives each response, and its rationale as the reason."""

    name = "judge_score"
    writes: tuple[str, ...] = ("<score>",)

    def __init__(self, args: JudgeScoreArgs) -> None:
        super().__init__(args)

    async def map_row(self, row: Row) -> RowAnswer:
        answer = await self.ask(row)
        score, rationale = score_of(answer.text)
        return RowAnswer(self.check_scale(score, answer.text), rationale)


class RubricScore(LanguageModelScore):
    """The scores that a language model gives each response by several criteria, and their weighted mean."""

    name = "rubric_score"
    writes: tuple[str, ...] = ("<score>", "<score>_<name of a criterion>")
    default_prompt = RUBRIC_PROMPT
    own_fields = ("low", "high", "criteria")

    def __init__(self, args: RubricScoreArgs) -> None:
        super().__init__(args)
        self.criteria, self.score = args.criteria, args.score
        names = [criterion.name for criterion in self.criteria]
        if len(set(names)) < len(names):
            raise OperatorError(f"criteria have the names {', '.join(names)}; each may be there once")
        self.questions = [[each] for each in self.criteria] if args.one_by_one else [self.criteria]
        self.writes = (args.score, *(f"{args.score}_{name}" for name in names))

    async def map_row(self, row: Row) -> RowAnswer:
        asked = [self.ask(row, criteria="\n".join(map(str, criteria))) for criteria in self.questions]
        # all are waited for, so that what each cost is counted
        replies = await asyncio.gather(*asked, return_exceptions=True)
        answers: list[Answer] = []
        for reply in replies:
            if isinstance(reply, BaseException):
                raise reply
            answers.append(reply)
        scores: dict[str, float] = {}
        rationales: list[str] = []
        for criteria, answer in zip(self.questions, answers, strict=True):
            numbers, rationale = scores_of(answer.text, [criterion.name for criterion in criteria])
            scores |= {name: self.check_scale(number, answer.text) for name, number in numbers.items()}
            rationales.append(rationale)
        weights = sum(criterion.weight for criterion in self.criteria)
        mean = sum(criterion.weight * scores[criterion.name] for criterion in self.criteria) / weights
        return RowAnswer(
            {self.score: mean} | {f"{self.score}_{name}": score for name, score in scores.items()},
            " ".join(filter(None, rationales)),
        )


def score_of(text: str) -> tuple[float, str]:
    """The score and the rationale of an answer: of its JSON object, of `score: 7`, or a number alone.

    Raises ValueError where there is none.
    """
    if "{" in text:
        scores, rationale = scores_of(text, ["score"])
        return scores["score"], rationale
    named = re.findall(rf"(?i)\bscore\b\W{{0,8}}({_NUMBER})", text)
    number = named[-1] if named else text.strip()
    if not re.fullmatch(_NUMBER, number):
        wanted = f"{_form(['score'])}, a line `Score: <number>`, or a number alone"
        raise ValueError(f"there is no score in the answer {text[:80]!r}; wanted {wanted}")
    return float(number), "" if number == text.strip() else text.strip()


def scores_of(text: str, names: Sequence[str]) -> tuple[dict[str, float], str]:
    """The scores of those names in the JSON object of an answer, and its rationale.

    Raises ValueError, with the form that is wanted, where there is none.
    """
    try:
        values = json_object(text)
        scores = {name: _number(values, name, text) for name in names}
    except ValueError as error:
        raise ValueError(f"{error}; wanted {_form(names)}") from error
    return scores, str(values.get("rationale", ""))


def _form(names: Sequence[str]) -> str:
    scores = ", ".join(f'"{name}": <number>' for name in names)
    return f'{{{scores}, "rationale": "<text>"}}'


def json_object(text: str) -> Mapping[str, Any]:
    """The last JSON object of a text that has no other within it; ValueError where there is none."""
    for candidate in reversed(re.findall(r"\{[^{}]*\}", text)):
        try:
            values = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(values, dict):
            return values
    raise ValueError(f"there is no JSON object in the answer {text[:80]!r}")


def _number(values: Mapping[str, Any], name: str, text: str) -> float:
    value = values.get(name)
    if isinstance(value, str) and re.fullmatch(_NUMBER, value.strip()):
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"the answer has no number {name!r}: {text[:80]!r}")
    return float(value)


def _field(name: str, row: Row) -> object:
    """A field of the prompt: `question` is the last message of the user."""
    value = row[_COLUMNS.get(name, name)]
    if name != "question":
        return value
    contents = [message["content"] for message in value or () if message["role"] == "user"]
    return contents[-1] if contents else ""
