"""Values that are kept out of files and messages:
those of keys and environment variables named like secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any

from trinity_data.config.expansion import environment_names

MASK = "********"
# `prompt_key` names a column and `max_tokens` a number: a key is a secret only by the word before it
_KEY = re.compile(
    r"(^|[_.\-])((api|access|secret|private|account|signing|encryption|auth)[_\-]?key|apikey|token|secret|password"
    r"|passwd|passphrase|credentials?|authorization)$",
    re.IGNORECASE,
)
_VARIABLE = re.compile(
    r"(^|_)(KEY|APIKEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)$", re.IGNORECASE
)
# of a shorter one a message would be made unreadable, and little kept
_MIN_LENGTH = 4


def is_secret_key(name: object) -> bool:
    """Whether a key of a pipeline file is named like a secret."""
    return isinstance(name, str) and _KEY.search(name) is not None


def secrets_of_the_environment(texts: Iterable[str]) -> frozenset[str]:
    """Values of the environment variables named like secrets that these interpolations read."""
    names = (name for text in texts for name in environment_names(text) if _VARIABLE.search(name))
    return frozenset(value for name in names if len(value := os.environ.get(name, "")) >= _MIN_LENGTH)


def secrets_under_keys(data: Any, *, below_a_secret: bool = False) -> Iterator[str]:
    """Texts of the file that stand at a key named like a secret."""
    if isinstance(data, dict):
        for key, value in data.items():
            yield from secrets_under_keys(value, below_a_secret=below_a_secret or is_secret_key(key))
    elif isinstance(data, list):
        for value in data:
            yield from secrets_under_keys(value, below_a_secret=below_a_secret)
    elif below_a_secret and isinstance(data, str) and len(data) >= _MIN_LENGTH and "${" not in data:
        yield data


def masked(text: str, secrets: Collection[str]) -> str:
    """The text without them; the longest first, so that none is left in part."""
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, MASK)
    return text


def without_secrets(data: Any, secrets: Collection[str]) -> Any:
    """Plain data as it may be written: every value at a secret key,
    and every secret inside a text, is masked.
    """
    if isinstance(data, dict):
        return {
            key: MASK if is_secret_key(key) and value is not None else without_secrets(value, secrets)
            for key, value in data.items()
        }
    if isinstance(data, list):
        return [without_secrets(value, secrets) for value in data]
    return masked(data, secrets) if isinstance(data, str) else data
