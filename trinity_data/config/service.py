"""The section `service`: read, and without effect."""

from __future__ import annotations

from pydantic import Field

from trinity_data.config.base import Section


class DataJuicerServiceConfig(Section):
    server_url: str | None = None
    """Address of a Data-Juicer service."""
    auto_start: bool = False
    """Start one."""
    port: int | None = Field(default=None, ge=1, le=65535)
    """Its port."""


class ServiceConfig(Section):
    data_juicer: DataJuicerServiceConfig | None = None
    """Read for the documents' sake: Data-Juicer's operators run in process and no service is asked."""
