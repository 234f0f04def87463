"""``kvbook size``: one model, or two beside each other.

Knows: which questions the arguments ask, and in which form the answer is wanted. Does not know: how
a size is computed or laid out.
"""

import argparse
import json
from dataclasses import replace
from typing import Any

from kvbook.accounting.card import CardBudget, Weights, card_budget
from kvbook.accounting.formats import parse_format
from kvbook.accounting.need import CacheSize, cache_size
from kvbook.accounting.presets import preset
from kvbook.accounting.units import parse_bytes, quoted
from kvbook.cli.find import find_geometry
from kvbook.cli.report import compared, json_answer, report

LENGTHS = (4_096, 32_768, 131_072)  # asked where --tokens is not given


def run_size(options: argparse.Namespace) -> None:
    models = models_of(options)
    sizes = [size_of(options, model) for model in models]
    room = room_of(options)
    if options.json:
        answers = [answer(options, size, room) for size in sizes]
        print(json.dumps(answers if options.compare else answers[0], indent=1))
    elif options.compare:
        first, second = (at_lengths(options, size) for size in sizes)
        print(compared(first, second, options.markdown))
    else:
        print(report(at_lengths(options, sizes[0]), room, options.markdown))


def models_of(options: argparse.Namespace) -> list[str]:
    """The one model, or the two that are compared."""
    if options.compare and options.model:
        raise ValueError(
            f"--compare takes the two models, got {quoted(options.model)} beside them; leave it out"
        )
    if not options.compare and not options.model:
        raise ValueError(
            "name a model: kvbook size llama-3.1-8b; a gallery name, a config.json, a GGUF file or "
            "a folder, or two of them after --compare"
        )
    return options.compare or [options.model]


def size_of(options: argparse.Namespace, model: str) -> CacheSize:
    form = parse_format(options.dtype)
    if options.group_size is not None:
        form = form.with_group(options.group_size)
    return cache_size(
        find_geometry(model, options.override),
        1 if options.tokens is None else options.tokens,
        options.batch,
        form,
        options.block_size,
        options.devices,
        options.dp,
        options.cp,
    )


def at_lengths(options: argparse.Namespace, size: CacheSize) -> list[CacheSize]:
    """The size at the length that was asked for, or at three."""
    if options.tokens is not None:
        return [size]
    return [replace(size, tokens=tokens) for tokens in LENGTHS]


def room_of(options: argparse.Namespace) -> CardBudget | None:
    """What is left for the cache, where memory was named."""
    if options.budget is None and options.card is None:
        for name in ("weights", "reserve"):
            if getattr(options, name) is not None:
                raise ValueError(
                    f"--{name} {getattr(options, name)} is taken off a memory; add --card or "
                    "--budget"
                )
        if options.utilization != "1":
            raise ValueError(
                f"--utilization {options.utilization} is a share of a memory; add --card or "
                "--budget"
            )
        return None
    memory = parse_bytes(options.budget) if options.card is None else card_memory(options.card)
    return card_budget(
        memory,
        options.utilization,
        None if options.weights is None else Weights.parse(options.weights),
        0 if options.reserve is None else parse_bytes(options.reserve),
        options.devices,
    )


def card_memory(name: str) -> int:
    machine = preset(name)
    if machine.memory is None:
        raise ValueError(f"the memory of {machine.name} is not known; use --budget")
    return machine.memory


def answer(options: argparse.Namespace, size: CacheSize, room: CardBudget | None) -> dict[str, Any]:
    """One JSON object; without --tokens it has a size for each of three lengths."""
    if options.tokens is not None:
        return json_answer(size, room)
    several = [json_answer(each, room) for each in at_lengths(options, size)]
    return {"model": size.geometry.name, "bytes_per_token": size.bytes_per_token, "sizes": several}
