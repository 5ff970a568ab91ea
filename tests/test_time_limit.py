"""The limit that ends code of other people's, such as a chat template."""

from __future__ import annotations

import contextlib
import time

import pytest

from trinity_data.time_limit import time_limit


def test_a_time_limit_leaves_code_alone_that_ends_in_time() -> None:
    for _ in range(200):
        with time_limit(30):
            pass
    with time_limit(30), pytest.raises(KeyError):
        {}["a"]


def test_a_time_limit_interrupts_code_that_catches_every_exception() -> None:
    def stubborn() -> None:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.001)

    with pytest.raises(TimeoutError, match=r"no end after 0.2 s"), time_limit(0.2):
        stubborn()
