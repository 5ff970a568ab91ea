"""How often what ended is started again."""

from __future__ import annotations

from trinity_data.restarts import RestartLimit


def test_restarts_wait_longer_each_time_until_there_were_too_many_within_an_hour() -> None:
    now = 0.0
    limit = RestartLimit(4, now=lambda: now)
    assert [limit.next_delay() for _ in range(5)] == [0.0, 1.0, 2.0, 4.0, None]
    now = 3599.0
    assert limit.next_delay() is None
    now = 3600.0
    assert [limit.next_delay() for _ in range(2)] == [0.0, 1.0]


def test_no_delay_is_longer_than_a_minute() -> None:
    limit = RestartLimit(20, now=lambda: 0.0)
    assert [limit.next_delay() for _ in range(20)][6:10] == [32.0, 60.0, 60.0, 60.0]


def test_a_limit_of_none_allows_no_restart() -> None:
    assert RestartLimit(0).next_delay() is None
