"""A branch goes on as the run it was taken from: the same steps, and at their end the same weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import pytest

from trinity_data.query.audit import audit
from trinity_data.store.branch import branch_run
from trinity_data.store.snapshot import at_step

FILE = Path(__file__).with_name("fake.yaml")
LAST_STEP = 8


def trained(job: Path) -> dict[str, str]:
    """Hashes of weights and optimiser at the end."""
    files = (job / f"global_step_{LAST_STEP}" / "actor").glob("*.safetensors")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.slow
def test_a_branch_that_goes_on_ends_at_the_weights_of_its_run(
    run_pipeline: Callable[..., Path], tmp_path: Path
) -> None:
    whole = run_pipeline(FILE, tmp_path, "whole")
    before = trained(whole)
    branch = branch_run(whole, "branch", at_step(whole / "store", 5))
    assert branch.checkpoints == (2, 4)
    assert run_pipeline(FILE, tmp_path, "branch") == branch.folder
    assert len(before) >= 2 and trained(branch.folder) == before
    assert trained(whole) == before
    for job in (whole, branch.folder):
        assert audit(job).problems == []
