"""The size of a cache in a table, in Markdown and as JSON.

Knows: lines, labels, order. Does not know: how a size is computed, where the model came from.
"""

from collections.abc import Sequence
from typing import Any

from kvbook.accounting.budget import max_sequences, max_tokens
from kvbook.accounting.card import CardBudget
from kvbook.accounting.layers import KINDS
from kvbook.accounting.need import CacheSize
from kvbook.accounting.policies import POLICIES, Policy
from kvbook.accounting.pool import pool_layout
from kvbook.accounting.units import format_bytes, in_words
from kvbook.cli.tables import Table
from kvbook.errors import UnsupportedModelError

Row = tuple[str, int]


# ---- For people


def report(sizes: Sequence[CacheSize], room: CardBudget | None, markdown: bool) -> str:
    """One model at one length or at several, what fits, and the words beside the numbers."""
    size = sizes[0]
    lines = [title(size), setting(size) if len(sizes) == 1 else size.format.name, ""]
    rows = size_rows(size) if len(sizes) == 1 else length_rows(sizes)
    lines += as_table(rows, markdown)
    if len(sizes) == 1:
        lines += ["", *policy_lines(size, markdown)]
    if room is not None:
        lines += ["", *room_lines(sizes[-1], room, markdown)]
    lines += ["", "assumed", *[f"  - {words}" for words in assumed(sizes)]]
    lines += ["not counted", *[f"  - {words}" for words in size.exclusions]]
    return "\n".join(lines)


def title(size: CacheSize) -> str:
    geometry = size.geometry
    known = sorted({layer.kind for layer in geometry.layers}, key=KINDS.index)
    kinds = ", ".join(f"{geometry.count(kind)} {kind}" for kind in known)
    # A layer with two caches has two records, and then their number is not the model's layers.
    noun = "cache" if {"compressed", "cross"} & set(known) else "layer"
    return f"{geometry.name}: {in_words(len(geometry.layers), noun)} ({kinds})"


def setting(size: CacheSize) -> str:
    return (
        f"{in_words(size.batch, 'sequence')} of {in_words(size.tokens, 'token')}, "
        f"{size.format.name}"
    )


def size_rows(size: CacheSize) -> list[Row]:
    rows = [("need", size.need_bytes), *[(f"  {name}", part) for name, part in size.need.items()]]
    if size.need_bytes_stored_once is not None:
        rows.append(("need, if stored once", size.need_bytes_stored_once))
    rows += [
        (f"reservation, blocks of {size.block_size:,}", size.reserved_bytes),
        ("per token, one sequence", size.bytes_per_token),
        ("per token beyond windows", size.bytes_per_token_beyond_windows),
        ("one more token now", size.next_token_bytes),
    ]
    if size.window_bytes_full:
        rows.append(("windows when full", size.window_bytes_full))
    if size.constant_state_bytes:
        rows.append(("constant state", size.constant_state_bytes))
    if size.expanded_bytes_per_token is not None:
        rows.append(("per token if expanded", size.expanded_bytes_per_token))
    return [*rows, ("block tables", size.block_table_bytes)]


def length_rows(sizes: Sequence[CacheSize]) -> list[Row]:
    size = sizes[0]
    rows = [
        ("per token, one sequence", size.bytes_per_token),
        ("per token beyond windows", size.bytes_per_token_beyond_windows),
    ]
    if size.constant_state_bytes:
        rows.append(("constant state", size.constant_state_bytes))
    batch = in_words(size.batch, "sequence")
    return rows + [(f"{batch} of {at.tokens:,}", at.need_bytes) for at in sizes]


def as_table(rows: Sequence[Row], markdown: bool) -> list[str]:
    if markdown:
        table = Table("", "bytes", "")
        for label, size in rows:
            table.add(label.strip(), f"{size:,}", format_bytes(size))
        return [table.markdown()]
    wide = max(28, *[len(label) + 2 for label, _ in rows])
    return [f"{label:<{wide}}{size:>22,} B   {format_bytes(abs(size))}" for label, size in rows]


def assumed(sizes: Sequence[CacheSize]) -> list[str]:
    """Assumptions of all lengths, each once, without those that speak of one length only."""
    if len(sizes) == 1:
        return list(sizes[0].assumptions)
    common = [words for words in sizes[0].assumptions if not words.startswith("need:")]
    longest = [words for words in sizes[-1].assumptions if "positions" in words]
    return [*common, *[words for words in longest if words not in common]]


# ---- Policies


def policy_lines(size: CacheSize, markdown: bool) -> list[str]:
    """What each way to store the cache sets aside, state included; or why it cannot be done."""
    rows, reasons = [], []
    for policy in POLICIES.values():
        try:
            rows.append((f"  {policy.name}", policy.bytes(size)))
        except UnsupportedModelError as error:
            reasons.append(f"  {policy.name}: not possible: {error}")
    lines = ["what engines set aside, state included", *as_table(rows, markdown), *reasons]
    lines += [who(policy, markdown) for policy in POLICIES.values()]
    return lines + [f"  {words}" for words in pool_words(size)]


def pool_words(size: CacheSize) -> list[str]:
    """How the pool of all kinds is laid out, where it is possible and has more than one group."""
    try:
        layout = pool_layout(size)
    except UnsupportedModelError:
        return []
    if layout.groups == 1:
        return []
    padding = in_words(layout.padding_layers, "padding layer")
    return [
        f"pool per kind has {layout.groups:,} groups of "
        f"{in_words(layout.layers_per_group, 'layer')}, {padding} among them, and blocks of "
        f"{format_bytes(layout.block_bytes)}"
    ]


def who(policy: Policy, markdown: bool) -> str:
    """Who goes this way; Markdown and JSON have the page that says so too."""
    pairs = [words.split(": ", 1) for words in policy.who]
    names = "; ".join(f"[{name}]({page})" if markdown else name for name, page in pairs)
    return f"  {policy.name}: {policy.rule} ({names})"


# ---- What fits


def room_lines(size: CacheSize, room: CardBudget, markdown: bool) -> list[str]:
    lines = []
    if len(room.lines) > 2:
        lines += [*as_table(room.lines, markdown), ""]
    budget = room.cache_bytes
    lines.append(f"fits in {format_bytes(budget)} ({budget:,} B)")
    for label, reserved in (("by need", False), ("by reservation", True)):
        tokens = max_tokens(size, budget, reserved)
        limit = "any number of tokens" if tokens is None else in_words(tokens, "token")
        sequences = max_sequences(size, budget, reserved)
        lines.append(
            f"  {label}: {limit} in {each(size)}{beyond(size, tokens)}, or "
            f"{in_words(sequences, 'sequence')} of {in_words(size.tokens, 'token')}"
        )
    return lines


def each(size: CacheSize) -> str:
    return "1 sequence" if size.batch == 1 else f"each of {in_words(size.batch, 'sequence')}"


def beyond(size: CacheSize, tokens: int | None) -> str:
    """A warning where more tokens fit than the model has positions for."""
    positions = size.geometry.max_positions
    if positions is None or (tokens is not None and tokens <= positions):
        return ""
    return f" (the model has {in_words(positions, 'position')})"


# ---- Two models


def compared(first: Sequence[CacheSize], second: Sequence[CacheSize], markdown: bool) -> str:
    """The same rows of two models, and how many times the first is the second."""
    one, two = rows_of(first), rows_of(second)
    table = Table("", first[0].geometry.name, second[0].geometry.name, "first / second")
    for label in [*one, *[label for label in two if label not in one]]:
        a, b = one.get(label), two.get(label)
        table.add(label, cell(a), cell(b), f"{a / b:.3g}" if a and b else "-")
    heading = setting(first[0]) if len(first) == 1 else first[0].format.name
    return "\n".join([heading, "", table.markdown() if markdown else table.plain()])


def rows_of(sizes: Sequence[CacheSize]) -> dict[str, int]:
    return dict(size_rows(sizes[0]) if len(sizes) == 1 else length_rows(sizes))


def cell(size: int | None) -> str:
    return "-" if size is None else f"{size:,} B"


# ---- For machines


def json_answer(size: CacheSize, room: CardBudget | None) -> dict[str, Any]:
    """``None`` means: not known (constant state), no limit (tokens), not possible (policies)."""
    answer: dict[str, Any] = {
        "model": size.geometry.name,
        "max_positions": size.geometry.max_positions,
        "tokens": size.tokens,
        "batch": size.batch,
        "dtype": size.format.name,
        "block_size": size.block_size,
        "devices": size.devices,
        "dp": size.dp,
        "cp": size.cp,
        "need_bytes": size.need_bytes,
        "reserved_bytes": size.reserved_bytes,
        "need_bytes_stored_once": size.need_bytes_stored_once,
        "need_items": size.need,
        "reserved_items": size.reservation,
        "bytes_per_token": size.bytes_per_token,
        "bytes_per_token_beyond_windows": size.bytes_per_token_beyond_windows,
        "next_token_bytes": size.next_token_bytes,
        "window_bytes_full": size.window_bytes_full,
        "constant_state_bytes": size.constant_state_bytes,
        "block_table_bytes": size.block_table_bytes,
        "policies": {policy.name: json_policy(policy, size) for policy in POLICIES.values()},
    }
    if size.expanded_bytes_per_token is not None:
        answer["expanded_bytes_per_token"] = size.expanded_bytes_per_token
    if room is not None:
        budget = room.cache_bytes
        answer |= {
            "memory_lines": [{"line": line, "bytes": part} for line, part in room.lines],
            "budget_bytes": budget,
            "max_tokens": max_tokens(size, budget),
            "max_sequences": max_sequences(size, budget),
            "max_tokens_reserved": max_tokens(size, budget, reserved=True),
            "max_sequences_reserved": max_sequences(size, budget, reserved=True),
        }
    return answer | {"assumptions": size.assumptions, "exclusions": size.exclusions}


def json_policy(policy: Policy, size: CacheSize) -> dict[str, Any]:
    try:
        return {"bytes": policy.bytes(size), "who": policy.who}
    except UnsupportedModelError as error:
        return {"bytes": None, "why_not": str(error), "who": policy.who}
