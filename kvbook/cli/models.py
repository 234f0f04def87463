"""``kvbook models``: the gallery as a table.

Knows: columns. Does not know: where the numbers come from.
"""

import argparse
import json

from kvbook.accounting.gallery import load_gallery
from kvbook.accounting.units import format_bytes
from kvbook.cli.tables import Table


def run_models(options: argparse.Namespace) -> None:
    models = load_gallery().values()
    if options.json:
        facts = ("name", "title", "attention", "bytes", "native_dtype", "source", "unverified")
        print(json.dumps([{fact: getattr(m, fact) for fact in facts} for m in models], indent=1))
        return
    table = Table("name", "attention", "B/token", "beyond windows", "at 32,768")
    for model in models:
        known = model.bytes
        table.add(
            model.name,
            model.attention,
            f"{known['bytes_per_token']:,}",
            f"{known['bytes_per_token_beyond_windows']:,}",
            format_bytes(known["bytes_at_32768"] or 0),
        )
    print(table.markdown() if options.markdown else table.plain(left=2))
    print("\n16 bits per element, one sequence, need. Details: kvbook size NAME --tokens N")
