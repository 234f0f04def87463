"""What a run did: how often each operation and each kind of cache occurred."""

import time
from collections import Counter

from fuzz.kinds import KINDS


class Tally:
    """Counts of one run. What could occur and did not is listed with a zero."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.operations: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.kinds: Counter[str] = Counter()
        self.families: Counter[str] = Counter()
        self.sequences = self.forwards = self.library = self.recomputed = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def missing(self, operations: list[str]) -> list[str]:
        """Operations and kinds that never occurred."""
        kinds = [f"{placed} / {stored}" for placed, stored in KINDS]
        return [name for name in operations if not self.operations[name]] + [
            kind for kind in kinds if not self.kinds[kind]
        ]

    def lines(self, operations: list[str]) -> list[str]:
        kinds = [f"{placed} / {stored}" for placed, stored in KINDS]
        return [
            f"{self.operations.total():,} operations in {self.kinds.total():,} cases, "
            f"{self.sequences:,} sequences, {self.forwards:,} forwards, "
            f"{self.refused.total():,} refused, {self.recomputed:,} texts recomputed, "
            f"{self.library:,} by transformers, {self.seconds:.0f} s",
            "operations: " + listed({name: self.operations[name] for name in operations}),
            "refused: " + listed(self.refused),
            "models: " + listed(self.families),
            "kinds: " + listed({kind: self.kinds[kind] for kind in kinds}, "; "),
        ]


def listed(counts: dict[str, int], between: str = ", ") -> str:
    return between.join(f"{name} {n}" for name, n in counts.items())
