"""What is random, as plain data: a case can be printed, pasted into a test and run again."""

import textwrap
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Op:
    """The name of an operation and its arguments: whole numbers, lists of them, names.

    An operation means something in every state, so others can be dropped before it.
    """

    name: str
    given: dict[str, Any]

    def __repr__(self) -> str:
        return f"Op({self.name!r}, {self.given!r})"


@dataclass(frozen=True)
class Case:
    """A model, a cache, and what is done to it."""

    family: str  # an entry of ``models.FAMILIES``
    seed: int  # of the weights
    config: dict[str, Any]  # what differs from the family's small config
    placed: str  # an entry of ``kinds.PLACED``
    stored: str  # an entry of ``cache_kinds.STORES``
    sizes: dict[str, int]  # rows, capacity and so on: what the placement asks for
    ops: list[Op] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return f"{self.placed} / {self.stored}"

    def with_ops(self, ops: list[Op]) -> "Case":
        return replace(self, ops=ops)

    def __str__(self) -> str:
        """Python that makes the case."""
        head = [
            f"family={self.family!r}, seed={self.seed}, placed={self.placed!r},",
            f"stored={self.stored!r}, sizes={self.sizes!r},",
            f"config={self.config!r},",
            "ops=[",
            *(f"    {op!r}," for op in self.ops),
            "],",
        ]
        return "Case(\n" + textwrap.indent("\n".join(head), "    ") + "\n)"
