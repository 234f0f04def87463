"""Layers that are cached alike: one placement, one store, one window.

Knows: what one forward pass does to its slots. Does not know: lengths (the cache keeps them), which
layers of the model these are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbook.cache.paged import Paged
from kvbook.cache.placement import Placement, Plan
from kvbook.cache.step import Step, common_start, look
from kvbook.cache.store import Layout, Store
from kvbook.cache.view import KVView, View


class CacheGroup:
    """A placement (position to slot) and a store (slot to bytes) for so many layers.

    ``window`` is the number of keys visible to a query, itself included; ``None`` means all of
    the past. The first ``sinks`` positions stay visible whatever the window.
    """

    def __init__(
        self, placement: Placement, store: Store, window: int | None = None, sinks: int = 0
    ) -> None:
        rows, slots = placement.store_shape
        if (rows, slots) != (store.rows, store.slots):
            raise ValueError(
                f"the placement has {rows} rows of {slots} slots, the store "
                f"{store.rows} rows of {store.slots}; make both for the same numbers"
            )
        self._check_tile(placement, store)
        placement.check_window(window, sinks)
        self.placement, self.store, self.window, self.sinks = placement, store, window, sinks
        self._plan: Plan | None = None
        self._step: Step | None = None
        self._to_come: set[int] = set()  # layers that the present step has not reached yet

    def _check_tile(self, placement: Placement, store: Store) -> None:
        if store.tile > 1:
            raise ValueError(
                f"the store writes {store.tile} tokens at a time, but tokens come one by one; "
                "put a recent tail before it: TailedGroup"
            )

    @property
    def rows(self) -> int:
        return self.placement.rows

    @property
    def capacity(self) -> int | None:
        return self.placement.capacity

    @property
    def layout(self) -> Layout:
        return self.store.layout

    @property
    def device(self) -> torch.device:
        return self.store.device

    @property
    def tensors(self) -> list[Tensor]:
        """The storage itself."""
        return self.store.tensors

    def used_bytes(self, lengths: Sequence[int]) -> int:
        used = self.placement.slots_used(lengths)  # whole tiles, and all tiles are of one size
        return self.store.allocated_bytes * used // (self.store.rows * self.store.slots)

    def check_room(self, starts: Sequence[int], ends: Sequence[int]) -> None:
        self.placement.check_room(starts, ends)

    def prepare(
        self, starts: Sequence[int], counts: Sequence[int], T: int, queries: Tensor
    ) -> None:
        """Settle slots and mask of one forward pass, before its first layer."""
        plan = self._plan_step(starts, counts, T, queries)
        start = common_start(starts, counts, T)
        self._step = look(queries, plan.positions, start, self.window, self.sinks)
        self._begin(plan)

    def _plan_step(
        self, starts: Sequence[int], counts: Sequence[int], T: int, queries: Tensor
    ) -> Plan:
        """Ask the placement, and bring the store into the state that the plan counts on."""
        plan = self.placement.plan(starts, counts, T, queries)
        for source, target in plan.copies:
            self.store.copy_slots(0, source, target)
        for run in plan.stale:
            self.store.fill(*run, 0.0)
        return plan

    def _begin(self, plan: Plan) -> None:
        self._plan, self._to_come = plan, set(range(self.layout.layers))

    def _reach(self, layer: int) -> Plan:
        """The plan of the present step, for a layer that it has not reached yet."""
        if self._plan is None or layer not in self._to_come:
            raise ValueError(
                "update() of a layer without reserve(), or a second time after one: call "
                "reserve() once per forward pass, and then update() once per layer"
            )
        self._to_come.remove(layer)
        return self._plan

    def update(self, layer: int, keys: Tensor, values: Tensor) -> View:
        """Store new keys and values, (B, Hkv, T, D), of the group's layer; return what it reads."""
        plan, step = self._reach(layer), self._step
        assert step is not None
        seen = plan.move(self.store, layer, keys.transpose(1, 2), values.transpose(1, 2))
        read_keys, read_values = (tensor.transpose(1, 2) for tensor in seen)
        return KVView(read_keys, read_values, step.keys, step.mask, step.is_causal)

    def entries(self, layer: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values that one row still holds, (Hkv, n, D) each, in position order."""
        where = self.placement.held(row, length, self.store.device)
        keys, values = self.store.read(layer, where)
        return keys[0].transpose(0, 1), values[0].transpose(0, 1)

    def check_truncate(self, lengths: Sequence[int]) -> None:
        self.placement.check_truncate(lengths)

    def truncate(self, lengths: Sequence[int]) -> None:
        self.placement.truncate(lengths)
        self.forget_step()

    def check_select(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.placement.check_select(rows, lengths)

    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Row i becomes what row ``rows[i]`` was, with ``lengths[i]`` tokens."""
        slots = self.placement.select(rows, lengths)
        if slots:
            self.store.copy_rows(list(rows), slots)
        self.forget_step()

    def check_adopt(self, table: list[int], length: int) -> None:
        """Raise ``ValueError`` unless a row can start on ``length`` tokens in these blocks."""
        if not isinstance(self.placement, Paged):
            raise ValueError(
                f"adopt() needs a paged placement, but a group has a "
                f"{type(self.placement).__name__}; make the cache with Paged(rows, pool)"
            )
        self.placement.check_adopt(table, length)

    def adopt(self, row: int, table: list[int], length: int) -> None:
        """Let an empty row start on what the blocks of ``table`` hold."""
        assert isinstance(self.placement, Paged)  # see check_adopt
        self.placement.adopt(row, table)
        self.forget_step()

    def release(self, row: int) -> None:
        """Give an adopted table back."""
        assert isinstance(self.placement, Paged)  # or it had not been adopted
        self.placement.release(row)
        self.forget_step()

    def fill_unused(self, lengths: Sequence[int], value: float) -> None:
        for run in self.placement.take_unused(lengths):
            self.store.fill(*run, value)

    def forget_step(self) -> None:
        self._plan, self._step, self._to_come = None, None, set()
