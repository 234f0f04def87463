"""The arguments of each command, and what is said about wrong ones.

Knows: names, defaults, help texts, near names for a typo. Does not know: what is done with them.
"""

import argparse
import re
import sys
from collections.abc import Iterable
from typing import NoReturn

from kvbook.accounting.nearest import hint
from kvbook.accounting.units import parse_count
from kvbook.cli.models import run_models
from kvbook.cli.probe import run_probe
from kvbook.cli.serve import run_serve
from kvbook.cli.size import run_size

VERSION = sys.modules["kvbook"].__version__  # the package that this module is part of


class Parser(argparse.ArgumentParser):
    """Bad arguments are one line on stderr and exit code 2, with the nearest known name."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}{self.near(message)}\n")

    def near(self, message: str) -> str:
        """What may have been meant by an unknown option or command."""
        if found := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            return self.suggest(found[1], self.options())
        if found := re.search(r"invalid choice: '([^']*)'", message):
            return self.suggest(found[1], ("size", "models", "probe", "serve"))
        return ""

    def options(self) -> list[str]:
        """Every long option of this parser and of the commands below it."""
        known = [name for action in self._actions for name in action.option_strings]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    known += parser.options()
        return [name for name in known if name.startswith("--")]

    @staticmethod
    def suggest(wanted: str, known: Iterable[str]) -> str:
        near = hint(wanted, known, "")
        return f"; {near}" if near else ""


def make_parser() -> Parser:
    parser = Parser(prog="kvbook", description="What a KV cache costs.")
    parser.add_argument("--version", action="version", version=f"kvbook {VERSION}")
    commands = parser.add_subparsers(dest="command", metavar="size | models | probe | serve")

    size = commands.add_parser(
        "size",
        help="the size of one cache, or of two",
        description="The size of a cache. Bytes are of the whole batch and of one device; bytes "
        "per token are of one sequence over all layers. Without --tokens: per token, and at three "
        "lengths. Counts are written as 8192, 8,192, 8k (8,000) or 8Ki (8,192).",
    )
    add_size_arguments(size)
    size.set_defaults(run=run_size)

    models = commands.add_parser("models", help="the gallery of real models")
    add_output(models, "one JSON list")
    models.set_defaults(run=run_models)

    probe = commands.add_parser("probe", help="measure this machine's peaks, in a few seconds")
    probe.add_argument("--json", action="store_true", help="one JSON object, with provenance")
    probe.set_defaults(run=run_probe)

    serve = commands.add_parser(
        "serve",
        help="an OpenAI-compatible endpoint over the book's engine",
        description="Serve a model: /v1/completions, /v1/chat/completions, /v1/models, and what "
        "happens in the cache at /metrics. Needs kvbook[serve]. A request without a seed has "
        "seed 0, so that it can be repeated.",
    )
    add_serve_arguments(serve)
    serve.set_defaults(run=run_serve)
    return parser


def add_size_arguments(size: argparse.ArgumentParser) -> None:
    add = size.add_argument
    add(
        "model",
        nargs="?",
        help="a name from `kvbook models`, a config.json, a GGUF file or a folder",
    )
    add("--compare", nargs=2, metavar=("A", "B"), help="two models, one beside the other")
    add("--override", action="append", default=[], metavar="NAME=VALUE",
        help="a field of the config, for those who know better (may be repeated)")  # fmt: skip
    add("--tokens", type=whole, help="tokens in each sequence")
    add("--batch", type=whole, default=1, help="sequences (1)")
    add(
        "--dtype",
        default="bf16",
        help="a name, such as bf16, fp8 or int4, or bits, such as 4bit (bf16)",
    )
    add("--group-size", type=whole, help="elements per scale, for scaled formats")
    add("--block-size", type=whole, default=16, help="tokens per block (16)")
    shares = size.add_mutually_exclusive_group()
    shares.add_argument(
        "--tp", dest="devices", type=whole, default=1,
        help="tensor-parallel devices (1); KV heads are shared, or repeated",
    )  # fmt: skip
    shares.add_argument("--devices", dest="devices", type=whole, help="the same as --tp")
    add(
        "--dp",
        type=whole,
        default=1,
        help="data-parallel groups of devices, which share sequences (1)",
    )
    add("--cp", type=whole, default=1, help="context-parallel devices, which share tokens (1)")
    memory = size.add_mutually_exclusive_group()
    memory.add_argument("--budget", help="memory, as in 80GiB: what fits?")
    memory.add_argument("--card", help="a machine, such as H100-SXM: what fits into its memory?")
    add("--utilization", default="1", help="the share of it that the engine uses, as in 0.9 (1)")
    add("--weights", help="what weights take of it: parameters at bits, as in 8.03B@16, or 16.1GB")
    add("--reserve", help="what activations and workspaces take of it, as in 2GiB")
    add_output(size, "one JSON object")


def add_serve_arguments(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument
    add("model", nargs="?", default="smollm2", help="smollm2, or a Hugging Face folder (smollm2)")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float64"))
    add("--blocks", type=whole, default=1024, help="blocks of the cache (1,024)")
    add("--block-size", type=whole, default=16, help="tokens per block (16)")
    add("--rows", type=whole, default=16, help="requests that run at once (16)")
    add("--budget", type=whole, default=256, help="tokens that a step computes at most (256)")
    add("--waiting", type=whole, default=256, help="requests that may wait (256)")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--port", type=whole, default=8000, help="port to listen on (8000)")


def add_output(parser: argparse.ArgumentParser, json_help: str) -> None:
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help=json_help)
    output.add_argument("--markdown", action="store_true", help="a table in Markdown")


def whole(text: str) -> int:
    try:
        return parse_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
