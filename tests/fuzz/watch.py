"""Comparing: numbers with the tolerance, and a cache before and after a call that is refused."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from kvbook.cache import CodedStore, Contiguous, DenseStore, KVCache, Ring, Store
from kvbook.cache.store import Where

# Logits and stored vectors are of size 1 to 100 here, in float64: an epsilon of 2e-16 grows over
# a few layers of sharp attention to about 1e-12. The smallest planted fault gives more than 1e-5.
TOLERANCE = 1e-9

Errors = type[BaseException] | tuple[type[BaseException], ...]


class Difference(AssertionError):
    """The cache and a plain model do not agree."""


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise Difference(what)


def same(what: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise Difference(f"{what}: {found}, expected {expected}")


def close(what: str, found: Tensor, expected: Tensor) -> None:
    same(f"shape of {what}", tuple(found.shape), tuple(expected.shape))
    off = (found - expected).abs()
    if found.numel() and not bool(off.max() < TOLERANCE):  # not-a-number is not below it
        where = tuple(int(i) for i in torch.unravel_index(off.nan_to_num(nan=1e300).argmax(),
                                                          off.shape))
        raise Difference(
            f"{what}: {found[where]:.12g} at {where}, expected {expected[where]:.12g}; "
            f"off by {off[where]:.3g}, allowed {TOLERANCE:.0e}"
        )


def identical(what: str, found: Tensor, expected: Tensor) -> None:
    """To the bit; not-a-number is equal to itself."""
    if found.shape != expected.shape or not torch.equal(raw(found), raw(expected)):
        off = (found - expected).abs().max() if found.shape == expected.shape else "the shape"
        raise Difference(f"{what} should be the same to the bit, off by {off}")


def raw(x: Tensor) -> Tensor:
    return x.detach().contiguous().flatten().view(torch.uint8)


@contextmanager
def unique_writes() -> Iterator[None]:
    """No slot is written twice in one call: which of the two stays would be luck."""
    with ExitStack() as patches:
        for store in (DenseStore, CodedStore):
            patches.enter_context(mock.patch.object(store, "write", checking(store.write)))
        yield


def checking(write: Callable[..., None]) -> Callable[..., None]:
    def checked(self: Store, layer: int, where: Where, keys: Tensor, values: Tensor) -> None:
        rows, slots = where
        if isinstance(slots, Tensor):
            written = rows * self.slots + slots if isinstance(rows, Tensor) else slots
            expect(len(written.unique()) == written.numel(), "a slot is written twice in one call")
        write(self, layer, where, keys, values)

    return checked


def untouched_slots_are_zero(cache: KVCache) -> None:
    """What ``dirty`` of a placement says: slots that it does not count were never written."""
    for group in cache.groups:
        placement, store = group.placement, group.store
        if isinstance(placement, Contiguous):
            clean = [list(range(dirty, placement.capacity)) for dirty in placement.dirty]
        elif isinstance(placement, Ring):
            ring, sinks = placement.ring, placement.sinks
            positions = [
                range(dirty, oldest + ring)
                for dirty, oldest in zip(placement.dirty, placement.oldest, strict=True)
            ]
            clean = [[p if p < sinks else sinks + (p - sinks) % ring for p in row]
                     for row in positions]
        else:
            continue
        for row, slots in enumerate(clean):
            where = slice(row, row + 1), torch.tensor(slots, dtype=torch.long)
            for part in store.read(store.layers - 1, where):
                expect(not part.any(), f"slots {slots} of row {row} should never have been written")


def state_of(cache: KVCache) -> list[Any]:
    """Everything that a refused call must leave: the storage as bytes, and the bookkeeping."""
    books: list[Any] = [cache.lengths, cache.capacity, cache.used_bytes]
    for group in cache.groups:
        for owner in (group, group.placement, *group.placement.pools):
            kept = {name: plain(x) for name, x in vars(owner).items() if name not in MEMOS}
            books.append(kept)
    return [books, [raw(tensor).clone() for tensor in cache.tensors]]


# What is kept to save work, and what does not outlive the next step.
MEMOS = {"_line", "_mirror", "_mirrored", "_new_shape", "_plan", "_mask"}


def plain(value: Any) -> Any:
    """Numbers, and lists, sets and dicts of them; of anything else its type."""
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, list | tuple | set | dict):
        return [plain(one) for one in value]
    return type(value).__name__


def unchanged(cache: KVCache, before: list[Any], what: str) -> None:
    after = state_of(cache)
    same(f"bookkeeping after {what}", after[0], before[0])
    for found, expected in zip(after[1], before[1], strict=True):
        expect(torch.equal(found, expected), f"{what} changed the storage")


def refused(
    what: str, call: Callable[[], object], cache: KVCache, error: Errors = ValueError
) -> None:
    """The call raises, says something, and leaves everything as it was."""
    before = state_of(cache)
    must_raise(what, call, error)
    unchanged(cache, before, what)


def must_raise(what: str, call: Callable[[], object], error: Errors) -> None:
    try:
        call()
    except error as raised:
        expect(len(str(raised)) > 20, f"{what} was refused without a reason: {raised!r}")
        return
    raise Difference(f"{what} was taken; it should raise {error}")
