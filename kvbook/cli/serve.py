"""``kvbook serve``: the engine behind an OpenAI-compatible endpoint.

Knows: what has to be built before it. Does not know: how requests are served.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path


def run_serve(options: argparse.Namespace) -> None:
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"serving needs {' and '.join(missing)}, which is not installed; install it with: "
            "python -m pip install 'kvbook[serve]'"
        )
    import torch
    import uvicorn

    from kvbook.model.tokenizer import load_smollm2_tokenizer, load_tokenizer, smollm2_chat
    from kvbook.model.weights import load_folder, load_smollm2
    from kvbook.serve.engine import Engine
    from kvbook.serve.http import application

    dtype = getattr(torch, options.dtype)
    if options.model == "smollm2":
        model, tokenizer, chat = load_smollm2(dtype), load_smollm2_tokenizer(), smollm2_chat
    else:
        folder = Path(options.model)
        model, tokenizer, chat = load_folder(folder, dtype), load_tokenizer(folder), None
    engine = Engine(
        model,
        options.blocks,
        options.block_size,
        max_rows=options.rows,
        token_budget=max(options.budget, options.rows),
        max_waiting=options.waiting,
        fingerprint=options.model,
    )
    name = "smollm2" if chat else Path(options.model).name
    size = options.blocks * options.block_size
    print(
        f"{name}: a cache of {size:,} tokens in {options.blocks:,} blocks, at most "
        f"{options.rows} requests at once; http://{options.host}:{options.port}/v1",
        flush=True,
    )
    server = application(engine, tokenizer, name, chat)
    uvicorn.run(server, host=options.host, port=options.port, log_level="warning")
