"""Rows that show something beside their text: refused, for only text towers are loaded.

Without this a row's picture would be dropped in silence, and the question asked without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qerl.errors import QerlError

KINDS = ("image", "audio", "video")
_COLUMNS = {f"{kind}{end}" for kind in KINDS for end in ("", "s", "_url", "_path")}


def refuse_images(where: str, row: Mapping[str, Any]) -> None:
    """Raise QerlError for a row with a picture, sound or video in a column or in its messages.

    where: what the message calls the row. A column counts by its usual names and when it is
    filled; a message's part by its type.
    """
    found = next((name for name in row if name in _COLUMNS and _filled(row[name])), None)
    if found is None:
        found = next((f"message part {kind!r}" for kind in _parts(row.get("prompt"))), None)
    else:
        found = f"column {found!r}"
    if found is not None:
        raise QerlError(
            f"{where}: it has more than text ({found}), and only the text tower of a model is "
            "loaded; leave such rows out, or drop the column if the question stands without it"
        )


def _filled(value: Any) -> bool:
    """Whether there is anything; without asking an array or a picture for its truth."""
    return value is not None and not (isinstance(value, str | list | tuple | dict) and not value)


def _parts(prompt: Any) -> list[str]:
    """Types of the parts of messages' contents that are no text."""
    messages = prompt if isinstance(prompt, list | tuple) else []
    contents = [m.get("content") for m in messages if isinstance(m, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    types = [str(part.get("type", "")) for part in parts if isinstance(part, Mapping)]
    return [kind for kind in types if kind.startswith(KINDS) or kind == "input_image"]
