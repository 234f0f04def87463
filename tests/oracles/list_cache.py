"""The plainest cache: per layer and row a Python list of keys and a list of values.

It feeds a model as ``KVCache`` does, and every rule of the package is written out once more, token
by token: who sees whom, which tokens a ring still has, when a tail settles. Nothing is shared with
``kvbook.cache`` but the form of a view.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvbook.cache import KVView
from kvbook.model.transformer import Transformer
from oracles.toys import as_it_is

RoundTrip = Callable[[Tensor], Tensor]  # (tokens of a tile, heads, width), and what is left of it


class ListCache:
    """``rows`` empty texts for the layers of ``model``.

    With ``rollback``, a layer of window W keeps ``sinks`` tokens and the last W - 1 + rollback of
    those that have settled. The last ``tail`` tokens, and an unfinished tile, are not settled.
    """

    def __init__(
        self,
        model: Transformer,
        rows: int,
        rollback: int | None = None,
        tail: int = 0,
        tile: int = 1,
        keys: RoundTrip = as_it_is,
        values: RoundTrip = as_it_is,
    ) -> None:
        config = model.config
        self.windows, self.sinks = config.windows, config.sinks
        self.rollback, self.tail, self.tile = rollback, tail, tile
        self.round_trips = (keys, values)
        self.rows, self.layers = rows, range(config.n_layers)
        # What ``Transformer`` compares with its own: the kinds of a cache made for it.
        self.layer_kinds = model.new_cache(1, 4).layer_kinds
        self.reset()

    def reset(self) -> None:
        self.lengths: tuple[int, ...] = (0,) * self.rows
        self.settled = [0] * self.rows
        self.alive: list[list[set[int]]] = [[set() for _ in self.layers] for _ in range(self.rows)]
        self.held: list[list[tuple[list[Tensor], list[Tensor]]]] = [
            [([], []) for _ in self.layers] for _ in range(self.rows)
        ]  # row, layer: keys and values, (heads, width) each

    def reserve(self, counts: Sequence[int], T: int) -> Tensor:
        self.counts, self.T, self.before = list(counts), T, list(self.settled)
        self.new = [
            [-1] * (T - count) + list(range(n, n + count))
            for n, count in zip(self.lengths, counts, strict=True)
        ]
        self.lengths = tuple(n + c for n, c in zip(self.lengths, counts, strict=True))
        for row, n in enumerate(self.lengths):
            while n - self.settled[row] - self.tail >= self.tile:
                self.settled[row] += self.tile
        return torch.tensor(self.new)

    def update(self, layer: int, keys: Tensor, values: Tensor) -> KVView:
        for row, count in enumerate(self.counts):
            for side, new in zip(self.held[row][layer], (keys, values), strict=True):
                side += [new[row, :, column] for column in range(self.T - count, self.T)]
            self._settle(row, layer)
        rows, longest = range(len(self.counts)), max(1, *self.lengths)
        view_keys, view_values = (
            torch.stack([self._padded(row, layer, side, longest) for row in rows])
            for side in (0, 1)
        )
        positions = [[p if p < n else -1 for p in range(longest)] for n in self.lengths]
        mask = [
            [[self._sees(layer, query, key) for key in have] for query in asking]
            for asking, have in zip(self.new, positions, strict=True)
        ]
        view = (x.transpose(1, 2) for x in (view_keys, view_values))
        return KVView(*view, torch.tensor(positions), torch.tensor(mask)[:, None])

    def _settle(self, row: int, layer: int) -> None:
        for start in range(self.before[row], self.settled[row], self.tile):
            stop = start + self.tile
            for side, left in zip(self.held[row][layer], self.round_trips, strict=True):
                side[start:stop] = left(torch.stack(side[start:stop]))
        alive = self.alive[row][layer]
        alive |= set(self.new[row]) - {-1}
        if self.rollback is not None and self.windows[layer] is not None:
            oldest = self.settled[row] - (self.windows[layer] - 1 + self.rollback)
            alive -= set(range(self.sinks, oldest))

    def _padded(self, row: int, layer: int, side: int, longest: int) -> Tensor:
        vectors = self.held[row][layer][side]
        kind = self.layer_kinds[0]
        heads, widths = kind.kv_heads, (kind.key_dim, kind.value_dim)
        nothing = torch.zeros(heads, widths[side], dtype=torch.float64)
        return torch.stack([*vectors, *[nothing] * (longest - len(vectors))])

    def _sees(self, layer: int, query: int, key: int) -> bool:
        window = self.windows[layer]
        if key < 0 or key > query:
            return False
        return window is None or query - key < window or key < self.sinks

    def entries(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """What the row must still have, (heads, n, width) each, in position order."""
        positions = sorted(self.alive[row][layer])
        kind = self.layer_kinds[0]
        heads, widths = kind.kv_heads, (kind.key_dim, kind.value_dim)
        keys, values = (
            torch.stack([side[p] for p in positions], 1)
            if positions
            else torch.zeros(heads, 0, width, dtype=torch.float64)
            for side, width in zip(self.held[row][layer], widths, strict=False)
        )
        return keys, values

    def can_truncate(self, lengths: Sequence[int]) -> bool:
        return all(self._can_go_back(row, n) for row, n in enumerate(lengths))

    def _can_go_back(self, row: int, n: int) -> bool:
        if n < self.settled[row] and n % self.tile:
            return False
        end = min(n, self.settled[row])
        for layer, window in enumerate(self.windows):
            if window is not None:
                needed = set(range(max(self.sinks, end - window + 1), end))
                if not needed <= self.alive[row][layer]:
                    return False
        return True

    def truncate(self, lengths: Sequence[int]) -> None:
        for row, n in enumerate(lengths):
            self.settled[row] = min(self.settled[row], n)
            for layer in self.layers:
                self.alive[row][layer] = {p for p in self.alive[row][layer] if p < n}
                for side in self.held[row][layer]:
                    del side[n:]
        self.lengths = tuple(lengths)

    def select(self, rows: Sequence[int]) -> None:
        self.lengths = tuple(self.lengths[r] for r in rows)
        idle = self.rows - len(rows)
        self.settled = [self.settled[r] for r in rows] + [0] * idle
        self.alive = [[set(one) for one in self.alive[r]] for r in rows] + [
            [set() for _ in self.layers] for _ in range(idle)
        ]
        self.held = [[(list(k), list(v)) for k, v in self.held[r]] for r in rows] + [
            [([], []) for _ in self.layers] for _ in range(idle)
        ]
