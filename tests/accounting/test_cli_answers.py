"""What else the kvbook command answers: cards, shares, comparisons, files, lengths, Markdown."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvbook
from kvbook.cli import main

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4_096,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    return json.loads(printed(capsys, "size", *arguments, "--json"))


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        code: object = main(arguments)
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert (code, captured.out) == (2, "")
    assert captured.err.count("\n") == 1
    return captured.err.rstrip("\n")


# ---- Lengths


@pytest.mark.parametrize(
    ("written", "tokens"), [("8192", 8_192), ("8,192", 8_192), ("8k", 8_000), ("128Ki", 131_072)]
)
def test_counts_as_people_write_them(
    capsys: pytest.CaptureFixture[str], written: str, tokens: int
) -> None:
    assert answer(capsys, "llama-3.1-8b", "--tokens", written)["need_bytes"] == tokens * 131_072


def test_without_a_length_per_token_and_at_three(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "size", "gemma-3-27b", "--batch", "2").splitlines()
    assert lines[:8] == [
        "gemma-3-27b: 62 layers (10 full, 52 window)",
        "bfloat16",
        "",
        "per token, one sequence                    507,904 B   496 KiB",
        "per token beyond windows                    81,920 B   80 KiB",
        "2 sequences of 4,096                 1,543,503,872 B   1.438 GiB",
        "2 sequences of 32,768                6,241,124,352 B   5.812 GiB",
        "2 sequences of 131,072              22,347,251,712 B   20.812 GiB",
    ]
    assert not any("need:" in line for line in lines)
    found = answer(capsys, "gemma-3-27b")
    assert [size["tokens"] for size in found["sizes"]] == [4_096, 32_768, 131_072]
    assert found["bytes_per_token"] == 507_904


def test_a_layer_with_two_caches_is_not_two_layers(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "size", "deepseek-v4-flash", "--tokens", "1000")
    title = "deepseek-v4-flash: 125 caches (43 window, 41 compressed, 41 recurrent)\n"
    assert text.startswith(title)
    assert "pool per kind: not possible: 4 tokens share an entry" in text


def test_one_is_singular(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "size", "llama-3-8b", "--tokens", "1", "--block-size", "1",
                   "--budget", "131072B")  # fmt: skip
    assert "1 sequence of 1 token, bfloat16" in text
    assert "by need: 1 token in 1 sequence, or 1 sequence of 1 token\n" in text
    assert "whole blocks of 1 token for each sequence" in text


# ---- Memory


def test_a_card_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(
        capsys, "size", "llama-3-8b", "--tokens", "8192", "--card", "h100-sxm", "--weights",
        "8.03B@16", "--utilization", "0.9", "--reserve", "2GiB",
    )  # fmt: skip
    assert (
        """\
memory                                        85,520,809,984 B   79.647 GiB
of which the engine uses 90 %                 76,968,728,985 B   71.683 GiB
weights, 8.03B parameters at 16 bits         -16,060,000,000 B   14.957 GiB
activations and workspaces, as given          -2,147,483,648 B   2 GiB
left for the cache                            58,761,245,337 B   54.726 GiB

fits in 54.726 GiB (58,761,245,337 B)
  by need: 448,312 tokens in 1 sequence (the model has 8,192 positions), or 54 sequences of 8,192 \
tokens
"""
        in text
    )


def test_a_budget_that_ends_before_the_positions_do(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "size", "llama-3-8b", "--tokens", "1", "--budget", "1GiB")
    assert "by need: 8,192 tokens in 1 sequence, or 8,192 sequences of 1 token" in text
    text = printed(capsys, "size", "llama-3-8b", "--tokens", "1", "--budget", "1073872896B")
    assert "by need: 8,193 tokens in 1 sequence (the model has 8,192 positions), or" in text


def test_memory_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(
        capsys, "llama-3-8b", "--tokens", "1", "--budget", "20GB", "--weights", "8B@16", "--tp", "2"
    )
    assert found["memory_lines"] == [
        {"line": "memory", "bytes": 20_000_000_000},
        {"line": "weights, 8B parameters at 16 bits, 1 / 2 of them", "bytes": -8_000_000_000},
        {"line": "left for the cache", "bytes": 12_000_000_000},
    ]
    assert found["budget_bytes"] == 12_000_000_000
    assert found["max_tokens"] == 12_000_000_000 // 65_536


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--weights", "8B@16"), "--weights 8B@16 is taken off a memory; add --card or --budget"),
        (("--reserve", "1GiB"), "--reserve 1GiB is taken off a memory"),
        (("--utilization", "0.9"), "--utilization 0.9 is a share of a memory"),
        (("--card", "H100"), None),
        (("--card", "H1000"), "no machine named 'H1000'; did you mean H100-SXM"),
        (("--card", "H100", "--budget", "1GiB"), "not allowed with argument --card"),
        (("--budget", "1GiB", "--weights", "8B"), "weights are parameters at bits per weight"),
        (("--budget", "1GiB", "--weights", "8B@16"), "nothing is left for a cache: memory: 1 GiB"),
        (("--budget", "1GiB", "--utilization", "90"), "a share is a number above 0 and at most 1"),
    ],
)
def test_memory_that_cannot_be(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str | None
) -> None:
    command = ("size", "llama-3-8b", "--tokens", "1", *arguments)
    if message is None:
        assert "fits in 79.647 GiB" in printed(capsys, *command)
    else:
        assert message in complaint(capsys, *command)


# ---- Devices


@pytest.mark.parametrize(
    ("arguments", "need"),
    [
        (("--tp", "4"), 8 * 1_000 * 2 * 512),
        (("--devices", "4"), 8 * 1_000 * 2 * 512),
        (("--tp", "16"), 8 * 1_000 * 1 * 512),  # 8 KV heads on 16 devices: one each
        (("--dp", "4"), 2 * 1_000 * 8 * 512),
        (("--dp", "3"), 3 * 1_000 * 8 * 512),
        (("--cp", "4"), 8 * 250 * 8 * 512),
        (("--tp", "2", "--dp", "2", "--cp", "2"), 4 * 500 * 4 * 512),
    ],
)
def test_shares_of_one_device(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], need: int
) -> None:
    """32 layers of 8 KV heads with 512 bytes per token and head; 8 sequences of 1,000 tokens."""
    found = answer(capsys, "llama-3-8b", "--tokens", "1000", "--batch", "8", *arguments)
    assert found["need_bytes"] == 32 * need


# ---- Two models


def test_two_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "size", "--compare", "llama-3-8b", "gpt-oss-20b", "--tokens", "4096")
    lines = text.splitlines()
    assert lines[0] == "1 sequence of 4,096 tokens, bfloat16"
    assert lines[2].split() == ["llama-3-8b", "gpt-oss-20b", "first", "/", "second"]
    assert lines[3].split() == ["need", "536,870,912", "B", "103,809,024", "B", "5.17"]
    windows = next(line for line in lines if line.startswith("windows when full"))
    assert windows.split()[-4:] == ["-", "3,145,728", "B", "-"]
    found = answer(capsys, "--compare", "llama-3-8b", "gpt-oss-20b", "--tokens", "4096")
    assert [size["need_bytes"] for size in found] == [536_870_912, 103_809_024]


def test_a_comparison_takes_its_models_after_it(capsys: pytest.CaptureFixture[str]) -> None:
    line = complaint(capsys, "size", "gpt2", "--compare", "gpt2", "opt-13b")
    assert "--compare takes the two models, got 'gpt2' beside them" in line
    assert "expected 2 arguments" in complaint(capsys, "size", "--compare", "gpt2")


# ---- Markdown


def test_tables_in_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "size", "llama-3-8b", "--tokens", "1", "--markdown")
    assert "| need | 131,072 | 128 KiB |\n" in text
    assert "|  | bytes |  |\n| --- | ---: | ---: |\n" in text
    assert "([vLLM, hybrid KV cache manager (2026)](https://github.com/vllm-project/vllm/" in text
    text = printed(capsys, "size", "--compare", "gpt2", "opt-13b", "--markdown")
    assert "| per token, one sequence | 36,864 B | 819,200 B | 0.045 |\n" in text
    assert printed(capsys, "models", "--markdown").startswith("| name | attention | B/token |")
    assert "not allowed with" in complaint(capsys, "models", "--markdown", "--json")


# ---- Files


def test_fields_are_overridden(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    override = ("--override", "num_key_value_heads=4")
    assert answer(capsys, str(file), "--tokens", "1", *override)["need_bytes"] == 65_536
    assert answer(capsys, "llama-3-8b", "--tokens", "1", *override)["need_bytes"] == 65_536
    both = answer(capsys, "llama-3-8b", "--tokens", "1", *override, "--override", "head_dim=64")
    assert both["need_bytes"] == 32_768
    assert any("num_key_value_heads" in words for words in both["assumptions"])
    line = complaint(capsys, "size", "gpt2", "--tokens", "1", "--override", "n_head")
    assert "an override is NAME=VALUE, got 'n_head'" in line


def gguf(path: Path, **fields: int | str) -> Path:
    """A GGUF file with a header alone: version 3, no tensors."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    data = b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields))
    for key, value in fields.items():
        data += text(key.replace("__", "."))
        if isinstance(value, str):
            data += struct.pack("<I", 8) + text(value)
        else:
            data += struct.pack("<II", 4, value)
    path.write_bytes(data)
    return path


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    return gguf(
        tmp_path / "m.gguf", general__architecture="llama", llama__block_count=32,
        llama__embedding_length=4_096, llama__attention__head_count=32,
        llama__attention__head_count_kv=8,
    )  # fmt: skip


def test_a_gguf_file_and_its_folder(capsys: pytest.CaptureFixture[str], model_file: Path) -> None:
    for source in (model_file, model_file.parent):
        found = answer(capsys, str(source), "--tokens", "1")
        assert (found["model"], found["need_bytes"]) == ("m.gguf", 131_072)
    (model_file.parent / "n.gguf").write_bytes(model_file.read_bytes())
    line = complaint(capsys, "size", str(model_file.parent), "--tokens", "1")
    assert "holds 2 GGUF files, m.gguf the first; name one of them" in line
    (model_file.parent / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": 1}))
    assert answer(capsys, str(model_file.parent), "--tokens", "1")["need_bytes"] == 4_096


def test_files_that_cannot_be_read(
    capsys: pytest.CaptureFixture[str], model_file: Path, tmp_path: Path
) -> None:
    line = complaint(capsys, "size", str(model_file), "--override", "block_count=1")
    assert "m.gguf is a GGUF file, whose fields have names of their own, got --override" in line
    assert "cannot read none.gguf: No such file" in complaint(capsys, "size", "none.gguf")
    bad = tmp_path / "bad.gguf"
    for content in (b"", b"GGUF", b"not a model at all, but long enough to be read"):
        bad.write_bytes(content)
        assert "cannot read" in complaint(capsys, "size", str(bad))


# ---- The command itself


def test_bare_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys).startswith("usage: kvbook ")


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"kvbook {kvbook.__version__}\n"


def test_a_reader_that_has_enough_is_no_error() -> None:
    """As with head: the pipe is closed before everything is written."""
    command = [sys.executable, "-c", "import sys; from kvbook.cli import main\n"
               "sys.exit(max(main(['models', '--json']) for _ in range(9)))"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0


def test_a_probe_without_torch_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kvbook.measure", None)
    assert "is not installed; install it with: python -m pip install" in complaint(capsys, "probe")
