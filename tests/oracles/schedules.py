"""How many operations the random schedules of the block pool and the prefix cache run.

A few hundred by default. With ``KVBOOK_LONG_TESTS=1`` each machine runs more than 10,000:

    KVBOOK_LONG_TESTS=1 python -m pytest tests/test_blocks.py tests/test_prefix_schedules.py
"""

import os

from hypothesis import settings

LONG = os.environ.get("KVBOOK_LONG_TESTS") == "1"
SCHEDULES = settings(
    max_examples=500 if LONG else 30,
    stateful_step_count=50 if LONG else 30,
)
