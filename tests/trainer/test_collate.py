from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from trinity_trainer.collate import EMPTY_ROWS, BatchCollator, without_sampling

CPU = torch.device("cpu")


@pytest.fixture
def table() -> pa.Table:
    """Two sampled rows, the first with a token that is not trained, and one that nobody sampled."""
    return pa.table(
        {
            "token_ids": pa.array(
                [[10, 11, 12, 13, 14], [20, 21, 22], [30, 31, 32, 33]], pa.list_(pa.int32())
            ),
            "logprobs": pa.array([[-1.0, -2.0, -3.0], [-4.0], []], pa.list_(pa.float32())),
            "action_mask": pa.array([[True, False, True], [True], [True, True]], pa.list_(pa.bool_())),
            "prompt_length": pa.array([2, 2, 2], pa.int32()),
            "advantage": pa.array([0.5, -1.5, None], pa.float64()),
            "temperature": pa.array([0.7, 0.0, None], pa.float32()),
        }
    )


def test_rows_are_padded_and_each_column_lies_beside_its_target(table: pa.Table) -> None:
    batch = BatchCollator(table).micro_batch([1, 0], CPU)
    assert batch.input_ids_BT.tolist() == [[20, 21, 22, 0], [10, 11, 12, 13]]
    assert batch.targets_BT.tolist() == [[21, 22, 0, 0], [11, 12, 13, 14]]
    assert batch.attention_mask_BT.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert batch.mask_BT.tolist() == [[0, 1, 0, 0], [0, 1, 0, 1]]
    assert batch.old_logprobs_BT.tolist() == [[0, -4, 0, 0], [0, -1, -2, -3]]
    assert batch.advantages_BT.tolist() == [[-1.5] * 4, [0.5] * 4]
    assert batch.has_logprobs_B.tolist() == [1, 1]


def test_advantages_of_tokens_take_the_place_of_the_rows(table: pa.Table) -> None:
    of_tokens = pa.array([[3.0, 4.0, 5.0], None, [6.0, 7.0]], pa.list_(pa.float32()))
    rows = BatchCollator(table.append_column("token_advantages", of_tokens))
    assert rows.num_without_advantage == 0
    batch = rows.micro_batch([0, 1, 2], CPU)
    # column t is of the token after column t; what stands before the response is not trained
    assert batch.advantages_BT.tolist() == [[0.5, 3, 4, 5], [-1.5] * 4, [0, 6, 7, 0]]
    none = table.append_column("token_advantages", pa.nulls(3, pa.list_(pa.float32())))
    assert BatchCollator(none).num_without_advantage == 1


def test_an_advantage_that_is_no_number_is_none(table: pa.Table) -> None:
    place = table.schema.get_field_index("advantage")
    rows = BatchCollator(table.set_column(place, "advantage", pa.array([0.5, float("nan"), None])))
    assert rows.num_without_advantage == 2
    assert rows.advantages.tolist() == [0.5, 0, 0]


def test_greedy_and_unsampled_rows_are_trained_at_temperature_one(table: pa.Table) -> None:
    rows = BatchCollator(table)
    assert rows.micro_batch([0, 1, 2], CPU).temperatures_B.tolist() == pytest.approx([0.7, 1.0, 1.0])


def test_a_supervised_loss_sees_nothing_of_the_sampling(table: pa.Table) -> None:
    cut = table.append_column(
        "kept_tokens", pa.array([[[12], None, [14]], None, None], pa.list_(pa.list_(pa.int32())))
    )
    assert BatchCollator(cut).micro_batch([0, 1, 2], CPU).kept is not None
    batch = BatchCollator(without_sampling(cut)).micro_batch([0, 1, 2], CPU)
    assert batch.kept is None
    assert batch.temperatures_B.tolist() == [1, 1, 1]
    assert batch.has_logprobs_B.tolist() == [0, 0, 0]


def test_a_row_that_nobody_sampled_says_so_and_has_no_advantage(table: pa.Table) -> None:
    batch = BatchCollator(table).micro_batch([2], CPU)
    assert batch.has_logprobs_B.tolist() == [0]
    assert batch.old_logprobs_BT.tolist() == [[0, 0, 0]]
    assert batch.advantages_BT.tolist() == [[0, 0, 0]]


def test_trained_tokens_are_those_of_the_mask(table: pa.Table) -> None:
    assert BatchCollator(table).trained_tokens == [2, 1, 2]


def test_values_come_back_as_they_lie_in_the_response(table: pa.Table) -> None:
    rows = BatchCollator(table)
    batch = rows.micro_batch([1, 0], CPU)
    values = torch.arange(8.0).reshape(2, 4)
    assert [part.tolist() for part in rows.response_part(batch, values)] == [[1.0], [5.0, 6.0, 7.0]]


def test_an_empty_micro_batch_can_be_run_and_trains_nothing(table: pa.Table) -> None:
    batch = BatchCollator(table).micro_batch([], CPU)
    assert batch.input_ids_BT.shape == (EMPTY_ROWS, 1)
    assert batch.mask_BT.sum() == 0 and batch.attention_mask_BT.min() == 1
    assert batch.rows == [] and batch.prompt_lengths == []


def test_a_slice_of_many_chunks_reads_like_the_whole(table: pa.Table) -> None:
    chunked = pa.concat_tables([table, table, table]).slice(2, 4)
    rows = BatchCollator(chunked)
    assert [row.tolist() for row in rows.tokens] == [
        [30, 31, 32, 33], [10, 11, 12, 13, 14], [20, 21, 22], [30, 31, 32, 33],
    ]  # fmt: skip
    assert rows.lengths == [4, 5, 3, 4]
    assert np.array_equal(rows.logprobs[1], np.array([-1, -2, -3], np.float32))
