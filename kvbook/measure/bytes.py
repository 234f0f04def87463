"""Bytes that operations read and write, counted while they run.

Knows: operands and results of every operation below autograd, and which storage each belongs to.
Does not know: closed formulas (those are in ``kvbook.accounting.traffic``), processor caches,
time, models.

The convention. Every operation reads each of its operands once and writes each of its results
once.

- A view moves nothing.
- An operation in place reads and writes its target; ``copy_``, ``fill_`` and their like, and
  results handed in as ``out=``, only write it.
- A gather (an embedding, an index) reads the elements it takes, not the table, and the indices;
  ``index_put_`` writes the elements it replaces.
- An operand that is passed twice is read once; an expanded dimension is read once.
- Storage that is allocated and left as it is (``empty``) moves nothing.

Not counted: what an operator keeps inside (a kernel that reads its input twice, a workspace),
write-allocation, traffic that a processor cache serves. On the other hand, a value that one
operation leaves in a cache for the next is counted as written and read.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvbook.model.arguments import check_function, check_is

ACTIVATIONS = "activations"  # whatever belongs to no named group


@dataclass(frozen=True)
class OperationBytes:
    """What one call of one operation moved in one group."""

    operation: str  # as PyTorch names it, such as "mm"
    group: str
    read: int
    written: int


@dataclass(frozen=True)
class ByteCount:
    """Everything that moved, in the order in which it ran."""

    rows: tuple[OperationBytes, ...]

    def read(self, group: str | None = None, operation: str | None = None) -> int:
        """Bytes read, of one group and of one operation where they are named."""
        return sum(row.read for row in self._of(group, operation))

    def written(self, group: str | None = None, operation: str | None = None) -> int:
        """Bytes written, likewise."""
        return sum(row.written for row in self._of(group, operation))

    @property
    def total(self) -> int:
        return self.read() + self.written()

    def by_operation(self, group: str | None = None) -> dict[str, tuple[int, int]]:
        """Bytes read and written by each operation, largest first."""
        names = {row.operation for row in self._of(group, None)}
        sums = {name: (self.read(group, name), self.written(group, name)) for name in names}
        return dict(sorted(sums.items(), key=lambda item: (-sum(item[1]), item[0])))

    def _of(self, group: str | None, operation: str | None) -> list[OperationBytes]:
        return [
            row for row in self.rows
            if group in (None, row.group) and operation in (None, row.operation)
        ]  # fmt: skip


def count_bytes(
    run: Callable[[], Any], groups: Mapping[str, Iterable[Tensor]] | None = None
) -> ByteCount:
    """Call ``run()`` once and count the bytes of its operations.

    ``groups`` names tensors, such as ``{"weights": model.parameters()}``: what is read or written
    in their storage, through whatever view, counts for that group. The rest are activations.
    Raises ``ValueError`` if two groups share a storage. What a model makes once, on its first
    call (rotary tables), is counted with that call: run it once before.

    >>> count = count_bytes(lambda: torch.ones(3) + torch.ones(3))
    >>> count.by_operation()
    {'add': (24, 12), 'ones': (0, 24)}
    """
    check_function("run", run)
    with _Counter(_owners({} if groups is None else groups)) as counter:
        run()
    return ByteCount(tuple(counter.rows))


# ---- The counter itself

GATHERS = {"embedding", "index", "index_select", "gather"}  # first operand: a table
OVERWRITES = {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_"}  # target not read
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class _Counter(TorchDispatchMode):
    def __init__(self, owners: Mapping[int, str]) -> None:
        super().__init__()
        self.owners = owners
        self.rows: list[OperationBytes] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:  # composite operations arrive whole in inference mode: count their pieces
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        read, written = _moved(func, args, kwargs, result)
        self._add(func.overloadpacket.__name__, read, written)
        return result

    def _add(self, name: str, read: "_Amounts", written: "_Amounts") -> None:
        sums: dict[str, list[int]] = {}
        for column, amounts in enumerate((read, written)):
            for tensor, size in amounts:
                group = self.owners.get(_storage(tensor), ACTIVATIONS)
                sums.setdefault(group, [0, 0])[column] += size
        self.rows += [OperationBytes(name, group, *pair) for group, pair in sums.items()]


_Amounts = list[tuple[Tensor, int]]  # whose storage, and how many bytes


def _moved(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
) -> tuple[_Amounts, _Amounts]:
    """What one call reads and what it writes, by the convention above."""
    name = func.overloadpacket.__name__
    operands, targets = _tensors((args, kwargs)), _targets(func, args, kwargs)
    held = {_storage(tensor) for tensor in operands}
    fresh = [tensor for tensor in _tensors(result) if _storage(tensor) not in held]
    if name in ALLOCATIONS or (not fresh and not targets and _tensors(result)):
        return [], []  # an allocation; a view, or an operation that returned its operand
    if name == "index_put_":
        return _index_put(*args, **kwargs)
    if name in GATHERS:
        table, *others = operands
        return [(table, fresh[0].nbytes), *_whole(others)], _whole(fresh)
    if name.endswith("_like") or name.startswith("new_"):
        return [], _whole(fresh)  # the operand lends its shape only
    unread = {id(tensor) for tensor in targets} if name in OVERWRITES else _outs(func, kwargs)
    read = _distinct([tensor for tensor in operands if id(tensor) not in unread])
    return _whole(read), _whole([*targets, *fresh])


def _index_put(
    target: Tensor, indices: list[Tensor | None], values: Tensor, accumulate: bool = False
) -> tuple[_Amounts, _Amounts]:
    replaced = torch.ops.aten.index.Tensor(target, indices).nbytes
    read = _whole([values, *_tensors(indices)])
    return read + ([(target, replaced)] if accumulate else []), [(target, replaced)]


def _targets(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Operands that the operation writes to, as its schema says."""
    targets: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            targets += _tensors(value)
    return targets


def _outs(func: Any, kwargs: dict[str, Any]) -> set[int]:
    """Operands that were handed in as ``out=``."""
    names = [argument.name for argument in func._schema.arguments if argument.is_out]
    return {id(tensor) for name in names for tensor in _tensors(kwargs.get(name))}


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _whole(tensors: list[Tensor]) -> _Amounts:
    return [(tensor, _bytes_in_memory(tensor)) for tensor in tensors]


def _bytes_in_memory(tensor: Tensor) -> int:
    """Bytes of the elements that exist: a dimension of stride 0 is one element, repeated."""
    if tensor.numel() == 0:
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(size for size, stride in pairs if stride != 0) * tensor.element_size()


def _distinct(tensors: list[Tensor]) -> list[Tensor]:
    """Each tensor once, however often it was passed."""
    seen = {(t.data_ptr(), tuple(t.shape), t.stride(), t.dtype): t for t in tensors}
    return list(seen.values())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _owners(groups: Mapping[str, Iterable[Tensor]]) -> dict[int, str]:
    owners: dict[int, str] = {}
    check_is("groups", groups, Mapping)
    for group, tensors in groups.items():
        check_is(f"the tensors of {group!r:.40}", tensors, Iterable)
        for tensor in tensors:
            check_is(f"a tensor of {group!r:.40}", tensor, Tensor)
            owner = owners.setdefault(_storage(tensor), group)
            if owner != group:
                raise ValueError(
                    f"groups {owner!r} and {group!r} share a storage; name each storage once"
                )
    return owners
