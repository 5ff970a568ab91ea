"""The limit that ends code of other people's, such as a chat template."""

from __future__ import annotations

import contextlib
import time

import pytest

from trinity_data.deadline import deadline


def test_a_deadline_leaves_code_alone_that_ends_in_time() -> None:
    for _ in range(200):
        with deadline(30):
            pass
    with deadline(30), pytest.raises(KeyError):
        {}["a"]


def test_a_deadline_interrupts_code_that_catches_every_exception() -> None:
    def stubborn() -> None:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.001)

    with pytest.raises(TimeoutError, match=r"no end after 0.2 s"), deadline(0.2):
        stubborn()
