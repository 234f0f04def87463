"""A full-precision tail before a coded store: the newest tokens exactly, the older ones in code.

Knows: how many tokens of each row are settled, that is, handed on to the store. Does not know:
the code, the placement.

A tail is needed where a store encodes several tokens together (one scale per channel over a run
of tokens), and useful where recent tokens deserve more precision. (KIVI: Liu et al. 2024, arXiv
2402.02750.) Attention reads the settled tokens and then the tail; positions travel with the keys,
so nothing else has to know.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbook.cache.bound_table import BoundTable
from kvbook.cache.group import CacheGroup
from kvbook.cache.mask import AttentionMask, full_mask
from kvbook.cache.placement import Placement
from kvbook.cache.sizes import check_class, check_counts_from_zero
from kvbook.cache.step import Step
from kvbook.cache.store import DenseStore, Store
from kvbook.cache.view import NOT_A_TOKEN, KVView


class TailedGroup(CacheGroup):
    """A group whose last ``tail`` tokens per row, and an unfinished group, stay as they are.

    After each step the oldest tokens beyond ``tail`` settle, ``store.write_size`` at a time.
    A step attends to what the cache holds after it, so the split of a text into chunks decides
    which queries still saw a token exactly: logits depend on it, within the code's error.
    """

    def __init__(self, placement: Placement, store: Store, tail: int) -> None:
        check_class("store", store, Store, "quantized(INT8)(kind, layers, rows, slots), say")
        check_counts_from_zero(tail=tail)
        if tail + store.write_size < 2:
            raise ValueError("a tail of 0 tokens before a store of single tokens: use CacheGroup")
        super().__init__(placement, store)
        self.tail = tail
        self.recent = DenseStore(
            store.kind, store.layers, placement.rows, tail + store.write_size - 1, store.device
        )
        self.settled = [0] * placement.rows

    def _check_write_size(self, placement: Placement, store: Store) -> None:
        if not placement.rows:
            raise ValueError(
                "rows that are bound to block tables leave nothing behind, but a tail keeps the "
                "newest tokens of each row outside of the blocks; make the cache without a tail"
            )
        placement.check_write_size(store.write_size)

    @property
    def rollback(self) -> int | None:
        """Those of the tail, and of the settled ones what store and placement allow."""
        if self.store.write_size > 1:
            return self.tail
        return None if self.placement.rollback is None else self.placement.rollback + self.tail

    @property
    def tensors(self) -> list[Tensor]:
        return self.store.tensors + self.recent.tensors

    def used_bytes(self, lengths: Sequence[int]) -> int:
        settled = self.settled[: len(lengths)]
        recent = (sum(lengths) - sum(settled)) * self.recent.bytes_per_slot
        return super().used_bytes(settled) + recent

    def check_room(self, step: Step) -> None:
        """All tokens have to settle one day."""
        settled = tuple(self.settled[: step.rows])
        to_settle = tuple(end - s for end, s in zip(step.ends, settled, strict=True))
        self.placement.check_room(Step(settled, to_settle, max(to_settle), step.device))

    def prepare(self, step: Step) -> None:
        settled = tuple(self.settled[: step.rows])
        waiting = [n - s for n, s in zip(step.starts, settled, strict=True)]
        size = self.store.write_size
        settling = tuple(
            max(0, w + count - self.tail) // size * size
            for w, count in zip(waiting, step.counts, strict=True)
        )
        inner = Step(settled, settling, max(settling), step.device)
        plan = self._plan_step(inner)
        self._index(waiting, settling, step)
        self.settled[: step.rows] = inner.ends
        first_recent = torch.tensor(inner.ends, device=step.device)[:, None]
        at = torch.arange(self._staying.shape[1], device=step.device)
        recent = (first_recent + at).masked_fill(self._staying < 0, NOT_A_TOKEN)
        positions = torch.cat([plan.positions.expand(step.rows, -1), recent], 1)
        self._mask = AttentionMask(positions, full_mask(step, positions, self.kind), False)
        self._plan = plan

    def _index(self, waiting: Sequence[int], settling: Sequence[int], step: Step) -> None:
        """Where the tokens that settle and those that stay stand in (old tail ++ new tokens)."""
        slots = self.recent.slots
        line = [
            [*range(w), *(slots + column for column in columns)]
            for w, columns in zip(waiting, step.columns, strict=True)
        ]
        moved = [row[:m] for row, m in zip(line, settling, strict=True)]
        stay = [row[m:] for row, m in zip(line, settling, strict=True)]
        width, longest = max(settling), max(map(len, stay))
        # Padding: on the left of a write, as in any step; on the right of the tail.
        self._moved = _padded([[-1] * (width - len(row)) + row for row in moved], step.device)
        self._staying = _padded([row + [-1] * (longest - len(row)) for row in stay], step.device)

    def _store_and_view(self, layer: int, keys: Tensor, values: Tensor) -> KVView:
        plan, seen, rows = self._plan, self._mask, slice(0, len(keys))
        assert plan is not None
        assert seen is not None
        old = self.recent.read(layer, (rows, slice(None)))
        line = [
            torch.cat([before, new.transpose(1, 2)], 1)  # (B, tail slots + T, Hkv, D)
            for before, new in zip(old, (keys, values), strict=True)
        ]
        settled = plan.write_and_read(self.store, layer, *(_take(x, self._moved) for x in line))
        recent = [_take(x, self._staying) for x in line]
        self.recent.write(layer, (rows, slice(0, self._staying.shape[1])), *recent)
        read_keys, read_values = (
            torch.cat(pair, 1).transpose(1, 2) for pair in zip(settled, recent, strict=True)
        )
        return KVView(read_keys, read_values, seen.positions, seen.mask)

    def entries(self, layer: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        settled = super().entries(layer, row, self.settled[row])
        where = (slice(row, row + 1), slice(0, length - self.settled[row]))
        recent = (x[0].transpose(0, 1) for x in self.recent.read(layer, where))
        keys, values = (torch.cat(pair, 1) for pair in zip(settled, recent, strict=True))
        return keys, values

    def check_truncate(self, lengths: Sequence[int]) -> None:
        size = self.store.write_size
        for row, length in enumerate(lengths):
            if length < self.settled[row] and length % size:
                raise ValueError(
                    f"row {row} cannot go back to {length} tokens: tokens up to "
                    f"{self.settled[row]} are encoded in groups of {size}; go back to a multiple "
                    f"of {size}, or make the tail longer than {self.tail} tokens"
                )
        self.placement.check_truncate(self._settled_after(lengths))

    def truncate(self, lengths: Sequence[int]) -> None:
        self._finish_step()
        self.settled[: len(lengths)] = self._settled_after(lengths)
        super().truncate(self.settled[: len(lengths)])

    def check_select(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.placement.check_select(rows, [self.settled[r] for r in rows])

    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        settled = [self.settled[r] for r in rows]
        super().select(rows, settled)
        self.recent.copy_rows(list(rows), self.recent.slots)
        self.settled = settled + [0] * (self.rows - len(rows))

    def check_bind(self, tables: Sequence[BoundTable], lengths: Sequence[int]) -> None:
        raise ValueError(
            f"bind() needs the blocks to hold all tokens of a sequence, but here {self.tail} or "
            "more stay in a tail; make the cache without a tail"
        )

    def reset(self) -> None:
        self._finish_step()
        self.settled = [0] * self.rows
        super().reset()

    def fill_unused(self, lengths: Sequence[int], value: float) -> None:
        lengths = [*lengths, *self.settled[len(lengths) :]]  # inactive rows hold nothing recent
        super().fill_unused(self.settled, value)
        for row, length in enumerate(lengths):
            self.recent.fill(row, length - self.settled[row], self.recent.slots, value)

    def _finish_step(self) -> None:
        """After a forward pass that failed: settle in the layers that it did not reach, too.

        The new tokens of these layers are zeros, which the caller is about to forget.
        """
        if self._plan is None:
            return
        for layer in sorted(self._to_come):
            keys, values = (
                torch.zeros(*self._new_shape, width, dtype=self.kind.dtype, device=self.device)
                for width in (self.kind.key_dim, self.kind.value_dim)
            )
            self.update(layer, keys, values)

    def _settled_after(self, lengths: Sequence[int]) -> list[int]:
        return [min(settled, n) for settled, n in zip(self.settled, lengths, strict=False)]


def _padded(columns: list[list[int]], device: torch.device | str) -> Tensor:
    return torch.tensor(columns, device=device, dtype=torch.long).view(len(columns), -1)


def _take(line: Tensor, columns: Tensor) -> Tensor:
    """Columns (B, N) of (B, …, Hkv, D); zero where a column is -1, whatever stands there."""
    rows = torch.arange(len(line), device=line.device)[:, None]
    taken = line[rows, columns.clamp(min=0)]
    return taken.masked_fill((columns < 0)[:, :, None, None], 0)
