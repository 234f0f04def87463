"""Prints how long the main path of each chapter is: words, lines of code, minutes.

Knows the command line. Does not know how it is counted (tools.reading).

    python -m tools.budget [CHAPTER ...]     "01" or files; exit code 1 if a limit is exceeded
"""

import argparse
import sys

from tools import notebooks, reading


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.budget")
    parser.add_argument("chapters", nargs="*", help="numbers or files; default: all")
    options = parser.parse_args(arguments)
    try:
        paths = [notebooks.find(name) for name in options.chapters] or notebooks.chapters()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    lengths = {path.stem: reading.of(notebooks.read(path)) for path in paths}
    print(f"{'chapter':32s} words  printed  lines  figures  minutes")
    for name, length in lengths.items():
        print(
            f"{name:32s} {length.words:5,d}  {length.printed:7,d}  {length.lines:5d}"
            f"  {length.figures:7d}  {length.minutes:7d}"
        )
    limits = f"{reading.WORDS:5,d}  {'':7s}  {reading.LINES:5d}  {'':7s}  {reading.MINUTES:7d}"
    print(f"{'allowed':32s} {limits}")
    return 1 if any(length.faults for length in lengths.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
