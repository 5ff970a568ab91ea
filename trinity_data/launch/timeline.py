"""What Ray's workers did, and when, as a file for chrome://tracing or Perfetto."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import ray
from ray.exceptions import RaySystemError, RpcError

from trinity_data.atomic import replace_text

log = logging.getLogger(__name__)


def write_timeline(job_dir: Path) -> None:
    """`monitor/timeline.json`, of everything since Ray was started; a Ray that has ended costs a warning."""
    file = job_dir / "monitor" / "timeline.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        replace_text(file, json.dumps(ray.timeline()))
    except (RaySystemError, RpcError, ConnectionError) as error:
        log.warning("%s is not written: %s", file, error)
