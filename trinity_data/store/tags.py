"""Names that people give to versions of a store: numbers of steps, and tags, which are files beside it."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

from trinity_data.atomic import fsync_path, new_file
from trinity_data.errors import StoreError, did_you_mean
from trinity_data.store.snapshot import StoreVersion, at_step, parse_version

TAGS_FOLDER = "tags"
_TAG = re.compile(r"[A-Za-z_][\w.+=-]*")


def named_version(root: Path, name: str | int) -> StoreVersion:
    """The end of the step, or the tag, that a person names."""
    if str(name).isdigit():
        return at_step(root, int(name))
    versions = tags(root)
    if name not in versions:
        raise StoreError(
            f"{root} has no step or tag {name!r}; tags: "
            f"{', '.join(versions) or 'none'}{did_you_mean(str(name), versions)}"
        )
    return versions[str(name)]


def tag(root: Path, name: str, version: StoreVersion) -> None:
    """Gives a version a name, for good. May be done while a run writes."""
    if not _TAG.fullmatch(name):
        raise StoreError(
            f"a tag begins with a letter and has letters, digits, '_', '-', '.' only; found {name!r}"
        )
    folder = root / TAGS_FOLDER
    if folder.is_symlink():
        raise StoreError(f"{folder} is a link; a store does not write elsewhere")
    folder.mkdir(exist_ok=True)
    fsync_path(root)
    try:
        with new_file(folder / f"{name}.json") as partial:
            partial.write_text(json.dumps(asdict(version), indent=1, sort_keys=True))
    except FileExistsError:
        raise StoreError(f"{root} has a tag {name!r} already; choose another name") from None


def tags(root: Path) -> dict[str, StoreVersion]:
    """Tags by name."""
    files = sorted((root / TAGS_FOLDER).glob("[!.]*.json"))
    return {file.stem: parse_version(json.loads(file.read_text()), file) for file in files}
