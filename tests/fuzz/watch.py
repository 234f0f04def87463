"""Comparing: numbers with the tolerance, and a cache before and after a call that is refused."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvbook.cache import KVCache

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
