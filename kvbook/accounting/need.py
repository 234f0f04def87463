"""How large a model's cache is for a batch of texts: what it needs, and what an engine reserves.

Knows: bytes, item by item, exactly, on one of the devices that share the work. Does not know:
weights, activations, what a framework's allocator adds; each answer says so.

``storage_bytes`` counts the slots of a store; this counts the tokens of texts.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from kvbook.accounting.formats import Format, bytes_of, parse_format
from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.layers import Layer
from kvbook.accounting.units import check_count, check_kind, in_words

BLOCK_TABLE_ENTRY_BYTES = 4  # a block number is a 32-bit integer
STATE_BITS = 32  # recurrent states are kept in float32, as their accumulators are


@dataclass(frozen=True)
class CacheSize:
    """The bytes of a cache for ``batch`` sequences of ``tokens`` tokens, on one device.

    ``devices`` share each layer's heads (tensor parallelism), ``dp`` groups of devices share the
    sequences (data parallelism), and ``cp`` devices share the tokens of each sequence (context
    parallelism, token by token in turn). Where a share is not whole, this is the fullest device.

    *Need* holds exactly the tokens that can still be read: a windowed layer at most W.
    *Reservation* is what an engine with one pool of blocks sets aside: whole blocks of
    ``block_size`` tokens for each sequence (of a source that cross-attention reads too), and
    windowed layers charged in full.

    Sizes in bytes are of the whole batch; slopes in bytes per token are of one sequence.

    >>> from kvbook.accounting.layers import full_layer
    >>> llama = CacheGeometry("Llama-3-8B", (full_layer(8, 128, 128),) * 32)
    >>> cache_size(llama, tokens=4096, batch=32).need_bytes == 16 * 1024**3
    True
    """

    geometry: CacheGeometry
    tokens: int
    batch: int
    format: Format
    block_size: int
    devices: int = 1
    dp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        name = self.geometry
        way_out = (
            f"gallery_model({name!r:.60}).geometry" if isinstance(name, str)
            else "CacheGeometry.from_hf(config), or gallery_model(name).geometry"
        )  # fmt: skip
        check_kind("geometry", self.geometry, CacheGeometry, way_out)
        check_kind("format", self.format, Format, "parse_format(name)")
        for count in ("tokens", "batch", "block_size", "devices", "dp", "cp"):
            check_count(count, getattr(self, count))

    # ---- One device's share

    @property
    def sequences(self) -> int:
        """Sequences whose cache is on this device: a whole number, rounded up."""
        return share(self.batch, self.dp)

    def layer_bytes(self, layer: Layer, tokens: int) -> int:
        """Bytes that ``layer`` takes here for ``tokens`` tokens of one sequence that are here."""
        check_layer(layer)
        check_count("tokens", tokens, 0)
        return sum(
            tokens * kept.heads_per_device(self.devices) * self.format.vector_bytes(kept.width)
            for kept in layer.per_token
        )

    def slots_held(self, layer: Layer, tokens: int) -> int:
        """Entries of a sequence of ``tokens`` tokens that ``layer`` still needs, on this device."""
        check_layer(layer)
        return share(layer.tokens_held(tokens), self.cp)

    def slots_written(self, layer: Layer, tokens: int) -> int:
        """Entries that ``layer`` writes for a sequence of ``tokens`` tokens, on this device."""
        check_layer(layer)
        return share(replace(layer, window=None).tokens_held(tokens), self.cp)

    def slots_reserved(self, layer: Layer) -> int:
        """Entries set aside in ``layer``: those of whole blocks of tokens, of text or source."""
        check_layer(layer)
        here = share(layer.tokens_kept_of(self.tokens), self.cp)
        return share(blocks_for(here, self.block_size) * self.block_size, layer.every)

    # ---- Totals

    @property
    def need_bytes(self) -> int:
        return sum(self.need.values())

    @property
    def reserved_bytes(self) -> int:
        return sum(self.reservation.values())

    @property
    def need(self) -> dict[str, int]:
        """Bytes needed, by what they hold: keys, values, latents, index keys, scales, …"""
        return self._items(self.sequences, lambda layer: self.slots_held(layer, self.tokens))

    @property
    def reservation(self) -> dict[str, int]:
        """Bytes reserved, by what they hold."""
        return self._items(self.sequences, self.slots_reserved)

    @property
    def need_bytes_stored_once(self) -> int | None:
        """Need if keys that serve as values were stored once; ``None`` where there are none."""
        once = self.geometry.stored_once
        return None if once is None else replace(self, geometry=once).need_bytes

    # ---- Slopes: one sequence, all layers

    @property
    def bytes_per_token(self) -> int:
        """What a token adds while every layer still grows; on average, where entries are rarer."""
        period = self.geometry.period
        return per_token(self._items(1, lambda layer: layer.entries_of(period)), period)

    @property
    def bytes_per_token_beyond_windows(self) -> int:
        """What a token adds once every window is full."""
        period = self.geometry.period
        grown = self._items(1, lambda layer: layer.entries_of(period) * (layer.window is None))
        return per_token(grown, period)

    @property
    def next_token_bytes(self) -> int:
        """What one more token adds to one sequence at this length, on the fullest device."""

        def growth(layer: Layer) -> int:
            return self.slots_held(layer, self.tokens + 1) - self.slots_held(layer, self.tokens)

        return sum(self._items(1, growth).values())

    # ---- Listed beside the totals

    @property
    def window_bytes_full(self) -> int:
        """Need of the windowed layers once their windows are full."""
        full = self._items(self.sequences, lambda layer: share(layer.window or 0, self.cp))
        return sum(full.values())

    @property
    def constant_state_bytes(self) -> int | None:
        """State of recurrent layers, in float32; ``None`` where its size is not known."""
        total = 0
        for layer, layers in self.geometry.groups:
            if layer.state is None:
                return None
            numbers = sum(kept.heads_per_device(self.devices) * kept.width for kept in layer.state)
            total += layers * bytes_of(numbers * STATE_BITS)
        return self.sequences * total

    @property
    def expanded_bytes_per_token(self) -> int | None:
        """A token's cost if latents were stored as the keys and values they stand for.

        ``None`` for a model without latents.
        """
        if not self.geometry.count("latent"):
            return None
        period = self.geometry.period
        grown = self._items(1, lambda layer: layer.entries_of(period), expanded=True)
        return per_token(grown, period)

    @property
    def block_table_bytes(self) -> int:
        """One block number per block of each sequence; all layers share the table."""
        here = share(self.tokens, self.cp)
        return self.sequences * blocks_for(here, self.block_size) * BLOCK_TABLE_ENTRY_BYTES

    # ---- In words

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What the numbers take for granted."""
        return tuple(assumptions(self))

    @property
    def exclusions(self) -> tuple[str, ...]:
        """What the numbers leave out."""
        return tuple(exclusions(self))

    def _items(
        self, batch: int, tokens_of: Callable[[Layer], int], expanded: bool = False
    ) -> dict[str, int]:
        """Bytes by name, if each layer holds ``tokens_of(layer)`` tokens of each sequence."""
        form, data = self.format, dict[str, int]()
        scaling = {"scales": 0, "zero points": 0}
        for layer, layers in self.geometry.groups:
            for kept in layer.expanded if expanded and layer.expanded else layer.per_token:
                vectors = batch * layers * tokens_of(layer) * kept.heads_per_device(self.devices)
                elements = vectors * form.data_bytes(kept.width)
                data[kept.name] = data.get(kept.name, 0) + elements
                scaling["scales"] += vectors * form.scale_bytes(kept.width)
                scaling["zero points"] += vectors * form.zero_bytes(kept.width)
        return data | {name: size for name, size in scaling.items() if size}


def cache_size(
    geometry: CacheGeometry,
    tokens: int,
    batch: int = 1,
    dtype: str | Format = "bfloat16",
    block_size: int = 16,
    devices: int = 1,
    dp: int = 1,
    cp: int = 1,
) -> CacheSize:
    """The cache of ``batch`` sequences with ``tokens`` tokens each, on one device.

    ``dtype`` is a name (``"bf16"``, ``"int4"``), bits (``"4bit"``) or a ``Format``. ``devices``
    share the heads of each layer (tensor parallelism), ``dp`` groups of devices the sequences,
    ``cp`` devices the tokens of each sequence.

    Raises ``ValueError`` for a geometry of another type (a name is not one), a count below 1, an
    unknown dtype, or a group that does not divide a head's width.
    """
    size = CacheSize(geometry, tokens, batch, parse_format(dtype), block_size, devices, dp, cp)
    _ = size.bytes_per_token  # a group that does not fit is an error now, not when read
    return size


def per_token(grown: dict[str, int], period: int) -> int:
    """Bytes per token of what ``period`` tokens add, rounded up to a whole byte."""
    return -(-sum(grown.values()) // period)


def check_size(size: object) -> None:
    """Raise ``ValueError`` for what is not a ``CacheSize``."""
    check_kind("size", size, CacheSize, "cache_size(…)")


def check_layer(layer: object) -> None:
    """Raise ``ValueError`` for what is not a ``Layer``."""
    check_kind("layer", layer, Layer, "those of a geometry")


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens, the last one perhaps in part."""
    return -(-tokens // block_size)


def share(whole: int, parts: int) -> int:
    """The largest of ``parts`` shares of a whole that are as equal as they can be."""
    return -(-whole // parts)


def assumptions(size: CacheSize) -> list[str]:
    geometry = size.geometry
    windowed = geometry.count("window") > 0
    words = [
        size.format.describe(),
        f"need: {each(size)}"
        + (", of which windowed layers hold at most W, the newest included" if windowed else ""),
        f"reservation: whole blocks of {in_words(size.block_size, 'token')} for each sequence"
        + (", windowed layers charged in full" if windowed else ""),
    ]
    if geometry.count("latent"):
        words.append("a latent layer stores one vector per token and no values")
    if any(kept.name == "index keys" for layer, _ in geometry.groups for kept in layer.per_token):
        words.append("index keys have the cache's format; engines may choose another for them")
    words += geometry.assumptions
    if geometry.count("recurrent"):
        words.append("recurrent state is counted in float32, and a convolution keeps k - 1 inputs")
    if size.devices > 1:
        words.append(
            f"sizes are for one of {size.devices:,} devices, with KV heads / {size.devices:,} "
            "rounded up; where there are fewer heads than devices, heads and latents are repeated"
        )
    if size.dp > 1:
        words.append(
            f"{in_words(size.dp, 'group')} of devices share the sequences; this device has "
            f"{in_words(size.sequences, 'sequence')}"
        )
    if size.cp > 1:
        words.append(
            f"{in_words(size.cp, 'device')} share the tokens of each sequence in turn; need, "
            "reservation and windows are those of the fullest; states are on each of them"
        )
    if geometry.max_positions is not None and size.tokens > geometry.max_positions:
        words.append(
            f"{size.tokens:,} tokens are more than the model's {geometry.max_positions:,} positions"
        )
    return words


def exclusions(size: CacheSize) -> list[str]:
    geometry = size.geometry
    words = [
        "weights, activations and workspaces of kernels",
        "allocator rounding, blocks kept for prefix reuse, tokens drafted ahead",
        "block tables (listed apart)",
    ]
    if geometry.count("recurrent"):
        known = size.constant_state_bytes is not None
        words.append(
            "constant state of recurrent layers "
            + ("(listed apart)" if known else "(this config does not say how large it is)")
        )
    if geometry.extra_layers:
        words.append(
            f"caches of extra layers that predict further tokens ({geometry.extra_layers} of them)"
        )
    return words


def each(size: CacheSize) -> str:
    """The batch in words."""
    if size.batch == 1:
        return f"1 sequence with {in_words(size.tokens, 'token')}"
    return f"{size.batch:,} sequences, each with {in_words(size.tokens, 'token')}"
