"""Layers that are cached alike: one placement, one store, one kind of layer.

Knows: what one forward pass does to its slots. Does not know: lengths (the cache keeps them), which
layers of the model these are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvbook.cache.bound_table import BoundTable
from kvbook.cache.layer_kind import LayerKind
from kvbook.cache.mask import AttentionMask, attention_mask
from kvbook.cache.placement import Placement, Plan
from kvbook.cache.sizes import check_class
from kvbook.cache.step import Step
from kvbook.cache.store import Store
from kvbook.cache.view import KVView, View


class CacheGroup:
    """A placement (position to slot) and a store (slot to bytes) for so many layers of a kind."""

    def __init__(self, placement: Placement, store: Store) -> None:
        check_class("placement", placement, Placement, "Contiguous(rows, capacity), say")
        check_class("store", store, Store, "DenseStore(kind, layers, rows, slots), say")
        if placement.store_shape != (store.rows, store.slots):
            rows, slots = placement.store_shape
            raise ValueError(
                f"the placement has {rows} rows of {slots} slots, the store "
                f"{store.rows} rows of {store.slots}; make both for the same numbers"
            )
        self._check_write_size(placement, store)
        placement.check_window(store.kind.window, store.kind.sinks)
        self.placement, self.store = placement, store
        self._plan: Plan | None = None
        self._mask: AttentionMask | None = None
        self._new_shape = (0, 0, 0)  # rows, heads and tokens of the present step
        self._to_come: set[int] = set()  # layers that the present step has not reached yet

    def _check_write_size(self, placement: Placement, store: Store) -> None:
        if store.write_size > 1:
            raise ValueError(
                f"the store writes {store.write_size} tokens at a time, but tokens come one by "
                "one; put a recent tail before it: TailedGroup"
            )

    @property
    def rows(self) -> int:
        return self.placement.rows

    @property
    def capacity(self) -> int | None:
        return self.placement.capacity

    @property
    def rollback(self) -> int | None:
        """Tokens that can be taken back at any time; ``None``: all of them."""
        return self.placement.rollback

    @property
    def kind(self) -> LayerKind:
        return self.store.kind

    @property
    def layers(self) -> int:
        return self.store.layers

    @property
    def device(self) -> torch.device:
        return self.store.device

    @property
    def tensors(self) -> list[Tensor]:
        """The storage itself."""
        return self.store.tensors

    @property
    def layers_to_come(self) -> int:
        """Layers that the present step has not reached; 0 once it is finished."""
        return len(self._to_come)

    def waits_for(self, layer: int) -> bool:
        """Whether the present step has not reached this layer yet."""
        return layer in self._to_come

    def used_bytes(self, lengths: Sequence[int]) -> int:
        used = self.placement.slots_used(lengths)  # whole writes, all of one size
        return self.store.allocated_bytes * used // (self.store.rows * self.store.slots)

    def check_room(self, step: Step) -> None:
        self.placement.check_room(step)

    def begin(self, step: Step) -> None:
        """A step is under way: from now on it is unfinished, whatever happens."""
        self._plan, self._to_come = None, set(range(self.layers))
        self._new_shape = (step.rows, self.kind.kv_heads, step.T)

    def prepare(self, step: Step) -> None:
        """Settle slots and mask of one forward pass, before its first layer."""
        plan = self._plan_step(step)
        self._mask = attention_mask(step, plan.positions, self.kind, plan.in_order)
        self._plan = plan

    def _plan_step(self, step: Step) -> Plan:
        """Ask the placement, and bring the store into the state that the plan counts on."""
        plan = self.placement.plan(step)
        for source, target in plan.copies:
            self.store.copy_slots(0, source, target)
        for run in plan.stale:
            self.store.fill(*run, 0.0)
        return plan

    def update(self, layer: int, keys: Tensor, values: Tensor) -> View:
        """Store new keys and values, (B, Hkv, T, D), of the group's layer; return what it reads."""
        self._check_new(layer, keys, values)
        view = self._store_and_view(layer, keys, values)
        self._to_come.remove(layer)
        return view

    def _store_and_view(self, layer: int, keys: Tensor, values: Tensor) -> View:
        plan, seen = self._plan, self._mask
        assert plan is not None
        assert seen is not None
        read = plan.write_and_read(self.store, layer, keys.transpose(1, 2), values.transpose(1, 2))
        read_keys, read_values = (tensor.transpose(1, 2) for tensor in read)
        return KVView(read_keys, read_values, seen.positions, seen.mask, seen.is_causal)

    def _check_new(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Raise ``ValueError`` unless these are the keys and values that the step waits for."""
        if self._plan is None or layer not in self._to_come:
            raise ValueError(
                "update() of a layer without reserve(), or a second time after one: call "
                "reserve() once per forward pass, and then update() once per layer"
            )
        kind = self.kind
        for name, new, width in (("keys", keys, kind.key_dim), ("values", values, kind.value_dim)):
            check_class(name, new, Tensor, "(B, Hkv, T, D)")
            fits = new.shape == (*self._new_shape, width)
            if not fits or new.dtype != kind.dtype or new.device != self.device:
                raise ValueError(
                    f"the cache waits for {name} of shape {(*self._new_shape, width)}, "
                    f"{kind.dtype} on {self.device}, got {tuple(new.shape)}, {new.dtype} on "
                    f"{new.device}; make the cache for this model as it is now, and leave autocast"
                )
            if new.requires_grad:
                raise ValueError(
                    f"the {name} ask for gradients, and a cache that holds them would hold every "
                    "step's graph; run the model under torch.no_grad() or inference_mode()"
                )

    def entries(self, layer: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values that one row still holds, (Hkv, n, D) each, in position order: copies."""
        where = self.placement.slots_of(row, length, self.store.device)
        keys, values = self.store.read(layer, where)
        return keys[0].transpose(0, 1).clone(), values[0].transpose(0, 1).clone()

    def check_truncate(self, lengths: Sequence[int]) -> None:
        self.placement.check_truncate(lengths)

    def truncate(self, lengths: Sequence[int]) -> None:
        self.placement.truncate(lengths)
        self.forget_step()

    def reset(self) -> None:
        """Forget everything, in all rows."""
        self.placement.reset()
        self.forget_step()

    def check_select(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        self.placement.check_select(rows, lengths)

    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Row i becomes what row ``rows[i]`` was, with ``lengths[i]`` tokens."""
        slots = self.placement.select(rows, lengths)
        if slots:
            self.store.copy_rows(list(rows), slots)
        self.forget_step()

    def check_bind(self, tables: Sequence[BoundTable], lengths: Sequence[int]) -> None:
        self.placement.check_bind(tables, lengths)

    def bind(self, tables: Sequence[BoundTable]) -> None:
        """Let the batch be these rows, from now on."""
        self.placement.bind(tables)
        self.forget_step()

    def fill_unused(self, lengths: Sequence[int], value: float) -> None:
        for run in self.placement.unused_runs(lengths):
            self.store.fill(*run, value)

    def forget_step(self) -> None:
        self._plan, self._mask, self._to_come = None, None, set()
