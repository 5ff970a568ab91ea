"""The section `log`: what the files under `log/` hold."""

from __future__ import annotations

from typing import Literal

from trinity_data.config.base import Section


class LogConfig(Section):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """The least important lines of the files under `log/`; a terminal shows what the run says of itself."""
    group_by_node: bool = False
    """Files under `log/<address of the node>/`."""
