"""One size, several spellings: finding a field in a config without guessing.

Knows: the names that a size goes by, what has been read, and how to say what is wrong with a
value. Does not know: what a field means for a cache or a model.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvbook.config.counts import check_count, shown

# The field of most families first, then GPT-2's, Falcon's and others, then those of vendors' own
# files.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "block_count")
WIDTH = ("hidden_size", "n_embd", "n_embed", "d_model", "dim", "emb_dim")
HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "head_count",
)  # fmt: skip
KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num", "kv_n_heads",
    "n_kv_heads", "num_query_groups", "num_attention_groups", "num_kv_groups", "num_heads_kv",
    "head_count_kv",
)  # fmt: skip
HEAD_WIDTH = ("head_dim", "kv_channels", "attention_head_dim", "dim_head", "d_kv")
VALUE_WIDTH = ("v_head_dim",)
WINDOW = (
    "sliding_window", "sliding_window_size", "window_size", "attention_window_size",
)  # fmt: skip
PATTERN = ("sliding_window_pattern", "_sliding_window_pattern", "global_attn_every_n_layers")
POSITIONS = ("max_position_embeddings", "n_positions", "model_max_length")

# Far above any model, and low enough that a typing error cannot fill the memory.
MOST_LAYERS = 10_000
LARGEST = 10**9


class Fields(Mapping[str, Any]):
    """The fields of a config, and which of them somebody has read.

    Asking whether a name is there does not count as reading its value.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self.read: set[str] = set()
        self.inside: dict[str, Fields] = {}

    def __getitem__(self, name: str) -> Any:
        value = self._values[name]
        self.read.add(name)
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def has(self, name: str) -> bool:
        """Whether the field is there and says something (reading it later is still to be done)."""
        return self._values.get(name) is not None

    def idle(self, *names: str) -> None:
        """These fields change nothing here, and the caller knows why."""
        self.read.update(names)

    def object(self, name: str) -> "Fields | None":
        """The object under ``name``; what is read of it is remembered too."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be an object, got {value!r:.40}")
        return self.inside.setdefault(name, Fields(value))

    def unread(self) -> Iterator[tuple[str, Any]]:
        """Names and values that nobody has read."""
        for name, value in self._values.items():
            if name not in self.read:
                yield name, value


def find(fields: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    """The first of ``names`` that has a value, and the value; ``(names[0], None)`` if none has.

    Raises ``ValueError`` if two of them have different values.
    """
    found = [(name, fields[name]) for name in names if fields.get(name) is not None]
    for name, value in found[1:]:
        if value != found[0][1]:
            raise ValueError(
                f"{found[0][0]} {found[0][1]!r:.40} and {name} {value!r:.40} contradict each "
                "other; keep one of the two fields"
            )
    return found[0] if found else (names[0], None)


def optional_count(
    fields: Mapping[str, Any], *names: str, low: int = 1, high: int = LARGEST
) -> int | None:
    """A whole number from ``low`` under one of ``names``, or ``None`` where none has a value."""
    name, value = find(fields, names)
    return None if value is None else check_count(name, value, low, high)


def count(fields: Mapping[str, Any], *names: str, high: int = LARGEST) -> int:
    """A positive whole number under one of ``names``; ``ValueError`` where none has a value."""
    value = optional_count(fields, *names, high=high)
    if value is None:
        also = f" (or {', '.join(names[1:])})" if names[1:] else ""
        raise ValueError(
            f"the config has no {names[0]}{also}; add it, nothing else says what it is"
        )
    return value


def counts(
    fields: Mapping[str, Any], names: Sequence[str], layers: int, default: int | None
) -> list[int]:
    """One number per layer: from a list of that length, from one number, or the default."""
    name, value = find(fields, names)
    if not isinstance(value, list | tuple):
        one = default if value is None else check_count(name, value, 1, LARGEST)
        return [count(fields, *names) if one is None else one] * layers
    check_length(name, value, layers)
    return [check_count(f"{name}[{i}]", item, 1, LARGEST) for i, item in enumerate(value)]


def divide(
    fields: Mapping[str, Any], above: Sequence[str], below: Sequence[str], result: str
) -> int:
    """A field that is missing, as a quotient of two that are there. It must be whole."""
    a, b = count(fields, *above), count(fields, *below)
    if a % b:
        raise ValueError(
            f"the config has no {result}, and {find(fields, above)[0]} {shown(a)} is not a "
            f"multiple of {find(fields, below)[0]} {shown(b)}; add {result}"
        )
    return a // b


def flag(fields: Mapping[str, Any], name: str) -> bool:
    """A field that is true or false; missing or null is false."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r:.40}")
    return bool(value)


def check_length(name: str, value: object, layers: int) -> None:
    """Raise ``ValueError`` unless ``value`` is a list, or a string, with an entry per layer."""
    if not isinstance(value, list | tuple | str):
        raise ValueError(f"{name} must have an entry for each layer, got {value!r:.40}")
    if len(value) != layers:
        raise ValueError(
            f"{name} has {len(value)} items, but num_hidden_layers is {layers}; one of the two is "
            "wrong"
        )
