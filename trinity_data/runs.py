"""Job folders by the names that people give them.

Nothing heavy is imported: a command asks here before it does anything.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trinity_data.errors import StoreError, did_you_mean

LEDGER = Path("store") / "ledger.sqlite"


def default_root() -> Path:
    """Where runs lie unless the pipeline file says otherwise."""
    return Path(os.environ.get("TRINITY_CHECKPOINT_ROOT_DIR", "checkpoints"))


def find_runs(root: Path) -> list[Path]:
    """Job folders under `root`, newest last."""
    folders = [ledger.parent.parent for ledger in root.glob(f"*/*/{LEDGER}")]
    return sorted(folders, key=lambda folder: (folder / LEDGER).stat().st_mtime)


def is_run(name: str | Path) -> bool:
    """Whether `resolve_run` would find it."""
    return _find_run(name) is not None


def resolve_run(name: str | Path) -> Path:
    """The job folder that is meant by a path, or by project/name under the checkpoint root.

    Raises StoreError with the nearest name.
    """
    folder = _find_run(name)
    if folder is None:
        root = default_root()
        names = [str(folder.relative_to(root)) for folder in find_runs(root)]
        raise StoreError(
            f"no run {str(name)!r}; known under {root}: "
            f"{', '.join(names) or 'none'}{did_you_mean(str(name), names)}"
        )
    return folder


def resolve_runs(names: Sequence[str | Path]) -> list[Path]:
    """Several of them, in order."""
    return [resolve_run(name) for name in names]


def _find_run(name: str | Path) -> Path | None:
    try:
        return next((f for f in (Path(name), default_root() / name) if (f / LEDGER).exists()), None)
    except OSError:  # a query is no path: too long a name, most often
        return None


def distinct_names(runs: Sequence[Path]) -> dict[str, Path]:
    """Runs by folder name; parent folders are added until the names differ."""
    resolved = [run.resolve() for run in runs]
    if len(set(resolved)) != len(resolved):
        raise StoreError("a run was named twice")
    for depth in range(1, 1 + max(len(run.parts) for run in resolved)):
        names = ["/".join(run.parts[-depth:]) for run in resolved]
        if len(set(names)) == len(names):
            break
    return dict(zip(names, resolved, strict=True))
