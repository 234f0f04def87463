"""What a client asks for.

Knows: prompts, limits, how tokens shall be chosen. Does not know: models, blocks, when it is
served.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvbook.cache.block_key import Identity
from kvbook.cache.sizes import check_class, check_counts_from_zero, check_sizes
from kvbook.generate.sampling import Sampler, greedy

PLAIN = Identity()
HIGHEST = 9  # priorities are 0 … 9


@dataclass(frozen=True)
class Request:
    """One prompt and how to go on from it. It changes nothing and can be asked again.

    - ``prompt``: token ids, at least one; ``max_new_tokens``: the most that are drawn.
    - ``sampler`` chooses the tokens, without a generator: the engine gives each request its own,
      which starts from ``seed``. So neighbors never change what a request draws.
    - ``stop_tokens``: the text ends before the first of them that is drawn.
    - ``priority``, 0 to 9: how many times 64 places in the queue it may pass. See ``Scheduler``.
    - ``deadline``: time after arrival, in units of the engine's clock (seconds), at which the
      request is given up, wherever it stands; what was drawn until then has been handed out.
    - ``identity``: what shapes keys and values beside the tokens: adapter, tenant, content.
    - ``drafts``: how many tokens may be guessed and verified in one step; 0 for none.

    Raises ``ValueError`` for anything else. What depends on the model is checked by ``Engine.add``.
    """

    prompt: Sequence[int]
    max_new_tokens: int = 16
    sampler: Sampler = greedy
    seed: int = 0
    stop_tokens: Collection[int] = ()
    priority: int = 0
    deadline: float | None = None
    identity: Identity = PLAIN
    drafts: int = 0

    def __post_init__(self) -> None:
        whole = isinstance(self.prompt, list | tuple) and all(type(t) is int for t in self.prompt)
        if not whole or not self.prompt:
            raise ValueError(
                f"prompt must be a list of at least one integer token id, got {self.prompt!r:.80}; "
                "start from a begin-of-text token if there is no text"
            )
        check_sizes(max_new_tokens=self.max_new_tokens)
        check_class("sampler", self.sampler, Sampler, "greedy, or Sampler(temperature=1.0)")
        if self.sampler.generator is not None:
            raise ValueError(
                "a request's sampler has no generator, or two requests could share one and change "
                f"each other's tokens, got {self.sampler!r:.120}; give the request a seed"
            )
        if type(self.seed) is not int or not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be an integer from 0 to 2**63 - 1, got {self.seed!r:.60}")
        stops = self.stop_tokens
        if not isinstance(stops, list | tuple | set | frozenset) or not all(
            type(token) is int for token in stops
        ):
            raise ValueError(f"stop_tokens must be a list or set of token ids, got {stops!r:.80}; "
                             "one token is [token]")
        if type(self.priority) is not int or not 0 <= self.priority <= HIGHEST:
            raise ValueError(
                f"priority must be an integer from 0 to {HIGHEST}, which is served first, got "
                f"{self.priority!r:.60}"
            )
        late = self.deadline
        if late is not None and (type(late) not in (int, float) or not 0 < late < float("inf")):
            raise ValueError(
                f"deadline must be a time above 0 after the arrival, or None, got {late!r:.60}"
            )
        check_class("identity", self.identity, Identity, "such as Identity(salt='A')")
        self.identity.by_block(len(self.prompt), 1)  # refuses content beyond the prompt
        check_counts_from_zero(drafts=self.drafts)
        object.__setattr__(self, "prompt", tuple(self.prompt))  # what comes later is not seen
        object.__setattr__(self, "stop_tokens", frozenset(stops))
