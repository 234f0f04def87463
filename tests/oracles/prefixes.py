"""Small prefix caches for tests: made, filled and emptied in one call. No tensors."""

from collections.abc import Callable, Sequence
from typing import Any

from kvbook.cache.block_key import Identity
from kvbook.cache.blocks import BlockPool
from kvbook.cache.prefix import CachedSequence, PrefixCache


def running(of: Callable[[bytes], bytes]) -> Callable[[], Any]:
    """A running digest from a function of the whole message, as weak as that function is."""

    class Running:
        def __init__(self) -> None:
            self.message = b""

        def update(self, text: bytes) -> None:
            self.message += text

        def digest(self) -> bytes:
            return of(self.message)

    return Running


def new(blocks: int = 12, block_size: int = 4, **options: Any) -> PrefixCache:
    return PrefixCache(BlockPool(blocks, block_size), options.pop("fingerprint", "toy"), **options)


def computed(
    prefix: PrefixCache, tokens: Sequence[int], resumed: bool = False, **identity: Any
) -> CachedSequence:
    """A sequence whose prompt has been through the model."""
    sequence = prefix.begin(tokens, Identity(**identity), resumed=resumed)
    prefix.commit(sequence, len(tokens))
    return sequence


def served(prefix: PrefixCache, tokens: Sequence[int], **options: Any) -> int:
    """Run a prompt from begin to end. Returns how many tokens were found."""
    sequence = computed(prefix, tokens, **options)
    prefix.end(sequence)
    return sequence.cached_tokens


def numbers(n: int, start: int = 1) -> list[int]:
    return list(range(start, start + n))


def keys(tokens: Sequence[int] = range(1, 14), **options: Any) -> list[bytes]:
    """Keys of the full blocks of a prompt, in a cache of its own."""
    own = {name: options.pop(name) for name in ("fingerprint", "block_size") if name in options}
    return computed(new(**own), tokens, **options).keys
