"""``python -m kvbook``: the command line.

Knows: where the command line is. Does not know: anything else.
"""

import sys

from kvbook.cli import main

if __name__ == "__main__":
    sys.exit(main())
