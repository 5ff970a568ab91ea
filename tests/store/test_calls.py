"""Who calls the process of a store hears that it has ended, also where its machine has."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trinity_data.errors import StoreError
from trinity_data.store.calls import StoreCalls
from trinity_data.store.service import StoreActor


def test_a_store_whose_machine_is_lost_has_ended(ray_session: None, tmp_path: Path) -> None:
    lost = NodeAffinitySchedulingStrategy("ab" * 28, soft=False)
    actor = ray.remote(StoreActor).options(num_cpus=0, scheduling_strategy=lost).remote(tmp_path)
    with pytest.raises(StoreError, match="ended more than"):
        StoreCalls(actor, tmp_path).value("process_id")
