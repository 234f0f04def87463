"""What a cache costs, what real models cost, and the peaks of this machine.

Knows: which command runs, exit codes, one line per error. Does not know: how anything is computed
or printed.

    kvbook size llama-3.1-8b --tokens 32Ki --batch 8
    kvbook size path/to/config.json --tokens 4,096 --dtype int4 --card H100-SXM --weights 8.03B@16
    kvbook size --compare qwen3-32b gpt-oss-120b --tokens 128Ki
    kvbook models
    kvbook probe
"""

import os
import sys
from collections.abc import Sequence

from kvbook.cli.arguments import make_parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0, or 2 on bad input.

    ``arguments`` are those of the command line unless given as a list of strings.
    """
    given = [] if arguments is None else arguments
    if not isinstance(given, list | tuple) or not all(isinstance(one, str) for one in given):
        raise ValueError(f"arguments must be a list of strings, got {given!r:.60}")
    parser = make_parser()
    options = parser.parse_args(arguments)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, TypeError) as error:
        message = " ".join(str(error).split())
        print(f"kvbook {options.command}: {message}", file=sys.stderr)
        return 2
    return 0
