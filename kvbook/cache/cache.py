"""The KV cache: lengths over groups of layers.

Knows: how many tokens each row holds, as Python integers; which layer belongs to which group.
Does not know: where a placement puts a token, how a store encodes it, what attention does with
what it reads.
"""

from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from kvbook.cache.bound_table import BoundTable
from kvbook.cache.group import CacheGroup
from kvbook.cache.layer_kind import LayerKind
from kvbook.cache.sizes import check_class, check_list
from kvbook.cache.step import Step, check_counts
from kvbook.cache.view import View
from kvbook.errors import CacheFullError, UnfinishedStepError


class KVCache:
    """Keys and values of up to ``rows`` sequences.

    One forward pass is one ``reserve`` and then one ``update`` per layer. ``pattern[l]`` is the
    group of layer l; without one, all layers belong to the only group. The length is the
    sequence's, whichever layer is asked.

    A pass that ends midway leaves the cache unfinished: ``truncate`` to the lengths before it, or
    ``reset``, and it is whole again; anything else raises ``UnfinishedStepError``.
    """

    def __init__(self, *groups: CacheGroup, pattern: Sequence[int] | None = None) -> None:
        if not groups:
            raise ValueError("a cache needs at least one group; give CacheGroup(placement, store)")
        for group in groups:
            check_class("a group", group, CacheGroup, "CacheGroup(placement, store)")
        if pattern is not None and not isinstance(pattern, list | tuple):
            raise ValueError(f"pattern must list the group of each layer, got {pattern!r:.80}")
        if pattern is None and len(groups) > 1:
            raise ValueError(f"{len(groups)} groups need a pattern: the group of each layer")
        pattern = [0] * groups[0].layers if pattern is None else list(pattern)
        layers = [pattern.count(g) for g in range(len(groups))]
        held = [group.layers for group in groups]
        if layers != held or sum(layers) != len(pattern):
            raise ValueError(
                f"the pattern {pattern} gives the groups {layers} layers, but they hold {held}; "
                "make each group for as many layers as the pattern names it"
            )
        if len({group.rows for group in groups}) > 1:
            raise ValueError(
                f"groups of one cache have one number of rows, got {[g.rows for g in groups]}"
            )
        pools = [pool for group in groups for pool in group.placement.pools]
        if len(set(pools)) < len(pools):
            raise ValueError(
                f"{len(pools)} paged groups share a pool, and could not say together whether it "
                "has room; give each group a BlockPool of its own"
            )
        for pool in pools:
            pool.check_unclaimed()
        for pool in pools:
            pool.claim()
        self.groups = groups
        self._layers = [(groups[g], pattern[:i].count(g)) for i, g in enumerate(pattern)]
        self._lengths = [0] * self.rows
        self._before: list[int] = []  # lengths before the step that was begun last

    def __repr__(self) -> str:
        kinds = [
            f"{group.layers} x {type(group.placement).__name__} in {type(group.store).__name__}"
            for group in self.groups
        ]
        capacity = "no limit per row" if self.capacity is None else f"{self.capacity} tokens each"
        return (
            f"KVCache({len(self._layers)} layers: {', '.join(kinds)}; rows hold {self.lengths}, "
            f"{capacity}; {self.allocated_bytes:,} B allocated, "
            f"{self.bytes_per_token:,} B per token)"
        )

    def __copy__(self) -> NoReturn:
        raise ValueError(
            "a shallow copy of a cache would share storage but not lengths; use copy.deepcopy(), "
            "or select() to fork rows"
        )

    @property
    def rows(self) -> int:
        """The most sequences; in a bound cache as many as were bound last."""
        return self.groups[0].rows

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each active row."""
        return tuple(self._lengths)

    @property
    def capacity(self) -> int | None:
        """Tokens that one row can hold; ``None`` if no group sets a limit per row."""
        limits = [group.capacity for group in self.groups if group.capacity is not None]
        return min(limits) if limits else None

    @property
    def rollback(self) -> int | None:
        """Tokens that ``truncate`` can take back after any step; ``None``: all of them."""
        limits = [group.rollback for group in self.groups if group.rollback is not None]
        return min(limits) if limits else None

    @property
    def device(self) -> torch.device:
        return self.groups[0].device

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """What each layer stores and sees."""
        return tuple(group.kind for group, _ in self._layers)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of storage, used or not."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token takes in the stores of all layers, tails left out."""
        return sum(group.store.bytes_per_slot for group in self.groups)

    @property
    def tensors(self) -> list[Tensor]:
        """The storage itself."""
        return [tensor for group in self.groups for tensor in group.tensors]

    @property
    def used_bytes(self) -> int:
        """Bytes of the slots that hold a token of an active row."""
        return sum(group.used_bytes(self._lengths) for group in self.groups)

    def check_room(self, counts: Sequence[int]) -> None:
        """Raise ``CacheFullError`` if row b cannot hold ``counts[b]`` more tokens."""
        check_list("counts", counts)
        most = max((count for count in counts if type(count) is int), default=0)
        self._check_room(self._new_step(counts, most))

    def reserve(self, counts: Sequence[int], T: int) -> Tensor:
        """Make room for one forward pass: row b adds its last ``counts[b]`` of T tokens.

        Positions, slots, masks and lengths are settled here, once, before the first layer.
        Returns the positions of the new tokens, (1 or B, T) int64, NOT_A_TOKEN for padding.
        Raises ``CacheFullError`` if a row has no room, ``UnfinishedStepError`` if the last pass
        did not come to its end, and ``ValueError`` if the batch is not the cache's; nothing has
        changed then.
        """
        step = self._new_step(counts, T)
        self._check_finished()
        self._check_room(step)
        self._before = self._lengths
        for group in self.groups:
            group.begin(step)
        for group in self.groups:
            group.prepare(step)
        self._lengths = list(step.ends)
        return step.positions

    def update(self, layer: int, keys: Tensor, values: Tensor) -> View:
        """Store one layer's new keys and values, (B, Hkv, T, D) each, and return what it reads.

        The new tokens are in the view: a token sees itself. Raises ``ValueError`` for a layer
        that the step does not wait for, and for another shape, dtype or device than it waits for.
        """
        if type(layer) is not int or not 0 <= layer < len(self._layers):
            raise ValueError(f"layer must be from 0 to {len(self._layers) - 1}, got {layer!r}")
        group, inner = self._layers[layer]
        return group.update(inner, keys, values)

    def entries(self, layer: int, row: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values that one row holds in one layer, (Hkv, n, D) each, in position order.

        They are copies, whatever the kind of cache. Where a window has let tokens go, n is
        smaller than the length.
        """
        for name, number, stop in (("layer", layer, len(self._layers)),
                                   ("row", row, len(self._lengths))):
            if type(number) is not int or not 0 <= number < stop:
                raise ValueError(f"{name} must be from 0 to {stop - 1}, got {number!r}")
        group, inner = self._layers[layer]
        if group.waits_for(inner):
            self._check_finished()
        return group.entries(inner, row, self._lengths[row])

    def truncate(self, lengths: int | Sequence[int]) -> None:
        """Forget every token from position ``lengths[b]`` on (one integer: the same for all rows).

        The storage stays where it is. Raises ``ValueError`` for a length that is negative or
        above the present one, or that needs tokens which a window has let go; nothing has
        changed then. After a pass that ended midway, the present length is the one before it.
        """
        new = [lengths] * len(self._lengths) if type(lengths) is int else lengths
        present = self._lengths if self._is_finished else self._before
        fits = (
            isinstance(new, Sequence)
            and len(new) == len(present)
            and all(type(n) is int and 0 <= n <= old for n, old in zip(new, present, strict=True))
        )
        if not fits or not isinstance(new, Sequence):
            raise ValueError(
                f"truncate() takes one length per row, from 0 to the present one, got {new!r:.200};"
                f" present lengths are {present}"
            )
        for group in self.groups:
            group.check_truncate(new)
        for group in self.groups:
            group.truncate(new)
        self._lengths = list(new)

    def reset(self) -> None:
        """Empty every row and make all rows active; in a bound cache, let go of all tables."""
        for group in self.groups:
            group.reset()
        self._lengths = [0] * self.rows

    def select(self, rows: Sequence[int]) -> None:
        """Make row i a copy of what row ``rows[i]`` held: reorder, drop or fork sequences.

        Raises ``ValueError`` for an unknown row or in a bound cache and ``CacheFullError`` for
        more rows than the cache has; nothing has changed then.
        """
        self._check_finished()
        active = len(self._lengths)
        known = isinstance(rows, Sequence) and all(type(r) is int and 0 <= r < active for r in rows)
        if not known or not rows:
            raise ValueError(
                f"select() takes active rows from 0 to {active - 1}, got {rows!r:.200}"
            )
        lengths = [self._lengths[r] for r in rows]
        for group in self.groups:
            group.check_select(rows, lengths)
        if len(rows) > self.rows:
            raise CacheFullError(
                f"select() was given {len(rows)} rows, but the cache has {self.rows}; "
                "make a cache with a larger batch"
            )
        for group in self.groups:
            group.select(rows, lengths)
        self._lengths = lengths

    def bind(self, *tables: Sequence[BoundTable], lengths: Sequence[int]) -> None:
        """Let exactly these sequences be the batch, until the next call.

        One list of tables per group, one table per row; row b continues after ``lengths[b]``
        tokens, which its blocks hold already. The tables stay their owners', who append blocks
        before tokens come and release them. ``truncate`` changes lengths only, and a fork is
        another sequence. Raises ``ValueError`` for a table of another pool, for one that is too
        short or has blocks that nobody owns, and where rows have slots of their own; nothing has
        changed then.
        """
        rows = len(lengths) if isinstance(lengths, list | tuple) else 0
        if not rows or not all(type(n) is int and n >= 0 for n in lengths):
            raise ValueError(
                f"bind() takes the length of each row, integers from 0 on, got {lengths!r:.200}"
            )
        for of_group in tables:
            check_list("tables of a group", of_group)
        given = [len(of_group) for of_group in tables]
        if given != [rows] * len(self.groups):
            raise ValueError(
                f"bind() takes {len(self.groups)} lists of tables, one for each group of layers, "
                f"with one table for each of the {rows} rows; got lists of {given}"
            )
        for group, of_group in zip(self.groups, tables, strict=True):
            group.check_bind(of_group, lengths)
        for group, of_group in zip(self.groups, tables, strict=True):
            group.bind(of_group)
        self._lengths = list(lengths)

    def fill_unused(self, value: float) -> None:
        """Write ``value`` into every slot without a token: for tests of what must not matter."""
        if type(value) not in (int, float):
            raise ValueError(f"fill_unused() takes a number, got {value!r:.80}")
        for group in self.groups:
            group.fill_unused(self._lengths, float(value))

    def _new_step(self, counts: Sequence[int], T: int) -> Step:
        """The next step. Raises ``ValueError`` unless it is for the active rows."""
        check_list("counts", counts)
        rows = len(self._lengths)
        if len(counts) != rows:
            raise ValueError(
                f"the input has {len(counts)} rows, but the cache has {rows} active rows; "
                "make a cache for this batch, or choose rows with select() or bind()"
            )
        return Step(tuple(self._lengths), check_counts(counts, rows, T), T, self.device)

    def _check_room(self, step: Step) -> None:
        for group in self.groups:
            group.check_room(step)

    @property
    def _is_finished(self) -> bool:
        return not any(group.layers_to_come for group in self.groups)

    def _check_finished(self) -> None:
        if not self._is_finished:
            missing = sum(group.layers_to_come for group in self.groups)
            raise UnfinishedStepError(
                f"a forward pass was begun and {missing} of {len(self._layers)} layers have not "
                f"stored their keys; truncate() to {self._before}, the lengths before it, or "
                "reset()"
            )
