"""``python -m tests.fuzz``, from the root of the repository."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # where the tests find fuzz and oracles, too

from fuzz.command import main

sys.exit(main())
