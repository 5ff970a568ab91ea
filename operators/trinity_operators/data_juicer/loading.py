"""Data-Juicer's operators, imported so that nothing is ever installed or fetched behind the user's back."""

from __future__ import annotations

import importlib
import logging
import os
from functools import lru_cache
from typing import Any


@lru_cache(maxsize=1)
def data_juicer_ops() -> Any:
    """The module `data_juicer.ops`, which from then on can install nothing and logs nothing.

    Data-Juicer would install what an operator misses with uv, then with pip. Child processes inherit the
    refusal.
    """
    from loguru import logger

    def refuse_install(package_spec: str, pip_args: object = None) -> bool:
        raise ImportError(package_spec)

    os.environ.update(UV_OFFLINE="1", PIP_NO_INDEX="1")
    logger.disable("data_juicer")
    # the client of OpenAI's package logs a line for every request
    for client in ("httpx", "httpx2", "openai"):
        logging.getLogger(client).setLevel(logging.WARNING)
    ops = importlib.import_module("data_juicer.ops")
    lazy_loader: Any = importlib.import_module("data_juicer.utils.lazy_loader")
    lazy_loader.LazyLoader._install_package = staticmethod(refuse_install)
    return ops


def family_of(kind: type) -> str:
    """`Filter`, `Mapper`, `Deduplicator`, … after its base class."""
    ops = data_juicer_ops()
    families = ("Filter", "Mapper", "Deduplicator", "Selector", "Grouper", "Aggregator", "Pipeline")
    return next(name for name in families if issubclass(kind, getattr(ops, name)))
