"""The window of rows that may be read, without a stream."""

from __future__ import annotations

import subprocess
import sys
import threading

from trinity_operators.task_window import Window


def test_rows_are_handed_out_in_order_up_to_the_window_and_once_more() -> None:
    window = Window(0, 1000, 64, 100)
    # 64 is less than 100 behind row 0, 128 is not
    assert [window.take(), window.take()] == [(0, 64), (64, 128)]
    window.acknowledge(28)
    waiting = threading.Thread(target=window.take)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    window.acknowledge(29)
    waiting.join(10)
    assert not waiting.is_alive()
    assert window.next_row == 192


def test_more_chunks_are_taken_at_once_while_every_worker_finds_some() -> None:
    window = Window(0, 10_000, 64, 2048, num_workers=2)
    # 1, 2 and 4 of a quarter of what is free; then a quarter of 2048 - 448 is 6 chunks
    assert [window.take() for _ in range(4)] == [(0, 64), (64, 192), (192, 448), (448, 832)]


def test_rows_that_were_read_elsewhere_and_not_taken_yet_are_in_the_window_too() -> None:
    window = Window(128, 1000, 64, 128, acknowledged=1)
    # 128 is less than 128 behind row 1, 192 is not
    assert window.take() == (128, 192)
    waiting = threading.Thread(target=window.take, daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    window.close()


def test_the_last_chunk_is_shorter_and_nothing_comes_behind_it() -> None:
    window = Window(64, 130, 64, 1000)
    assert [window.take(), window.take(), window.take()] == [(64, 128), (128, 130), None]


def test_a_closed_window_hands_out_nothing_and_ends_the_wait() -> None:
    window = Window(0, 1000, 64, 64)
    window.take()
    results = list[object]()
    waiting = threading.Thread(target=lambda: results.append(window.take()))
    waiting.start()
    window.close()
    waiting.join(10)
    assert results == [None]
    assert window.take() is None


def test_the_actor_of_the_window_loads_neither_arrow_nor_the_configuration() -> None:
    code = (
        "import sys, trinity_operators.task_window;"
        "print(sorted({'numpy', 'pyarrow', 'pydantic', 'trinity_data.config'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
