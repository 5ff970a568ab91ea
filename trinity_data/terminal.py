"""Text of models, tasks and other people's stores on its way to a terminal:
control characters are shown, not sent.

A sequence that begins with ESC could set the title or the clipboard, hide lines, or write over them.
"""

from __future__ import annotations

import logging
import re
import sys
from typing import TextIO

# all of C0 but tab and newline, DEL, C1, marks that turn the direction of text around,
# and halves of characters
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def visible(text: str) -> str:
    r"""The text with each control character as Python writes it, such as `\x1b`; tabs and newlines stay."""
    return _CONTROLS.sub(lambda match: match.group().encode("unicode_escape").decode(), text)


def visible_json(text: str) -> str:
    """JSON that says the same without control characters."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def say(text: object = "", *, to: TextIO | None = None) -> None:
    """Prints for a person; to standard output by default."""
    print(visible(str(text)), file=to or sys.stdout)


class VisibleFormatter(logging.Formatter):
    """Lines of a log, which end in a terminal sooner or later."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))
