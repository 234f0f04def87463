"""The kvbook command, from outside and from inside."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbook.accounting.gallery import load_gallery
from kvbook.accounting.hardware import Hardware
from kvbook.accounting.policies import POLICIES
from kvbook.cli import main

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4_096,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["size", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that fails with exit code 2 and prints nothing else."""
    try:
        code: object = main(arguments)
    except SystemExit as stop:  # argparse's own way out
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.rstrip("\n")


# ---- JSON


def test_json_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "llama-3.1-8b", "--tokens", "4096", "--batch", "2")
    assert found == {
        "model": "llama-3.1-8b",
        "max_positions": 131_072,
        "tokens": 4_096,
        "batch": 2,
        "dtype": "bfloat16",
        "block_size": 16,
        "devices": 1,
        "dp": 1,
        "cp": 1,
        "need_bytes": 1_073_741_824,
        "reserved_bytes": 1_073_741_824,
        "need_bytes_stored_once": None,
        "need_items": {"keys": 536_870_912, "values": 536_870_912},
        "reserved_items": {"keys": 536_870_912, "values": 536_870_912},
        "bytes_per_token": 131_072,
        "bytes_per_token_beyond_windows": 131_072,
        "next_token_bytes": 131_072,
        "window_bytes_full": 0,
        "constant_state_bytes": 0,
        "block_table_bytes": 2_048,
        "policies": {
            name: {"bytes": 1_073_741_824, "who": list(POLICIES[name].who)} for name in POLICIES
        },
        "assumptions": [
            "bfloat16: 16 bits per element",
            "need: 2 sequences, each with 4,096 tokens",
            "reservation: whole blocks of 16 tokens for each sequence",
        ],
        "exclusions": [
            "weights, activations and workspaces of kernels",
            "allocator rounding, blocks kept for prefix reuse, tokens drafted ahead",
            "block tables (listed apart)",
        ],
    }


def test_windows_blocks_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(
        capsys, "gpt-oss-20b", "--tokens", "8190", "--batch", "32", "--block-size", "8192",
        "--devices", "8",
    )  # fmt: skip
    assert found["window_bytes_full"] == 32 * 3_145_728 // 8
    assert found["reserved_bytes"] == 12 * 1024**3 // 8
    assert found["next_token_bytes"] == 24_576 // 8


def test_latents(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "deepseek-v3", "--tokens", "65536", "--dtype", "4bit")
    assert found["need_bytes"] == 1_098 * 1024**2
    assert found["expanded_bytes_per_token"] == 4_997_120 // 4
    assert found["dtype"] == "4bit"


def test_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "gemma-3-1b", "--tokens", "32768", "--budget", "1GiB")
    assert found["budget_bytes"] == 1_073_741_824
    # 262,144 tokens of 4,096 B, less the 2,816 that the full windows cost.
    assert found["max_tokens"] == 259_328
    assert found["max_sequences"] == 7
    assert found["max_tokens_reserved"] == 40_320
    assert found["max_sequences_reserved"] == 1


def test_no_limit_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "mistral-7b-v0.1", "--tokens", "1", "--budget", "512MiB")
    assert found["max_tokens"] is None
    assert found["max_tokens_reserved"] == 4_096


def test_without_a_budget_nothing_is_said_of_what_fits(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "gemma-3-1b", "--tokens", "1")
    assert not {"max_tokens", "max_sequences", "budget_bytes", "expanded_bytes_per_token"} & {
        *found
    }


def test_a_group_size(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "llama-3-8b", "--tokens", "1", "--dtype", "int8", "--group-size", "128")
    assert found["need_items"] == {"keys": 32_768, "values": 32_768, "scales": 1_024}


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_file_and_its_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, as_folder: bool
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    source = tmp_path if as_folder else file
    found = answer(capsys, str(source), "--tokens", "1")
    assert (found["model"], found["need_bytes"]) == (source.name, 131_072)


def test_a_gallery_name_wins_over_a_folder(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps(LLAMA))
    assert answer(capsys, "gpt2", "--tokens", "1")["need_bytes"] == 36_864
    assert answer(capsys, "./gpt2", "--tokens", "1")["need_bytes"] == 131_072


# ---- Tables


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "gpt-oss-20b", "--tokens", "1000", "--budget", "80GiB"]) == 0
    assert (
        capsys.readouterr().out
        == """\
gpt-oss-20b: 24 layers (12 full, 12 window)
1 sequence of 1,000 tokens, bfloat16

need                                    27,721,728 B   26.438 MiB
  keys                                  13,860,864 B   13.219 MiB
  values                                13,860,864 B   13.219 MiB
reservation, blocks of 16               49,545,216 B   47.25 MiB
per token, one sequence                     49,152 B   48 KiB
per token beyond windows                    24,576 B   24 KiB
one more token now                          24,576 B   24 KiB
windows when full                        3,145,728 B   3 MiB
block tables                                   252 B   252 B

what engines set aside, state included
  whole text                            49,545,216 B   47.25 MiB
  ring                                  27,721,728 B   26.438 MiB
  pool per kind                         28,311,552 B   27 MiB
  pool per layer                        28,311,552 B   27 MiB
  cells                                 44,040,192 B   42 MiB
  whole text: whole blocks for all tokens in every layer (vLLM with \
--disable-hybrid-kv-cache-manager (2025); llama.cpp with --swa-full (2025))
  ring: a slot per token, and at most W slots in a windowed layer (transformers, \
StaticSlidingWindowLayer (2025); mlx-lm, RotatingKVCache (2025))
  pool per kind: blocks of one size for every kind of layer, with padding layers (vLLM, hybrid KV \
cache manager (2026))
  pool per layer: whole blocks of what each layer still needs, of the layer's own size (SGLang, \
SWAKVPool (2026))
  cells: the context for full layers, windows and a micro-batch of 512 for the others (llama.cpp, \
llama_kv_cache_iswa (2025))
  pool per kind has 2 groups of 12 layers, 0 padding layers among them, and blocks of 384 KiB

fits in 80 GiB (85,899,345,920 B)
  by need: 3,495,125 tokens in 1 sequence (the model has 131,072 positions), or 3,098 sequences of \
1,000 tokens
  by reservation: 1,747,616 tokens in 1 sequence (the model has 131,072 positions), or 1,733 \
sequences of 1,000 tokens

assumed
  - bfloat16: 16 bits per element
  - need: 1 sequence with 1,000 tokens, of which windowed layers hold at most W, the newest included
  - reservation: whole blocks of 16 tokens for each sequence, windowed layers charged in full
not counted
  - weights, activations and workspaces of kernels
  - allocator rounding, blocks kept for prefix reuse, tokens drafted ahead
  - block tables (listed apart)
"""
    )


def test_rows_for_latents_and_states(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "deepseek-v3", "--tokens", "1"]) == 0
    assert "per token if expanded                    4,997,120 B   4.766 MiB" in (
        capsys.readouterr().out
    )
    assert main(["size", "jamba-v0.1", "--tokens", "1"]) == 0
    assert "constant state                          17,432,576 B   16.625 MiB" in (
        capsys.readouterr().out
    )
    assert main(["size", "mistral-7b-v0.1", "--tokens", "1", "--budget", "1GiB"]) == 0
    answer = "by need: any number of tokens in 1 sequence (the model has 32,768 positions)"
    assert answer in capsys.readouterr().out


def test_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(load_gallery()) + 2
    assert lines[0].split() == ["name", "attention", "B/token", "beyond", "windows", "at", "32,768"]
    assert lines[3].split() == ["gpt-oss-120b", "GQA", "73,728", "36,864", "1.129", "GiB"]
    assert main(["models", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)
    assert [model["name"] for model in models] == list(load_gallery())
    assert models[2]["bytes"]["bytes_per_token"] == 73_728


# ---- The machine


@pytest.fixture
def _toy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = Hardware("toy", {"float32": 2e12}, 50e9, 1_000, "measured", {"threads": 2, "rates": {}})
    monkeypatch.setattr("kvbook.measure.probe", lambda: toy)


@pytest.mark.usefixtures("_toy_machine")
def test_peaks_of_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe"]) == 0
    assert (
        capsys.readouterr().out
        == """\
toy

memory bandwidth          50.0 GB/s
float32                2,000.0 GFLOP/s   memory is the limit below 40.0 FLOP per byte

measured: threads 2
"""
    )


@pytest.mark.usefixtures("_toy_machine")
def test_peaks_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "name": "toy", "peak_flops": {"float32": 2e12}, "bandwidth": 5e10, "memory": 1_000,
        "source": "measured", "provenance": {"threads": 2, "rates": {}},
    }  # fmt: skip


# ---- Bad input


SIZE = ("size", "llama-3-8b", "--tokens", "1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("size", "lama-3-8b", "--tokens", "1"), "no model named 'lama-3-8b' in the gallery; did "
         "you mean llama-3-8b, "),
        (("size", "none.json", "--tokens", "1"), "cannot read none.json: No such file"),
        (("size", "no/none.json", "--tokens", "1"), "cannot read no/none.json: No such file"),
        (("size", "meta-llama/Llama-3.1-8B", "--tokens", "1"), "did you mean llama-3.1-8b, "),
        (("size", "llama-3-8b", "--tokens", "0"), "tokens must be at least 1, got 0"),
        (("size", "llama-3-8b", "--tokens", "-5"), "tokens must be at least 1, got -5"),
        (("size", "llama-3-8b", "--tokens", "4q"), "--tokens: must be a whole number, got '4q'"),
        (("size", "llama-3-8b", "--tokens", "1,2"), "write 8192, 8,192, 8k (8,000) or 8Ki (8,192)"),
        (("size", "llama-3-8b", "--tokens", "1.5"), "must be a whole number, got '1.5'"),
        (("size",), "name a model: kvbook size llama-3.1-8b"),
        ((*SIZE, "--batch", "0"), "batch must be at least 1, got 0"),
        ((*SIZE, "--block-size", "0"), "block_size must be at least 1, got 0"),
        ((*SIZE, "--devices", "-1"), "devices must be at least 1, got -1"),
        ((*SIZE, "--dtype", "fp7"), "unknown dtype 'fp7'; did you mean fp8, "),
        ((*SIZE, "--dtype", "2"), "dtype '2' is a bare number, bits or bytes; allowed: "),
        ((*SIZE, "--dtype", "int8", "--group-size", "48"), "a group of 48 does not divide a "
         "vector of 128 elements"),
        ((*SIZE, "--group-size", "32"), "bfloat16 has no groups within a vector"),
        ((*SIZE, "--budget", "80"), "a size is a positive number and a unit, got '80'"),
        ((*SIZE, "--budget", "0GiB"), "a size must be at least one byte"),
        ((*SIZE, "--nothing"), "unrecognized arguments: --nothing"),
        ((*SIZE, "--bugdet", "1GiB"), "arguments: --bugdet 1GiB; did you mean --budget"),
        (("sizes",), "did you mean size?"),
        (("modles",), "did you mean models"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    line = complaint(capsys, *arguments)
    assert line.startswith("kvbook")
    assert message in line


@pytest.mark.parametrize("text", ["", "[]", '{"model_type": "llama"}', '{"n_layer": "x"}'])
def test_a_bad_config(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    assert complaint(capsys, "size", str(file), "--tokens", "1").startswith("kvbook size: ")


# ---- From outside


def test_it_starts_without_torch_and_fast() -> None:
    """0.3 s of processor time, so that a busy machine does not count against it."""
    code = "import sys, kvbook.cli; kvbook.cli.main(sys.argv[1:]); print('torch' in sys.modules)"
    seconds = []
    for _ in range(5):
        before = os.times()
        done = subprocess.run(
            [sys.executable, "-c", code, *SIZE], capture_output=True, text=True, check=True
        )
        after = os.times()
        seconds.append(
            after.children_user + after.children_system
            - before.children_user - before.children_system
        )  # fmt: skip
        assert done.stdout.splitlines()[-1] == "False"
    assert min(seconds) < 0.3


@pytest.mark.parametrize("module", ["kvbook", "kvbook.cli"])
def test_exit_codes_from_outside(module: str) -> None:
    command = [sys.executable, "-m", module]
    assert subprocess.run([*command, *SIZE], capture_output=True, check=False).returncode == 0
    bad = subprocess.run([*command, "size", "x", "--tokens", "1"], capture_output=True, check=False)
    assert (bad.returncode, bad.stdout) == (2, b"")
