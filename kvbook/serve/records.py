"""What was measured, as plain records.

Knows: the quantities. Does not know: who measures, who draws.

Times are those of the engine's clock: seconds of a ``WallClock``.
"""

from dataclasses import dataclass
from typing import Literal

Reason = Literal["length", "stop", "cancelled", "deadline", "error"]
Phase = Literal["prefill", "recompute", "decode"]


@dataclass(frozen=True, slots=True)
class Output:
    """What one step gave one request.

    ``tokens`` are new ones, a stop token is not among them. ``reason`` stands in the request's
    last output and says why it ended: "length", "stop", "cancelled", "deadline" or "error", the
    last with the ``error`` itself. ``record`` comes with it.
    """

    id: int
    tokens: tuple[int, ...]
    reason: Reason | None = None
    error: Exception | None = None
    record: "RequestRecord | None" = None


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request from its arrival to its end."""

    id: int
    reason: Reason
    priority: int
    arrival: float
    started: float | None  # when it got blocks for the first time; None if it never did
    first_token: float | None  # when its first token was drawn
    last_token: float | None
    ended: float
    prompt_tokens: int
    cached_tokens: int  # of the prompt, found when it started
    new_tokens: int
    computed_tokens: int  # that went through the model, those computed again included
    preemptions: int
    drafted_tokens: int
    accepted_tokens: int  # of the drafted

    @property
    def queue_time(self) -> float:
        """From arrival to start, or to the end of a request that never started."""
        return (self.ended if self.started is None else self.started) - self.arrival

    @property
    def ttft(self) -> float | None:
        """Time to first token, the wait in the queue included; ``None`` without a token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; ``None`` with fewer than two tokens."""
        if self.first_token is None or self.last_token is None or self.new_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.new_tokens - 1)


@dataclass(frozen=True, slots=True)
class Ran:
    """What one request did in one step."""

    id: int
    phase: Phase  # "recompute" is the prefill of a request that was preempted
    tokens: int  # that went through the model, drafts included


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of an engine: what ran, and how the blocks stood while it ran."""

    number: int
    start: float
    end: float
    scheduling: float  # time of it that went into the plan
    ran: tuple[Ran, ...]
    forwards: int
    drawn: int  # tokens handed out
    running: int  # requests that have blocks
    waiting: int
    preempted: tuple[int, ...]  # ids
    blocks_used: int
    blocks_free: int
    blocks_evictable: int  # without an owner, but they can be found
    slots_used: int  # slots in the used blocks
    slots_empty: int  # of these, without a token

    @property
    def prefilled(self) -> int:
        """Tokens computed that were known when their request began, or began again."""
        return sum(one.tokens for one in self.ran if one.phase != "decode")

    @property
    def decoded(self) -> int:
        """Tokens computed one by one, or guessed and verified."""
        return sum(one.tokens for one in self.ran if one.phase == "decode")

    @property
    def fragmentation(self) -> float:
        """Share of the slots in used blocks that holds no token; 0 if none is used."""
        return self.slots_empty / self.slots_used if self.slots_used else 0.0
