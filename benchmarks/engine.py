"""How many tokens per second the engine serves, beside one-by-one, static batches and peers.

Run it from the repository: ``python -m benchmarks.engine [--quick] [--reps N] [--vllm PYTHON]``. It
prints a table and, as its last line, one JSON object. README.md in this folder says what each
column means.

Knows: contenders, one trace, alternation, medians. Does not know: why one is faster than another.
"""

import argparse
import json
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from benchmarks.decode import DTYPES, Row, as_llama, machine
from kvbook.generate import generate_cached
from kvbook.generate.loops import left_pad
from kvbook.model.transformer import Transformer
from kvbook.model.weights import load_smollm2
from kvbook.serve.engine import Engine
from kvbook.serve.static import serve_static
from kvbook.serve.trace import Arrival, Mix, make_trace, replay

ROWS = 8  # requests that run at once
BLOCK_SIZE = 32
AT_ONCE = 1e9  # arrivals per second: all requests are there from the start
WORKER = Path(__file__).with_name("vllm_worker.py")

HEADER = "dtype     requests  contender                  tokens/s    engine is   equal texts"
ROW = (
    "{dtype:9} {requests:8}  {contender:25} {tok_s:9.1f}  {against:9.2f}x   {equal:4} of {requests}"
)

Trace = Sequence[Arrival]
Texts = list[list[int]]


class Contender(Protocol):
    """One way to serve a trace. ``serve`` returns the new tokens of each request, and seconds."""

    def serve(self, trace: Trace) -> tuple[Texts, float]: ...


class Timed:
    """A function of a trace, timed from here."""

    def __init__(self, run: Callable[[Trace], Texts]) -> None:
        self.run = run

    def serve(self, trace: Trace) -> tuple[Texts, float]:
        start = time.perf_counter()
        texts = self.run(trace)
        return texts, time.perf_counter() - start


class InEngine:
    """``kvbook.serve.Engine``, new for each trace: nothing is found but what the trace repeats."""

    def __init__(self, model: Transformer, blocks: int) -> None:
        self.model, self.blocks = model, blocks
        self.shares: list[float] = []  # of each trace's time, what went into scheduling

    def serve(self, trace: Trace) -> tuple[Texts, float]:
        start = time.perf_counter()
        engine = Engine(self.model, self.blocks, BLOCK_SIZE, max_rows=ROWS)
        texts = replay(engine, trace)
        taken = time.perf_counter() - start
        self.shares.append(sum(step.scheduling for step in engine.steps) / taken)
        return texts, taken


class Vllm:
    """vLLM's CPU build in a process and an environment of its own; it times itself."""

    def __init__(self, python: str, folder: str, dtype: str) -> None:
        self.process = subprocess.Popen(
            [python, str(WORKER), folder, dtype, str(ROWS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self.version = self._answer()["version"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("vLLM ended without an answer; run benchmarks/vllm_worker.py alone")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def serve(self, trace: Trace) -> tuple[Texts, float]:
        assert self.process.stdin is not None
        asked = [[one.request.prompt, one.request.max_new_tokens] for one in trace]
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        answer = self._answer()
        return answer["texts"], answer["seconds"]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def one_by_one(model: Transformer) -> Callable[[Trace], Texts]:
    def run(trace: Trace) -> Texts:
        asked = [one.request for one in trace]
        return [generate_cached(model, [one.prompt], one.max_new_tokens)[0] for one in asked]

    return run


def static(model: Transformer) -> Callable[[Trace], Texts]:
    return lambda trace: serve_static(model, trace, ROWS).texts


def transformers_batches(llama: Any) -> Callable[[Trace], Texts]:
    """``generate`` over padded batches: every row runs as long as its batch's longest."""

    def run(trace: Trace) -> Texts:
        texts: Texts = []
        for first in range(0, len(trace), ROWS):
            asked = [one.request for one in trace[first : first + ROWS]]
            tokens, counts = left_pad([one.prompt for one in asked])
            places = torch.arange(tokens.shape[1])
            real = places >= tokens.shape[1] - torch.tensor(counts)[:, None]
            config = GenerationConfig(
                max_new_tokens=max(one.max_new_tokens for one in asked), do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
            out = llama.generate(tokens, attention_mask=real.long(), generation_config=config)
            new = out[:, tokens.shape[1] :].tolist()
            texts += [row[: one.max_new_tokens] for row, one in zip(new, asked, strict=True)]
        return texts

    return run


def transformers_continuous(llama: Any, blocks: int) -> Callable[[Trace], Texts]:
    """Its continuous batching, with the same rows, blocks and tokens in a step as the engine."""

    def run(trace: Trace) -> Texts:
        manager = llama.init_continuous_batching(
            GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
            ContinuousBatchingConfig(
                page_size=BLOCK_SIZE, num_blocks=blocks, max_batch_tokens=256,
                max_requests_per_batch=ROWS, use_cuda_graph=False,
            ),
        )  # fmt: skip
        manager.start()
        for number, one in enumerate(trace):
            request = one.request
            manager.add_request(list(request.prompt), str(number), request.max_new_tokens)
        texts: dict[str, list[int]] = {}
        while len(texts) < len(trace):
            result = manager.get_result(timeout=60)
            if result is None:
                raise RuntimeError("transformers' continuous batching gave no result for a minute")
            if result.is_finished():
                texts[result.request_id] = list(result.generated_tokens)
        manager.stop(block=True)
        return [texts[str(number)] for number in range(len(trace))]

    return run


def measure(contenders: dict[str, Contender], trace: Trace, reps: int, dtype: str) -> list[Row]:
    """Median tokens per second. The contenders take turns in random order."""
    names, order = list(contenders), random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in names}
    alone, _ = contenders["one by one"].serve(trace)
    equal: dict[str, int] = {}
    for name in names:  # the warm-up, and a check: nobody skips work
        texts, _ = contenders[name].serve(trace)
        wanted = [one.request.max_new_tokens for one in trace]
        if [len(text) for text in texts] != wanted:
            raise ValueError(f"{name} gave {[len(text) for text in texts]} tokens, not {wanted}")
        equal[name] = sum(mine == text for mine, text in zip(alone, texts, strict=True))
    for _ in range(reps):
        order.shuffle(names)
        for name in names:
            times[name].append(contenders[name].serve(trace)[1])
    new = sum(one.request.max_new_tokens for one in trace)

    def against(name: str) -> float:
        pairs = zip(times[name], times["engine"], strict=True)
        return statistics.median(other / own for other, own in pairs)

    return [
        {
            "dtype": dtype,
            "requests": len(trace),
            "contender": name,
            "tok_s": round(new / statistics.median(times[name]), 2),
            "against": round(against(name), 3),
            "equal": equal[name],
        }
        for name in contenders
    ]


def run(
    load: Callable[[torch.dtype], Transformer], requests: int, reps: int, vllm: str | None
) -> list[Row]:
    """Measure the trace, and one request alone, in every dtype; print each row as it comes."""
    print(HEADER)
    rows = []
    for dtype in DTYPES:
        model, name = load(dtype), str(dtype).removeprefix("torch.")
        mix = Mix(new=(16, 64), vocab_size=model.config.vocab_size)
        trace = make_trace(requests, AT_ONCE, mix)
        blocks = 2 * ROWS * -(-(64 + 96 + 64) // BLOCK_SIZE)  # twice what the longest ones need
        llama = as_llama(model)
        engine = InEngine(model, blocks)
        contenders: dict[str, Contender] = {
            "engine": engine,
            "one by one": Timed(one_by_one(model)),
            "static batches": Timed(static(model)),
            "transformers, batches": Timed(transformers_batches(llama)),
            "transformers, continuous": Timed(transformers_continuous(llama, blocks)),
        }
        with tempfile.TemporaryDirectory() as folder:
            if vllm is not None:
                llama.save_pretrained(folder)
                peer = Vllm(vllm, folder, name)
                contenders[f"vLLM {peer.version}"] = peer
            for part in (trace, trace[:1]):
                for row in measure(contenders, part, reps, name):
                    print(ROW.format(**row), flush=True)
                    rows.append(row)
                share = statistics.median(engine.shares[-reps:])
                print(f"          scheduling is {share:.1%} of the engine's time", flush=True)
                rows[-1]["scheduling_share"] = round(share, 4)
            if vllm is not None:
                peer.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="8 requests, 1 repetition")
    parser.add_argument("--reps", type=int, help="repetitions of each case, 3 unless given")
    parser.add_argument("--vllm", metavar="PYTHON", help="the interpreter of vLLM's environment")
    options = parser.parse_args()
    requests, reps = (8, 1) if options.quick else (24, 3)
    with torch.inference_mode():
        rows = run(load_smollm2, requests, options.reps or reps, options.vllm)
    print(json.dumps({"benchmark": "engine", "rows": rows, "machine": machine()}))


if __name__ == "__main__":
    main()
