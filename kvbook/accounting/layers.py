"""What one layer keeps: vectors per token, or a state of constant size.

Knows: KV heads, widths, windows, strides. Does not know: how many layers there are, bytes, where
the numbers come from.
"""

from dataclasses import dataclass, replace

from kvbook.accounting.units import check_count, check_text, check_tuple, quoted

KINDS = (
    "full", "window", "chunk", "latent", "compressed", "cross", "recurrent", "shared", "none",
)  # fmt: skip


@dataclass(frozen=True)
class Kept:
    """``heads`` vectors of ``width`` elements under one name, such as keys."""

    name: str
    heads: int
    width: int

    def __post_init__(self) -> None:
        check_text("name", self.name)
        check_count(f"heads of {self.name}", self.heads)
        check_count(f"width of {self.name}", self.width)

    def heads_per_device(self, devices: int) -> int:
        """Heads on each of ``devices`` that share the model.

        Rounded up: with fewer heads than devices each device holds one, so heads are repeated,
        and a single vector (a latent) is on every device.
        """
        return -(-self.heads // check_count("devices", devices))


@dataclass(frozen=True)
class Layer:
    """One cache of one layer of a model. Make it with the functions below.

    A layer that keeps two things (a window and a compressed history, say) is two records.

    ``kind`` is one of ``KINDS``.
    ``per_token`` is kept of each token, ``window`` (W) of at most that many tokens, the newest
    included. With ``every`` above 1, so many tokens make one entry; a rest makes none.
    ``source_tokens`` entries are kept whatever the text's length (cross-attention).
    ``state`` is kept once per sequence; ``None`` means that there is one and its size is not
    known. ``expanded`` is what a latent stands for: the keys and values of every query head.
    ``stored_once`` is what is enough where ``per_token`` holds the same vector twice, as engines
    do with keys that serve as values.
    """

    kind: str
    per_token: tuple[Kept, ...] = ()
    window: int | None = None
    state: tuple[Kept, ...] | None = ()
    expanded: tuple[Kept, ...] = ()
    every: int = 1
    source_tokens: int | None = None
    stored_once: tuple[Kept, ...] = ()

    def __post_init__(self) -> None:
        check_layer_kind(self.kind)
        check_tuple("per_token", self.per_token, Kept)
        check_tuple("expanded", self.expanded, Kept)
        check_tuple("stored_once", self.stored_once, Kept)
        if self.state is not None:
            check_tuple("state", self.state, Kept)
        check_count("every", self.every)
        for name in ("window", "source_tokens"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))

    def tokens_held(self, tokens: int) -> int:
        """Entries kept of ``tokens`` tokens: those that the next query can still see from here."""
        check_count("tokens", tokens, 0)
        if self.source_tokens is not None:
            return self.source_tokens
        entries = tokens // self.every
        return entries if self.window is None else min(entries, self.window)

    def entries_of(self, tokens: int) -> int:
        """Entries that ``tokens`` more tokens add while no window is full."""
        check_count("tokens", tokens, 0)
        return 0 if self.source_tokens is not None else tokens // self.every

    def tokens_kept_of(self, tokens: int) -> int:
        """Tokens that have a place here, windows left aside: those of the text or of the source."""
        check_count("tokens", tokens, 0)
        return tokens if self.source_tokens is None else self.source_tokens

    def with_index_keys(self, width: int) -> "Layer":
        """The same layer with the keys of a sparse-attention indexer: one vector per token."""
        keys = (Kept("index keys", 1, width),)
        expanded = self.expanded + keys if self.expanded else ()
        return replace(self, per_token=self.per_token + keys, expanded=expanded)

    def with_keys_as_values(self) -> "Layer":
        """The same layer, whose values are made from its keys: one of the two would be enough."""
        return replace(self, stored_once=self.per_token[:1])


def check_layer_kind(kind: object) -> None:
    """Raise ``ValueError`` for what is not one of ``KINDS``."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {quoted(kind)}")


def full_layer(kv_heads: int, key_width: int, value_width: int) -> Layer:
    """Every past token is kept: ``kv_heads`` keys and as many values."""
    keys, values = Kept("keys", kv_heads, key_width), Kept("values", kv_heads, value_width)
    return Layer("full", (keys, values))


def window_layer(window: int, kv_heads: int, key_width: int, value_width: int) -> Layer:
    """The last ``window`` tokens are kept, the current one included."""
    check_count("window", window)  # not None, as a record may have
    full = full_layer(kv_heads, key_width, value_width)
    return replace(full, kind="window", window=window)


def chunk_layer(chunk: int, kv_heads: int, key_width: int, value_width: int) -> Layer:
    """Tokens see their own chunk of ``chunk`` tokens: room for one chunk is kept (Llama 4)."""
    check_count("chunk", chunk)
    return replace(window_layer(chunk, kv_heads, key_width, value_width), kind="chunk")


def cross_layer(source_tokens: int, kv_heads: int, key_width: int, value_width: int) -> Layer:
    """Keys and values of the source: computed once, and constant while the answer grows."""
    check_count("source_tokens", source_tokens)
    keys = Kept("cross-attention keys", kv_heads, key_width)
    values = Kept("cross-attention values", kv_heads, value_width)
    return Layer("cross", (keys, values), source_tokens=source_tokens)


def compressed_layer(every: int, width: int, index_width: int | None = None) -> Layer:
    """One vector, both key and value, per ``every`` tokens; with an indexer one index key too.

    (DeepSeek-V4's technical report, sections 2.3.1 and 2.3.2, as written in transformers.)
    """
    kept = Kept("compressed entries", 1, width)
    keys = () if index_width is None else (Kept("index keys", 1, index_width),)
    return Layer("compressed", (kept, *keys), every=every)


def latent_layer(
    rank: int, rope_width: int, heads: int, nope_width: int, value_width: int
) -> Layer:
    """Multi-head latent attention: one vector of rank + rope_width elements per token.

    Its first ``rank`` elements serve as values, so no values are stored. Expanded, each of
    ``heads`` has a key of nope_width + rope_width and a value of value_width elements.
    (DeepSeek-V2, arXiv 2405.04434, section 2.1.)
    """
    check_count("rank", rank)
    check_count("rope_width", rope_width)
    check_count("nope_width", nope_width)
    latent = Kept("latents", 1, rank + rope_width)
    keys = Kept("keys", heads, nope_width + rope_width)
    return Layer("latent", (latent,), expanded=(keys, Kept("values", heads, value_width)))


def recurrent_layer(state: tuple[Kept, ...] | None) -> Layer:
    """A linear-attention, state-space or convolution layer: nothing grows with the text."""
    return Layer("recurrent", state=state)


def shared_layer() -> Layer:
    """A layer that reads the cache of an earlier one and keeps nothing of its own."""
    return Layer("shared")


def empty_layer() -> Layer:
    """A layer that mixes no tokens, such as an MLP that counts as a layer of its own."""
    return Layer("none")
