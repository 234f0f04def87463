"""A machine's numbers as a file.

Knows: JSON. Does not know: how the numbers were taken.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvbook.accounting.hardware import Hardware
from kvbook.measure.steps import StepTiming

FORMAT = 1  # of the file; a reader refuses any other


@dataclass(frozen=True)
class Record:
    """Peaks of one machine, and steps of a model that were timed on it."""

    hardware: Hardware
    model: str  # what the steps are of
    steps: tuple[StepTiming, ...]


def save_record(
    path: str | Path, hardware: Hardware, model: str = "", steps: Sequence[StepTiming] = ()
) -> None:
    """Write one JSON file; an existing one is replaced."""
    content = {
        "format": FORMAT,
        "hardware": asdict(hardware),
        "model": model,
        "steps": [asdict(step) for step in steps],
    }
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_record(path: str | Path) -> Record:
    """Read what ``save_record`` wrote. ``ValueError`` if the file is something else."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {FORMAT}")
        steps = [{**step, "quartiles": tuple(step["quartiles"])} for step in content["steps"]]
        return Record(
            Hardware(**content["hardware"]),
            content["model"],
            tuple(StepTiming(**step) for step in steps),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is no record of a machine ({type(error).__name__}: {error}); write one with "
            "python -m kvbook.measure --out FILE.json"
        ) from error
