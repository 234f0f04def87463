"""How large a cache's storage is: every slot that is set aside, used or not.

Knows: layers, rows, heads, slots, widths and element formats. Does not know: which slots hold a
token, what a framework's allocator adds.

``cache_size`` counts what tokens need; this counts what a store allocates, byte for byte.
"""

from kvbook.accounting.formats import Format, parse_format
from kvbook.accounting.units import check_count


def storage_bytes(
    layers: int,
    rows: int,
    heads: int,
    slots: int,
    key_width: int,
    value_width: int,
    keys: str | Format = "bfloat16",
    values: str | Format | None = None,
    spare: int = 0,
    tail_slots: int = 0,
    tail: str | Format = "bfloat16",
) -> dict[str, int]:
    """Bytes by what they hold: keys, values, and if there are any scales, zero points, tail.

    Each of ``rows`` sequences has ``slots + spare`` slots in every layer: spare ones are a ring's
    room for rollback, or the rest of a last block. ``tail_slots`` more hold recent tokens in the
    format ``tail``, before they are encoded. ``value_width`` is 0 where no values are stored, as
    for latents. Values have the format of keys unless they have their own.

    Raises ``ValueError`` for an impossible count, an unknown format, or groups that do not divide
    a width or the slots.

    Example: 1,024 slots of 8 heads of width 128 in 32 layers, at 4 bits with a 16-bit scale and a
    16-bit zero point per 32 elements, are 40 MiB, not the 32 MiB of the codes alone.

    >>> storage_bytes(32, 1, 8, 1024, 128, 128, "int4")
    {'keys': 16777216, 'values': 16777216, 'scales': 4194304, 'zero points': 4194304}
    """
    for name, number, low in (
        ("layers", layers, 1), ("rows", rows, 1), ("heads", heads, 1), ("slots", slots, 1),
        ("key_width", key_width, 1), ("value_width", value_width, 0), ("spare", spare, 0),
        ("tail_slots", tail_slots, 0),
    ):  # fmt: skip
        check_count(name, number, low)
    key_form = parse_format(keys)
    value_form = key_form if values is None else parse_format(values)
    lines, length = layers * rows * heads, slots + spare
    recent = parse_format(tail).vector_bytes(key_width) + parse_format(tail).vector_bytes(
        value_width
    )
    sides = ((key_form, key_width), (value_form, value_width))
    beside = {
        "scales": lines * sum(form.scale_bytes(width, length) for form, width in sides),
        "zero points": lines * sum(form.zero_bytes(width, length) for form, width in sides),
        "tail": lines * tail_slots * recent,
    }
    return {
        "keys": lines * length * key_form.data_bytes(key_width),
        "values": lines * length * value_form.data_bytes(value_width),
    } | {name: size for name, size in beside.items() if size}
