"""Element formats: how many bits a number takes, and what its scale adds.

Knows: bits per element, groups, scales and zero points. Does not know: tensors, layers, tokens.

One group is a run of elements of one head's vector, of one token or of several consecutive
tokens. A vector takes whole bytes.

A name means one thing. ``int8``, ``int4``, ``float8`` and ``float4`` are what kvbook's stores keep
with the codecs INT8, INT4, FLOAT8 and FLOAT4, to the byte (``store_format``); engines' formats have
the names that engines give them: ``fp8``, ``fp8_per_token_head``, ``nvfp4``, ``q8_0``.
"""

import re
from dataclasses import dataclass, replace

from kvbook.accounting.nearest import hint
from kvbook.accounting.units import check_count, check_text, in_words, quoted

HEAD = "head"  # as a group: all elements of one head's vector


@dataclass(frozen=True)
class Format:
    """``bits`` per element; with a ``group``, one scale (and zero point) per so many elements.

    The group ``"head"`` is a whole vector. ``shared`` tells of scales that belong to whole tensors,
    for which no token pays. ``group_tokens`` consecutive tokens share the scales of each group: 1
    is a scale per token, and a group of 1 element over 32 tokens is a scale per channel.

    Example: 4 bits in groups of 32 with a 16-bit scale and a 16-bit zero point take 5 bits per
    element in all, so "4-bit" is 3.2 times below 16 bits, not 4.

    >>> int4 = Format("int4", 4, group=32, scale_bits=16, zero_bits=16)
    >>> int4.data_bytes(128), int4.scale_bytes(128), int4.zero_bytes(128)
    (64, 8, 8)
    """

    name: str
    bits: int
    group: int | str | None = None
    scale_bits: int = 0
    zero_bits: int = 0
    group_tokens: int = 1
    shared: str = ""

    def __post_init__(self) -> None:
        check_text("name", self.name)
        check_text("shared", self.shared)
        check_count("bits", self.bits, 1, 64)
        check_count("scale_bits", self.scale_bits, 0, 64)
        check_count("zero_bits", self.zero_bits, 0, 64)
        check_count("group_tokens", self.group_tokens)
        if self.group not in (None, HEAD):
            check_count("group", self.group)
        if (self.group is None) != (self.scale_bits + self.zero_bits == 0):
            raise ValueError(
                f"scales belong to groups, got group {self.group} with {self.scale_bits}-bit "
                f"scales and {self.zero_bits}-bit zero points; give both or neither"
            )
        if self.group is None and self.group_tokens > 1:
            raise ValueError(
                f"{self.group_tokens} tokens cannot share scales that do not exist; give a group "
                "and scale_bits too"
            )

    def with_group(self, group: int) -> "Format":
        """The same format with another group size. A format without scales has no groups."""
        if self.group is None or self.group == HEAD:
            raise ValueError(
                f"{self.name} has no groups within a vector, so no group size, got {quoted(group)};"
                f" formats with groups: {', '.join(grouped())}"
            )
        return replace(self, group=check_count("group", group))

    def per_channel(self, tokens: int) -> "Format":
        """The same format with a scale per channel, shared by so many consecutive tokens."""
        if self.group is None:
            raise ValueError(
                f"{self.name} has no scales to share, got {quoted(tokens)} tokens; formats with "
                f"groups: {', '.join(grouped())}"
            )
        return replace(self, group=1, group_tokens=check_count("group_tokens", tokens))

    def data_bytes(self, width: int) -> int:
        """Bytes of the elements of one vector."""
        return bytes_of(check_count("width", width, 0) * self.bits)

    def scale_bytes(self, width: int, tokens: int = 1) -> int:
        """Bytes of the scales of ``tokens`` consecutive vectors: whole groups of tokens only."""
        return self._token_groups(tokens) * bytes_of(self._groups(width) * self.scale_bits)

    def zero_bytes(self, width: int, tokens: int = 1) -> int:
        """Bytes of the zero points of ``tokens`` consecutive vectors, as ``scale_bytes``."""
        return self._token_groups(tokens) * bytes_of(self._groups(width) * self.zero_bits)

    def vector_bytes(self, width: int) -> int:
        """Everything that one vector of ``width`` elements takes."""
        return self.data_bytes(width) + self.scale_bytes(width) + self.zero_bytes(width)

    def describe(self) -> str:
        """The format in words."""
        words = f"{self.name}: {in_words(self.bits, 'bit')} per element"
        if self.group is None:
            return f"{words}, {self.shared}" if self.shared else words
        zero = f" and {bits_of_a(self.zero_bits)} zero point" if self.zero_bits else ""
        scale = f"{bits_of_a(self.scale_bits)} scale{zero}"
        tokens = "one token" if self.group_tokens == 1 else f"{self.group_tokens} tokens together"
        if self.group == HEAD:
            return f"{words}, and {scale} for each head of {tokens}"
        elements = "element" if self.group == 1 else f"{self.group} elements"
        return f"{words}, and {scale} for each {elements} of one head's vector of {tokens}"

    def _groups(self, width: int) -> int:
        check_count("width", width, 0)
        if self.group is None:
            return 0
        if not isinstance(self.group, int):
            return 1 if width else 0  # one scale for the whole vector
        if width % self.group:
            raise ValueError(
                f"a group of {self.group} does not divide a vector of {width} elements; "
                f"use a divisor of {width}"
            )
        return width // self.group

    def _token_groups(self, tokens: int) -> int:
        check_count("tokens", tokens, 0)
        if tokens % self.group_tokens:
            raise ValueError(
                f"{self.name} shares each scale among {self.group_tokens} tokens, so {tokens} "
                f"cannot be counted alone; give a multiple of {self.group_tokens}, or count whole "
                "slots with storage_bytes()"
            )
        return tokens // self.group_tokens


def bits_of_a(bits: int) -> str:
    """a 16-bit, an 8-bit."""
    return f"{'an' if bits in (8, 11, 18) else 'a'} {bits}-bit"


def bytes_of(bits: int) -> int:
    """Whole bytes that hold so many bits."""
    return -(-bits // 8)


def store_format(name: str, cache: "str | Format" = "bfloat16") -> Format:
    """What a store of kvbook keeps with the codec of that name, in a cache of type ``cache``.

    ``name`` is int8, int4, float8 or float4. One scale per token and 32 channels: a peak in the
    type of the cache (and a lowest value beside it in int4), or one byte, E8M0, in float4.
    ``with_group`` and ``per_channel`` give other tiles. Raises ``ValueError`` for another name, and
    for a cache whose type has scales of its own.

    >>> store_format("int8", "float32").scale_bytes(64)
    8
    """
    if not isinstance(name, str) or name not in STORES:
        raise ValueError(f"no codec named {quoted(name)}; allowed: {', '.join(STORES)}")
    bits, scales, fixed = STORES[name]
    whole = parse_format(cache)
    if whole.group is not None or whole.shared or whole.bits < 16:
        raise ValueError(
            f"the type of a cache is a plain number format, got {whole.name}; allowed: float64, "
            "float32, float16, bfloat16"
        )
    scale = fixed or whole.bits
    return Format(name, bits, 32, scale, zero_bits=scale if scales == 2 else 0)


# Codec -> bits of an element, numbers kept per tile, bits of such a number (0: those of the cache).
STORES = {"int8": (8, 1, 0), "int4": (4, 2, 0), "float8": (8, 1, 0), "float4": (4, 1, 8)}

PER_TENSOR = "and one scale for each tensor, for which no token pays"
PER_HEAD = "and one scale for each head of a tensor, for which no token pays"

# mxfp4: OCP Microscaling Formats v1.0, an 8-bit exponent per 32 elements. nvfp4: an E4M3 scale per
# 16 elements, the form of vLLM's cache (vllm/v1/kv_cache_interface.py, 2026; a tensor's own scale
# costs no token). fp8 and *_per_token_head: the same file, a 32-bit scale per token and head in the
# latter. q8_0 to iq4_nl: blocks of 32 of llama.cpp (ggml-common.h, 2026).
FORMATS = {
    known.name: known
    for known in (
        Format("float64", 64),
        Format("float32", 32),
        Format("float16", 16),
        Format("bfloat16", 16),
        Format("float8_e4m3", 8, shared=PER_TENSOR),
        Format("float8_e5m2", 8, shared=PER_TENSOR),
        Format("fp8_per_head", 8, shared=PER_HEAD),
        Format("fp8_per_token_head", 8, group=HEAD, scale_bits=32),
        Format("int8_per_token_head", 8, group=HEAD, scale_bits=32),
        Format("int8", 8, group=32, scale_bits=16),
        Format("int4", 4, group=32, scale_bits=16, zero_bits=16),
        Format("float8", 8, group=32, scale_bits=16),
        Format("float4", 4, group=32, scale_bits=8),
        Format("mxfp4", 4, group=32, scale_bits=8),
        Format("nvfp4", 4, group=16, scale_bits=8),
        Format("q8_0", 8, group=32, scale_bits=16),
        Format("q5_1", 5, group=32, scale_bits=16, zero_bits=16),
        Format("q5_0", 5, group=32, scale_bits=16),
        Format("q4_1", 4, group=32, scale_bits=16, zero_bits=16),
        Format("q4_0", 4, group=32, scale_bits=16),
        Format("iq4_nl", 4, group=32, scale_bits=16),
    )
}
ALIASES = {
    "fp64": "float64", "f64": "float64", "fp32": "float32", "f32": "float32", "fp16": "float16",
    "f16": "float16", "half": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3",
    "fp8_e4m3": "float8_e4m3", "float8_e4m3fn": "float8_e4m3", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip


def grouped() -> list[str]:
    """Names of the formats whose groups are runs of elements."""
    return [name for name, known in FORMATS.items() if isinstance(known.group, int)]


def parse_format(dtype: "str | Format") -> Format:
    """A format from its name (``"bf16"``, ``"int4"``) or its bits (``"4bit"``: no scales).

    A number alone is refused, because 8 could mean bits or bytes.
    """
    if isinstance(dtype, Format):
        return dtype
    text = (dtype if isinstance(dtype, str) else quoted(dtype))[:LONGEST_NAME].strip().lower()
    name = ALIASES.get(text, text)
    if name in FORMATS:
        return FORMATS[name]
    if match := re.fullmatch(r"(\d{1,3})[- ]?bits?", text, re.ASCII):
        return Format(f"{int(match[1])}bit", int(match[1]))
    known = f"allowed: {', '.join([*FORMATS, *ALIASES])}, or bits such as 4bit"
    if re.fullmatch(r"[\d.]+", text):
        raise ValueError(f"dtype {quoted(dtype)} is a bare number, bits or bytes; {known}")
    near = hint(text, [*FORMATS, *ALIASES], "")
    raise ValueError(f"unknown dtype {quoted(dtype)}; {near + ' ' if near else ''}{known}")


LONGEST_NAME = 60
