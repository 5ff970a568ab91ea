"""Each step is explored to its end once, by the explorer that has claimed it last."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity_data.claims import Claims
from trinity_data.errors import StoreError
from trinity_data.store.types import Place

ONE, TWO, AGAIN = Place("explorer:one", 1), Place("explorer:two", 1), Place("explorer:one", 2)


def test_steps_pass_to_who_asks_first_and_are_explored_up_to_the_first_that_is_not_whole() -> None:
    claims = Claims(1).join(ONE).join(TWO).begin(1, ONE).begin(2, TWO).begin(3, ONE)
    assert (claims.next_step, claims.explored) == (4, 0)
    claims = claims.finish(2, TWO).finish(3, ONE)
    assert claims.explored == 0
    assert claims.finish(1, ONE).explored == 3
    assert Claims.load(json.loads(json.dumps(claims.dump()))) == claims


def test_what_an_explorer_has_left_passes_to_another_and_not_back() -> None:
    gone = {ONE}.__contains__
    claims = Claims(1).begin(1, TWO).begin(2, ONE).begin(3, ONE)
    assert claims.left(gone, set()) == 2 and claims.left({AGAIN}.__contains__, set()) is None
    with pytest.raises(StoreError, match="step 1 cannot be taken over"):
        claims.take_over(1, AGAIN, gone)
    claims = claims.take_over(2, TWO, gone)
    assert claims.left(gone, set()) == 3
    with pytest.raises(StoreError, match="step 2 is not explorer:one's"):
        claims.finish(2, ONE)


def test_who_explores_is_counted_once_a_name_and_not_when_it_is_gone() -> None:
    claims = Claims(1).join(ONE).join(TWO).join(AGAIN)
    assert claims.exploring == {TWO, AGAIN}
    assert claims.others(TWO, {ONE}.__contains__) == {AGAIN}
    assert not claims.others(TWO, {AGAIN}.__contains__)
    assert not claims.leave(AGAIN).others(TWO, {ONE}.__contains__)


def test_a_stage_without_claims_has_begun_steps_that_are_nobodys() -> None:
    tried = [(step, "a") for step in (1, 2, 3, 4, 6, 6)]
    claims = Claims.of_record(explored=3, tried=tried)
    assert (claims.explored, claims.next_step, sorted(claims.open)) == (3, 7, [4, 6])
    assert claims.left(lambda place: place.name == "", {"a"}) == 4
    assert claims.take(6, {"a": 2, "b": 1}).num_taken == {"a": 8, "b": 1}
    assert Claims.of_record(explored=3, tried=[]).next_step == 4


def test_late_groups_pass_to_an_explorer_with_their_task_set() -> None:
    gone = {ONE}.__contains__
    claims = Claims(1).begin(1, ONE).finish(1, ONE).with_late(ONE, {"one": "a", "two": "b"})
    claims = claims.with_late(TWO, {"three": "a"})
    assert Claims.load(json.loads(json.dumps(claims.dump()))) == claims and claims.explored == 1
    assert claims.left_late(gone, {"a"}) == ["one"]
    claims = claims.take_over_late(["one"], TWO)
    assert {group: each.holder for group, each in claims.late.items()} == {
        "one": TWO, "two": ONE, "three": TWO,
    }  # fmt: skip
    assert set(claims.leave(TWO).late) == {"two"}
    record = Claims.of_record(explored=3, tried=[], late={"one": "a"})
    assert record.left_late(lambda place: place.name == "", {"a"}) == ["one"]


def test_a_step_that_was_left_waits_for_an_explorer_with_all_of_its_task_sets() -> None:
    gone = {ONE}.__contains__
    claims = (
        Claims(1).begin(1, ONE).take(1, {"a": 1, "b": 1}).begin(2, ONE).take(2, {"a": 2}).take(2, {"a": 1})
    )
    assert Claims.load(json.loads(json.dumps(claims.dump()))) == claims
    assert claims.left(gone, {"a"}) == 2 and claims.left(gone, {"b"}) is None
    assert claims.left(gone, {"a", "b", "c"}) == 1
    assert claims.finish(2, ONE).tasksets == {1: {"a", "b"}}


@given(st.lists(st.tuples(st.sampled_from(["claim", "finish", "die"]), st.integers(0, 2)), max_size=80))
def test_each_step_is_finished_once_and_none_is_passed_over(acts: list[tuple[str, int]]) -> None:
    claims, gone, whole = Claims(1), set[Place](), list[int]()
    places = [Place(f"explorer:{number}", 1) for number in range(3)]

    def claim(place: Place) -> None:
        nonlocal claims
        left = claims.left(gone.__contains__, set())
        if left is None:
            claims = claims.begin(claims.next_step, place)
        else:
            claims = claims.take_over(left, place, gone.__contains__)

    def finish(place: Place) -> None:
        nonlocal claims
        for step in [step for step, holder in claims.open.items() if holder == place][-1:]:
            claims = claims.finish(step, place)
            whole.append(step)

    for act, number in acts:
        if act == "die":
            gone.add(places[number])
            places[number] = Place(places[number].name, places[number].epoch + 1)
        else:
            (claim if act == "claim" else finish)(places[number])
        assert set(range(1, claims.explored + 1)) <= set(whole)
        assert claims.explored + 1 not in whole
    while claims.left(gone.__contains__, set()) is not None:
        claim(places[0])
    while claims.open:
        for place in places:
            finish(place)
    assert sorted(whole) == list(range(1, claims.next_step)) and claims.explored == claims.next_step - 1
