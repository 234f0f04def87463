"""Reading a JSON file that somebody else wrote.

Knows: what makes such a file unreadable, too large or ambiguous. Does not know: what any field is
for.
"""

import json
import math
from pathlib import Path
from typing import Any

from kvbook.errors import WeightFileError

MOST_BYTES = 64 * 1024**2  # the index of a model of 100,000 tensors has some 10 MB


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises ``WeightFileError`` for a file that cannot be read, is larger than 64 MiB, is not JSON
    in UTF-8, is nested too deep, is no object, names a field twice or holds NaN or infinity, which
    JSON does not have.
    """
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ValueError(f"it has {size:,} bytes, more than {MOST_BYTES:,}")
        found = json.loads(
            path.read_text(encoding="utf-8"),
            object_pairs_hook=_once_each,
            parse_float=_finite,
            parse_constant=_finite,
        )
    except (OSError, ValueError, RecursionError) as error:
        raise WeightFileError(f"{path} is not JSON ({error}). Fetch it again.") from error
    if not isinstance(found, dict):
        raise WeightFileError(
            f"{path} holds {found!r:.80}, not an object with named fields. Fetch it again."
        )
    return found


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            raise ValueError(f"the field {name!r:.80} is there twice")
        fields[name] = value
    return fields


def _finite(text: str) -> float:
    """A number; not NaN or Infinity, which JSON does not have, nor 1e999, which reads as one."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text:.80} is no finite number")
    return number
