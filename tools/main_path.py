"""Prints the main path of a chapter as plain Markdown: what a new reader gets.

Knows the command line. Does not know what the main path is (tools.reading).

    python -m tools.main_path CHAPTER     "01" or a file
"""

import argparse
import sys

from tools import notebooks, reading


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.main_path")
    parser.add_argument("chapter", help="a number such as 01, or a file")
    options = parser.parse_args(arguments)
    try:
        print(reading.markdown(notebooks.read(notebooks.find(options.chapter))), end="")
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
