"""A machine's numbers as a file.

Knows: JSON, what a complete record holds, that no step is faster than its machine, where the
records that ship with kvbook lie. Does not know: how the numbers were taken.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvbook.accounting.formats import parse_format
from kvbook.accounting.hardware import Hardware
from kvbook.accounting.units import check_count
from kvbook.measure.steps import StepTiming
from kvbook.measure.timing import TooFastError, format_seconds
from kvbook.model.arguments import check_is

FORMAT = 1  # of the file; a reader refuses any other
SHIPPED = Path(__file__).parent / "records"
# A peak is the best of a few tries, not a law: a step that seems faster by so small a part is one
# that came as near to it. More than that is a mistake in operations, bytes or clock.
TOLERANCE = 0.05
FACTS = ("device", "device_type", "threads", "torch", "date")  # without these a rate says nothing


@dataclass(frozen=True)
class Record:
    """Peaks of one machine, and steps of a model that were timed on it."""

    hardware: Hardware
    model: str  # what the steps are of
    steps: tuple[StepTiming, ...]

    @property
    def title(self) -> str:
        """The machine in one line: its name, what kind of device it is, the date."""
        facts = self.hardware.provenance
        kind = facts["device_type"]
        if kind == "cpu":
            threads = facts["threads"]
            kind = f"CPU, {threads} thread" + ("s" if threads > 1 else "")
        return f"{self.hardware.name} ({kind}), {facts['date']}"


def save_record(
    path: str | Path, hardware: Hardware, model: str = "", steps: Sequence[StepTiming] = ()
) -> None:
    """Write one JSON file; an existing one is replaced.

    Raises ``ValueError`` for what ``load_record`` would refuse; nothing is written then.
    """
    check_is("hardware", hardware, Hardware)
    check_is("steps", steps, list, tuple)
    _check_machine(hardware, steps)
    if Path(path).is_dir():
        raise ValueError(f"path must name a file, got the folder {str(path)!r:.80}")
    if not isinstance(model, str):
        raise ValueError(f"model must be text that says what the steps are of, got {model!r:.80}")
    content = {
        "format": FORMAT,
        "hardware": asdict(hardware),
        "model": model,
        "steps": [asdict(step) for step in steps],
    }
    text = json.dumps(content, indent=1, allow_nan=False) + "\n"
    Path(path).write_text(text, encoding="utf-8")


def load_record(path: str | Path) -> Record:
    """Read what ``save_record`` wrote.

    ``ValueError`` if the file is something else, lacks a fact that a rate means nothing without,
    or holds a step that needs more bytes or operations per second than the record's own peaks,
    and more than ``TOLERANCE`` of the least time would explain.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, not {FORMAT}")
        hardware = Hardware(**content["hardware"])
        steps = tuple(_step(step) for step in content["steps"])
        _check_machine(hardware, steps)
        if not isinstance(content["model"], str):
            raise ValueError(f"model must be text, got {content['model']!r:.80}")
        return Record(hardware, content["model"], steps)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, OSError) as error:
        raise ValueError(
            f"{path} is no record of a machine ({type(error).__name__}: {error}); write one with "
            "python -m kvbook.measure --out FILE.json"
        ) from error


def load_records(folder: str | Path = SHIPPED) -> dict[str, Record]:
    """All records of a folder, by file name without ``.json``, in alphabetical order.

    Without a folder: those that ship with kvbook. A new file among them needs no other change.
    Raises ``ValueError`` if there are none, or if one of them is no record.
    """
    paths = sorted(Path(folder).glob("*.json"))
    if not paths:
        raise ValueError(
            f"{folder} holds no records; write one there with "
            "python -m kvbook.measure --out FILE.json"
        )
    return {path.stem: load_record(path) for path in paths}


def _check_machine(hardware: Hardware, steps: Sequence[StepTiming]) -> None:
    """Raise ``ValueError`` unless the facts are there and no step is faster than the machine."""
    missing = [fact for fact in FACTS if fact not in hardware.provenance]
    if missing:
        raise ValueError(f"its provenance lacks {', '.join(missing)}")
    for step in steps:
        check_is("a step", step, StepTiming)
        _check_step(step)
        if step.dtype not in hardware.peak_flops:
            peak, limit = "bandwidth", step.moved_bytes / hardware.bandwidth
        else:
            bound = hardware.bound(step.flops, step.moved_bytes, step.dtype)
            peak, limit = f"{bound.limited_by} peak", bound.seconds
        if step.seconds < limit * (1 - TOLERANCE):
            raise TooFastError(
                f"the step {step.label!r} took {format_seconds(step.seconds)}, but by the record's "
                f"own {peak} it takes at least {format_seconds(limit)}; measure both again on the "
                "same machine"
            )


def _step(fields: Mapping[str, Any]) -> StepTiming:
    return StepTiming(**{**fields, "quartiles": tuple(fields["quartiles"])})


def _check_step(step: StepTiming) -> None:
    """A file can be edited, and JSON of Python admits NaN."""
    for name, low in (("T", 1), ("S", 0), ("batch", 1), ("flops", 1), ("moved_bytes", 1)):
        check_count(name, getattr(step, name), low)
    if parse_format(step.dtype).name != step.dtype:
        raise ValueError(f"write {parse_format(step.dtype).name!r} for {step.dtype!r} as dtype")
    if len(step.quartiles) != 2:
        raise ValueError(f"quartiles must be two numbers, got {step.quartiles}")
    for seconds in (step.seconds, *step.quartiles):
        if type(seconds) not in (int, float) or not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"seconds must be finite and above 0, got {seconds!r:.80}")
    if not step.quartiles[0] <= step.seconds <= step.quartiles[1]:
        raise ValueError(
            f"the median must lie between the quartiles, got {step.seconds} beside {step.quartiles}"
        )
