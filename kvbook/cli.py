"""The kvbook command: sizes of caches and peaks of this machine, as tables or as JSON.

Knows: arguments, tables, JSON, exit codes. Does not know: how a size is computed.

    kvbook size llama-3.1-8b --tokens 32768 --batch 8
    kvbook size path/to/config.json --tokens 4096 --dtype int4 --budget 80GiB --json
    kvbook models
    kvbook probe
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from kvbook.accounting.budget import max_sequences, max_tokens
from kvbook.accounting.formats import parse_format
from kvbook.accounting.gallery import gallery_model, load_gallery
from kvbook.accounting.geometry import CacheGeometry
from kvbook.accounting.need import CacheSize, cache_size
from kvbook.accounting.units import format_bytes, in_words, parse_bytes


class Parser(argparse.ArgumentParser):
    """Bad arguments are one line on stderr and exit code 2, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 on bad input."""
    options = make_parser().parse_args(arguments)
    try:
        options.run(options)
    except ValueError as error:
        message = " ".join(str(error).split())
        print(f"kvbook {options.command}: {message}", file=sys.stderr)
        return 2
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="kvbook", description="What a KV cache costs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="size | models | probe")

    size = commands.add_parser(
        "size",
        help="the size of one cache",
        description="The size of a cache. Bytes are of the whole batch; bytes per token are of "
        "one sequence over all layers.",
    )
    size.add_argument("model", help="a name from `kvbook models`, a config.json or its folder")
    size.add_argument("--tokens", type=whole, required=True, help="tokens in each sequence")
    size.add_argument("--batch", type=whole, default=1, help="sequences (1)")
    size.add_argument(
        "--dtype", default="bf16", help="a name, such as bf16 or int4, or bits, such as 4bit (bf16)"
    )
    size.add_argument("--group-size", type=whole, help="elements per scale, for scaled formats")
    size.add_argument("--block-size", type=whole, default=16, help="tokens per block (16)")
    size.add_argument("--devices", type=whole, default=1, help="tensor-parallel devices (1)")
    size.add_argument("--budget", help="memory for the cache, as in 80GiB: what fits?")
    size.add_argument("--json", action="store_true", help="one JSON object")
    size.set_defaults(run=run_size)

    models = commands.add_parser("models", help="the gallery of real models")
    models.add_argument("--json", action="store_true", help="one JSON list")
    models.set_defaults(run=run_models)

    probe = commands.add_parser("probe", help="measure this machine's peaks, in a few seconds")
    probe.add_argument("--json", action="store_true", help="one JSON object, with provenance")
    probe.set_defaults(run=run_probe)
    return parser


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, got {text!r:.40}") from None


# ---- kvbook size


def run_size(options: argparse.Namespace) -> None:
    form = parse_format(options.dtype)
    if options.group_size is not None:
        form = form.with_group(options.group_size)
    budget = None if options.budget is None else parse_bytes(options.budget)
    size = cache_size(
        find_geometry(options.model),
        options.tokens,
        options.batch,
        form,
        options.block_size,
        options.devices,
    )
    report = json_report if options.json else text_report
    print(report(size, budget))


def find_geometry(model: str) -> CacheGeometry:
    """A gallery name, or else the path of a config.json or of the folder it is in."""
    path = Path(model)
    is_path = path.exists() or path.suffix == ".json"
    if is_path and model.strip().lower() not in load_gallery():
        return CacheGeometry.from_hf(path, name=path.name)
    return gallery_model(model).geometry


def json_report(size: CacheSize, budget: int | None) -> str:
    """One JSON object. ``null`` means: not known (constant state), no limit (max_tokens)."""
    answer: dict[str, Any] = {
        "model": size.geometry.name,
        "tokens": size.tokens,
        "batch": size.batch,
        "dtype": size.format.name,
        "block_size": size.block_size,
        "devices": size.devices,
        "need_bytes": size.need_bytes,
        "reserved_bytes": size.reserved_bytes,
        "need_items": size.need,
        "reserved_items": size.reservation,
        "bytes_per_token": size.bytes_per_token,
        "bytes_per_token_beyond_windows": size.bytes_per_token_beyond_windows,
        "next_token_bytes": size.next_token_bytes,
        "window_bytes_full": size.window_bytes_full,
        "constant_state_bytes": size.constant_state_bytes,
        "block_table_bytes": size.block_table_bytes,
    }
    if size.expanded_bytes_per_token is not None:
        answer["expanded_bytes_per_token"] = size.expanded_bytes_per_token
    if budget is not None:
        answer |= {
            "budget_bytes": budget,
            "max_tokens": max_tokens(size, budget),
            "max_sequences": max_sequences(size, budget),
            "max_tokens_reserved": max_tokens(size, budget, reserved=True),
            "max_sequences_reserved": max_sequences(size, budget, reserved=True),
        }
    answer |= {"assumptions": size.assumptions, "exclusions": size.exclusions}
    return json.dumps(answer, indent=1)


def text_report(size: CacheSize, budget: int | None) -> str:
    """A table with its assumptions."""
    geometry = size.geometry
    kinds = ", ".join(
        f"{geometry.count(kind)} {kind}"
        for kind in ("full", "window", "latent", "recurrent", "none") if geometry.count(kind)
    )  # fmt: skip
    lines = [
        f"{geometry.name}: {in_words(len(geometry.layers), 'layer')} ({kinds})",
        f"{in_words(size.batch, 'sequence')} of {in_words(size.tokens, 'token')}, "
        f"{size.format.name}",
        "",
        row("need", size.need_bytes),
        *[row(f"  {name}", part) for name, part in size.need.items()],
        row(f"reservation, blocks of {size.block_size:,}", size.reserved_bytes),
        row("per token, one sequence", size.bytes_per_token),
        row("per token beyond windows", size.bytes_per_token_beyond_windows),
        row("one more token now", size.next_token_bytes),
    ]
    if geometry.count("window"):
        lines.append(row("windows when full", size.window_bytes_full))
    if size.constant_state_bytes:
        lines.append(row("constant state", size.constant_state_bytes))
    if size.expanded_bytes_per_token is not None:
        lines.append(row("per token if expanded", size.expanded_bytes_per_token))
    lines.append(row("block tables", size.block_table_bytes))
    if budget is not None:
        lines += ["", *budget_lines(size, budget)]
    lines += ["", "assumed", *[f"  - {words}" for words in size.assumptions]]
    lines += ["not counted", *[f"  - {words}" for words in size.exclusions]]
    return "\n".join(lines)


def row(label: str, size: int) -> str:
    return f"{label:<28}{size:>22,} B   {format_bytes(size)}"


def budget_lines(size: CacheSize, budget: int) -> list[str]:
    lines = [f"fits in {format_bytes(budget)} ({budget:,} B)"]
    for label, reserved in (("by need", False), ("by reservation", True)):
        tokens = max_tokens(size, budget, reserved)
        limit = "any number of tokens" if tokens is None else in_words(tokens, "token")
        sequences = max_sequences(size, budget, reserved)
        lines.append(
            f"  {label}: {limit} in each of {in_words(size.batch, 'sequence')}, "
            f"or {in_words(sequences, 'sequence')} of {in_words(size.tokens, 'token')}"
        )
    return lines


# ---- kvbook models


def run_models(options: argparse.Namespace) -> None:
    models = load_gallery().values()
    if options.json:
        facts = ("name", "title", "attention", "bytes", "native_dtype", "source", "unverified")
        print(json.dumps([{fact: getattr(m, fact) for fact in facts} for m in models], indent=1))
        return
    print(f"{'name':<18}{'attention':<17}{'B/token':>11}{'beyond windows':>16}{'at 32,768':>14}")
    for model in models:
        known = model.bytes
        print(
            f"{model.name:<18}{model.attention:<17}{known['bytes_per_token']:>11,}"
            f"{known['bytes_per_token_beyond_windows']:>16,}"
            f"{format_bytes(known['bytes_at_32768'] or 0):>14}"
        )
    print("\n16 bits per element, one sequence, need. Details: kvbook size NAME --tokens N")


# ---- kvbook probe


def run_probe(options: argparse.Namespace) -> None:
    # Here, so that the other commands start without torch.
    from kvbook.measure import probe

    machine = probe()
    if options.json:
        print(json.dumps(asdict(machine), indent=1))
        return
    print(f"{machine.name}\n")
    print(f"{'memory bandwidth':<18}{machine.bandwidth / 1e9:>12,.1f} GB/s")
    for dtype, peak in machine.peak_flops.items():
        print(
            f"{dtype:<18}{peak / 1e9:>12,.1f} GFLOP/s   memory is the limit below "
            f"{machine.ridge(dtype):,.1f} FLOP per byte"
        )
    facts = [f"{name} {fact}" for name, fact in machine.provenance.items() if is_plain(fact)]
    print(f"\n{machine.source}: {', '.join(facts)}")


def is_plain(fact: object) -> bool:
    """Whether a fact fits into a line."""
    return isinstance(fact, str | int | float)


if __name__ == "__main__":
    sys.exit(main())
