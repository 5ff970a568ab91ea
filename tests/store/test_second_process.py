"""A second process that opens the store becomes its writer.

The first one is told so and writes nothing more.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from trinity_data.errors import StoreLockedError
from trinity_data.query.audit import audit
from trinity_data.store.store import Store
from trinity_data.store.types import Commit

PROGRAM = """
import sys
from pathlib import Path
from trinity_data.store.types import Commit
from trinity_data.store.store import Store
store = Store.create_or_open(Path(sys.argv[1]))
store.commit(Commit(progress={"second": 2}))
store.close()
"""


def test_a_writing_process_fences_the_one_before_it(store: Store, group) -> None:
    store.commit(Commit(tables={"experiences": group(1)}))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(store.root)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    message = (
        r"another process has become the writer of this store \(epoch 2, ours is 1\); only one run may write"
    )
    with pytest.raises(StoreLockedError, match=message):
        store.commit(Commit(tables={"experiences": group(2)}))
    assert store.progress("second") == 2 and store.table("experiences").num_rows == 4
    assert audit(store.root).problems == []
