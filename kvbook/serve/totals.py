"""What only grows, over all requests that have ended.

Knows: the counts. Does not know: who reads them.
"""

from collections import Counter
from dataclasses import dataclass, field

from kvbook.serve.records import RequestRecord


@dataclass
class Totals:
    """What only grows. Requests are counted when they end."""

    requests: Counter[str] = field(default_factory=Counter)  # by reason
    new_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    def add(self, record: RequestRecord) -> None:
        self.requests[record.reason] += 1
        self.new_tokens += record.new_tokens
        self.computed_tokens += record.computed_tokens
        self.preemptions += record.preemptions
        self.drafted_tokens += record.drafted_tokens
        self.accepted_tokens += record.accepted_tokens
