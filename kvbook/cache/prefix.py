"""Full blocks that can be found again by the tokens that they hold.

Knows: tokens, keys and blocks of sequences. Does not know: tensors, which sequence should run
next, what a token means.
"""

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from kvbook.cache.block_key import Digest, Identity, Part, encode, header, token_array
from kvbook.cache.blocks import BlockPool, counted
from kvbook.errors import OutOfBlocksError, SequenceEndedError

PLAIN = Identity()
NO_BLOCK = -1  # the parent of a first block


@dataclass(eq=False, slots=True)
class CachedSequence:
    """One sequence: its tokens, its block table, and how many tokens were found in the cache."""

    pool: BlockPool
    tokens: "array[int]"
    identity: Identity
    blocks: list[int] = field(default_factory=list)  # position p lies in blocks[p // block_size]
    cached_tokens: int = 0  # of the prompt, found when the sequence began
    written: int = 0  # tokens whose keys and values are in the blocks
    chain: list[bytes] = field(default_factory=list)  # keys of its cached blocks, the first ones
    running: Digest | None = None  # the digest of its first ``hashed`` blocks
    hashed: int = 0
    beside: dict[int, bytes] = field(default_factory=dict)  # block → its text beside tokens
    private: bool = False  # no more of it can be cached: a collision, or the index was emptied

    @property
    def new_tokens(self) -> int:
        """Tokens whose keys and values are still to be computed."""
        return len(self.tokens) - self.written

    @property
    def keys(self) -> list[bytes]:
        """Keys of its cached blocks, as a list of its own."""
        return list(self.chain)

    def __getstate__(self) -> tuple[None, dict[str, object]]:
        """For copies: all but the running digest, which cannot be copied and is made anew."""
        return None, {name: getattr(self, name) for name in self.__slots__} | {"running": None}


@dataclass(slots=True)
class PrefixStats:
    """What was found. Prompts that begin again after a preemption are not counted."""

    prompts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    collisions: int = 0  # a key was found, but what it stands for was something else

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found; 0 before the first prompt."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


class PrefixCache:
    """Sequences over one pool, which share the blocks of a common beginning.

    ``fingerprint`` names the model and its weights: what they compute from the same tokens is
    not the same. It is taken at its word. So it is the caller's duty to give other weights, or
    another way to compute with them, another name, and to call ``clear()`` when the weights
    behind one cache change. ``digest`` starts a running digest, as those of hashlib do. Whatever
    it is, a block is used only if its text and its parent are those that were asked for, so a weak
    one costs hits, not truth.

    What can be found is one dictionary, key → block, and three lists by block: its key, its text,
    and its parent, the block before it in every sequence that holds it. The parent is named by its
    number. That number cannot mean another block by now: no block is evicted before one that
    depends on it (see ``BlockPool.release``), and ``clear()`` drops all of them.

    >>> prefix = PrefixCache(BlockPool(blocks=8, block_size=4), fingerprint="toy, seed 0")
    >>> first = prefix.begin([1, 2, 3, 4, 5, 6])
    >>> prefix.commit(first, 6)  # the keys and values of all 6 tokens are in its blocks now
    []
    >>> second = prefix.begin([1, 2, 3, 4, 9])
    >>> second.cached_tokens, second.new_tokens
    (4, 1)
    >>> first.blocks, second.blocks
    ([0, 1], [0, 2])
    """

    def __init__(
        self, pool: BlockPool, fingerprint: Part, digest: Callable[[], Digest] = hashlib.sha256
    ) -> None:
        if not isinstance(pool, BlockPool):
            raise ValueError(f"pool must be a BlockPool, got {pool!r:.60}")
        check_digest(digest)
        self.pool, self.stats = pool, PrefixStats()
        self._common, self._digest = encode(fingerprint) + encode(pool.block_size), digest
        self._block_bytes = pool.block_size * array("q").itemsize
        self._by_key: dict[bytes, int] = {}
        self._key, self._text = [b""] * pool.blocks, [b""] * pool.blocks  # by block
        self._parent = [NO_BLOCK] * pool.blocks
        self._live: set[CachedSequence] = set()

    @property
    def cached_blocks(self) -> int:
        """Blocks that can be found, in use or evictable."""
        return len(self._by_key)

    def begin(
        self, tokens: Iterable[int], identity: Identity = PLAIN, *, resumed: bool = False
    ) -> CachedSequence:
        """Start a sequence: share the blocks that hold its beginning, allocate the others.

        Finding and taking are one call, so no plan can go stale. Only full blocks are found, and
        never the whole prompt: its last token must be computed to predict the next. Takes
        O(tokens), however many blocks are cached.

        ``identity`` is what shapes keys and values beside the tokens. ``resumed`` marks a
        sequence that was preempted: it is not counted.

        Raises ``ValueError`` for an empty prompt or content beyond it, ``OutOfBlocksError`` if
        the pool has too few blocks; nothing has changed then.
        """
        if not isinstance(identity, Identity):
            raise ValueError(
                f"identity must be an Identity, such as Identity(salt='A'), got {identity!r:.60}"
            )
        if type(resumed) is not bool:
            raise ValueError(f"resumed must be True or False, got {resumed!r:.60}")
        sequence = CachedSequence(self.pool, token_array(tokens), identity)
        length, size = len(sequence.tokens), self.pool.block_size
        if not length:
            raise ValueError("a sequence begins with at least one token, got none")
        sequence.beside = identity.by_block(length, size)
        self._match(sequence)
        sequence.cached_tokens = sequence.written = size * len(sequence.chain)
        self._grow(sequence, length, sharing=sequence.blocks[:])
        self._live.add(sequence)
        self.stats.collisions += sequence.private
        if not resumed:
            self.stats.prompts += 1
            self.stats.prompt_tokens += length
            self.stats.cached_tokens += sequence.cached_tokens
        return sequence

    def append(self, sequence: CachedSequence, tokens: Iterable[int]) -> None:
        """Add tokens at the end, and blocks where they are needed.

        Raises ``OutOfBlocksError`` if the pool has too few; nothing has changed then.
        """
        self._check_live(sequence)
        new = token_array(tokens)
        self._grow(sequence, len(sequence.tokens) + len(new), sharing=[])
        sequence.tokens.extend(new)

    def commit(self, sequence: CachedSequence, length: int) -> list[int]:
        """Note that the first ``length`` tokens are written; full blocks can be found from now on.

        If another sequence has filled a block with the same tokens before, that block takes the
        place of this one's, which is released: the two hold the same, one is enough, and later
        blocks stay connected to what can be found. Returns the places of the table where this
        happened, mostly none.
        """
        self._check_live(sequence)
        self._check_length(sequence, length, "commit", "append() tokens first")
        sequence.written = length
        chain, blocks, by_key = sequence.chain, sequence.blocks, self._by_key
        first, stop = len(chain), length // self.pool.block_size
        if sequence.private or first == stop:
            return []
        parent = blocks[first - 1] if first else NO_BLOCK
        kept: list[int] = []
        swapped: list[int] = []
        try:
            keyed = self.keyed(sequence, first, stop)
            for (key, text), own in zip(keyed, blocks[first:stop], strict=True):
                block = by_key.get(key)
                if block is None:
                    block = by_key[key] = own
                    self._key[own], self._text[own], self._parent[own] = key, text, parent
                    kept.append(own)
                elif self.confirms(block, parent, text):
                    self.pool.share([block])
                    self.pool.release([own])
                    swapped.append(len(chain))
                    blocks[len(chain)] = block
                else:
                    self.stats.collisions += 1
                    sequence.private = True
                    break
                chain.append(key)
                parent = block
        finally:  # what can be found is kept, even if the digest fails at a later block
            self.pool.keep(kept, self._forget)
        return swapped

    def retract(self, sequence: CachedSequence, length: int) -> None:
        """Take back the tokens from ``length`` on, which are not written: rejected drafts.

        Blocks that no token needs any more are released. Content shown behind ``length`` goes
        with its tokens. Raises ``ValueError`` for a length below what is written, which others
        may read by now, and for one within some content; nothing has changed then.
        """
        self._check_live(sequence)
        self._check_length(sequence, length, "retract", "what is written stays")
        size = self.pool.block_size
        identity = sequence.identity.until(length)
        needed = -(-length // size)
        self.pool.release(sequence.blocks[needed:])
        del sequence.blocks[needed:], sequence.tokens[length:]
        sequence.identity, sequence.beside = identity, identity.by_block(length, size)

    def end(self, sequence: CachedSequence) -> None:
        """Release its blocks. Those that are full stay findable until the pool needs them.

        The sequence names no blocks then; its tokens and its identity are still there.
        """
        self._check_live(sequence)
        self.pool.release(sequence.blocks)
        self._live.remove(sequence)
        sequence.blocks.clear()
        sequence.chain.clear()

    def clear(self) -> None:
        """Forget everything that can be found, as when the weights have changed.

        Blocks without an owner become free. Sequences that are under way keep theirs to the end,
        but nothing of them can be found, neither now nor later.
        """
        self.pool.drop(list(self._by_key.values()))
        for sequence in self._live:
            sequence.private = True
            sequence.chain.clear()

    def keyed(
        self, sequence: CachedSequence, first: int, stop: int
    ) -> Iterator[tuple[bytes, bytes]]:
        """Keys and texts of blocks first … stop-1. They are full, and those before are cached.

        A key is the digest of the texts of all blocks up to its own. The sequence keeps the running
        digest for the next call, unless the caller breaks off.
        """
        size, width, beside = self.pool.block_size, self._block_bytes, sequence.beside
        tokens = sequence.tokens[first * size : stop * size].tobytes()
        kind, running = header(b"t", width), self._running(sequence, first)
        for place, start in enumerate(range(0, len(tokens), width), first):
            text = kind + tokens[start : start + width]
            if place in beside:
                text += beside[place]
            if place == 0:
                text = self._common + sequence.identity.for_all_blocks + text
            running.update(text)
            yield running.digest(), text
        sequence.running, sequence.hashed = running, stop

    def confirms(self, block: int, parent: int, text: bytes) -> bool:
        """Whether a block found by its key holds what was asked for, and not a collision.

        The parent was confirmed before, and so on to the first block: the whole prefix is equal.
        """
        return self._parent[block] == parent and self._text[block] == text

    def _match(self, sequence: CachedSequence) -> None:
        """Fill the chain and the table with what is cached, without taking it."""
        chain, blocks, by_key, parent = sequence.chain, sequence.blocks, self._by_key, NO_BLOCK
        full = (len(sequence.tokens) - 1) // self.pool.block_size
        for key, text in self.keyed(sequence, 0, full):
            block = by_key.get(key)
            if block is None:
                return
            if not self.confirms(block, parent, text):
                sequence.private = True
                return
            chain.append(key)
            blocks.append(block)
            parent = block

    def _running(self, sequence: CachedSequence, blocks: int) -> Digest:
        """The digest of a sequence's first cached blocks, taken from it while it goes on."""
        running, sequence.running = sequence.running, None
        if running is None or sequence.hashed != blocks:
            running = self._digest()
            for block in sequence.blocks[:blocks]:
                running.update(self._text[block])
        return running

    def _grow(self, sequence: CachedSequence, length: int, sharing: list[int]) -> None:
        """Blocks for ``length`` tokens, the shared ones included; or raise and change nothing."""
        missing = -(-length // self.pool.block_size) - len(sequence.blocks)
        room = self.pool.available
        if missing > room - len(sharing):  # sharing an evictable block takes it as well
            room -= sum(not self.pool.owners(block) for block in sharing)
        if missing > room:
            raise OutOfBlocksError(
                f"{counted(length, 'token')} need{'s' if length == 1 else ''} "
                f"{counted(missing, 'more block')}, but {room} of {self.pool.blocks} "
                "are available; end another sequence first, or make a larger pool"
            )
        self.pool.share(sharing)
        if missing > 0:
            sequence.blocks += self.pool.allocate(missing)

    def _check_live(self, sequence: CachedSequence) -> None:
        if not isinstance(sequence, CachedSequence):
            raise ValueError(f"a sequence is what begin() returns, got {sequence!r:.60}")
        if sequence not in self._live:
            raise SequenceEndedError(
                "the sequence has ended or belongs to another cache, and its blocks may hold "
                "something else by now; begin() a new one with its tokens"
            )

    def _check_length(self, sequence: CachedSequence, length: int, call: str, advice: str) -> None:
        written, tokens = sequence.written, len(sequence.tokens)
        if type(length) is not int or not written <= length <= tokens:
            raise ValueError(
                f"{written} of {tokens} tokens are written, so {call}() takes a length between the "
                f"two, got {length!r:.60}; {advice}"
            )

    def _forget(self, block: int) -> None:
        """The pool reuses a block, or clear() drops it."""
        del self._by_key[self._key[block]]


def check_digest(digest: Callable[[], Digest]) -> None:
    """``ValueError`` unless this starts a running digest."""
    try:
        made = digest()
        made.update(b"")
        fits = type(made.digest()) is bytes
    except Exception:  # whatever it is, it is not called as a digest is
        fits = False
    if not fits:
        raise ValueError(
            f"digest must start a running digest, as hashlib.sha256 does, got {digest!r:.60}"
        )
