"""What an export may be, for the command line, which loads nothing heavy to know it."""

from __future__ import annotations

from enum import StrEnum


class Kind(StrEnum):
    SFT = "sft"
    DPO = "dpo"
    KTO = "kto"
    RAW = "raw"


class Format(StrEnum):
    PARQUET = "parquet"
    JSONL = "jsonl"
