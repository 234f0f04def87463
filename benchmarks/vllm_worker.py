"""One vLLM engine on the CPU that serves traces, for ``benchmarks.engine``.

It runs in an environment of its own, where vLLM is installed and kvbook is not: arguments are a
model folder, a dtype and the most rows; each line on standard input is a trace as JSON, a list of
[prompt, new tokens], and each line on the given output the texts and the seconds that they took.

Knows: vLLM's public API. Does not know: what it is compared with.
"""

import json
import os
import sys
import time

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0"
)


def main(folder: str, dtype: str, rows: str) -> None:
    answers = os.fdopen(os.dup(1), "w")  # vLLM logs to standard output too
    os.dup2(2, 1)
    import vllm

    engine = vllm.LLM(
        folder, dtype=dtype, enforce_eager=True, block_size=32, max_num_seqs=int(rows),
        max_model_len=2048, skip_tokenizer_init=True, enable_prefix_caching=True,
    )  # fmt: skip
    print(json.dumps({"version": vllm.__version__}), file=answers, flush=True)
    for line in sys.stdin:
        trace = json.loads(line)
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in trace]
        limits = [
            vllm.SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
            for _, new in trace
        ]
        engine.reset_prefix_cache()
        start = time.perf_counter()
        outputs = engine.generate(prompts, limits, use_tqdm=False)
        taken = time.perf_counter() - start
        texts = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps({"seconds": taken, "texts": texts}), file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
