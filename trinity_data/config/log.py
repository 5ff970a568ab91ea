"""The section `log`: what `log/run.log` holds."""

from __future__ import annotations

from typing import Literal

from trinity_data.config.base import Section


class LogConfig(Section):
    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    """The least important lines of `log/run.log`; a terminal shows what the run says of itself."""
