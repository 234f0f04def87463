"""Text to ids and back, for the tokenizer inside SmolLM2's file and for Hugging Face folders."""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
from oracles import bpe
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from kvbook import UnsupportedModelError, WeightFileError
from kvbook.model import tokenizer as module
from kvbook.model.download import smollm2_gguf
from kvbook.model.gguf_file import GGUFFile
from kvbook.model.tokenizer import (
    Tokenizer,
    load_smollm2_tokenizer,
    load_tokenizer,
    smollm2_chat,
)

# Texts whose ids depend on whether digits are set apart before the text is split into words.
SET_APART = ["a run of spaces before a digit:   7 and\n\n   42", "½ Ⅻ ٣ 九 ①"]
TEXTS = [
    *SET_APART,
    "",
    " ",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "  leading and trailing  ",
    "several   inner    spaces\t\ttabs\r\n\r\nnew lines\n\n\n",
    "I'm sure they'll say it's fine; we've seen you'd do it, 'tis said. WE'LL SEE",
    "0 1 22 333 4444 12345 3.14159 1,000,000 -7 6.02e23 x1y2 2²",
    "def f(x):\n    return x ** 2  # comment\n\n\tif x:\n\t\tpass\n",
    '{"key": [1, 2.5, null], "text": "a\\nb"}',
    "Café naïve résumé façade; e\u0301 combining; Ångström",
    "你好，世界！これはテストです。한국어 텍스트",
    "Россия и Україна, مرحبا بالعالم, שלום, नमस्ते",
    "emoji 😀👍🏽🇺🇸❤️ and 👩‍👩‍👧‍👦",
    "\u00a0no-break\u200bzero width\ufeffmark \u2028 line",
    "$\\sum_{i=0}^{n} 2i = n(n+1)$ ∀x ∈ ℝ",
    "nul \x00 and bell \x07",
    "<|im_start|>user\nHi<|im_end|>\n",
    "text<|endoftext|>text <|im_end|><|im_end|> <filename>a.py<gh_stars>",
    "<|im_start |> <|im_end <|endoftext",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_smollm2_tokenizer()


@pytest.fixture(scope="module")
def metadata() -> dict:
    return GGUFFile(smollm2_gguf()).metadata


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    """What the transformers library makes of the same file."""
    path = smollm2_gguf()
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def oracle(text: str, metadata: dict) -> list[int]:
    tokens = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    return bpe.encode(text, vocabulary, metadata["tokenizer.ggml.merges"], tokens[:17])


def test_known_ids(tokenizer: Tokenizer) -> None:
    """0 <|endoftext|>, 1 <|im_start|>, 2 <|im_end|>; the digits 0 to 9 are 32 to 41."""
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert tokenizer.encode("9876543210") == [41, 40, 39, 38, 37, 36, 35, 34, 33, 32]
    assert tokenizer.vocab_size == 49_152
    assert tokenizer.stop_tokens == {2}


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_plain_bpe(text: str, tokenizer: Tokenizer, metadata: dict) -> None:
    assert tokenizer.encode(text) == oracle(text, metadata)


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_random_text_survives_and_matches_plain_bpe(tokenizer: Tokenizer, metadata: dict) -> None:
    """The alphabet leaves out characters newer than one of the two Unicode tables."""
    draw = random.Random(0)
    alphabet = "ab Zé0 9\n\t'.<|>_中😀 \u00a0½"
    text = "§".join("".join(draw.choices(alphabet, k=draw.randint(1, 30))) for _ in range(200))
    assert tokenizer.encode(text) == oracle(text, metadata)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_character_survives_or_is_refused(tokenizer: Tokenizer) -> None:
    """Six control characters have no token, nor has any character of the empty planes 4 to 11."""
    refused = []
    codes = [*range(0x800), 0xFFFD, 0x1F600, 0x3FFFF, 0x40000, 0xBFFFF, 0xC0000, 0x10FFFF]
    for character in map(chr, codes):
        try:
            assert tokenizer.decode(tokenizer.encode(character)) == character
        except ValueError:
            refused.append(ord(character))
    assert refused == [0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0x40000, 0xBFFFF]


def test_a_character_without_a_token_is_named_with_its_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"'\\x04' \(U\+0004\) at character 3"):
        tokenizer.encode("中ab\x04\x06")


def test_a_character_cut_in_the_middle_decodes_to_the_replacement_mark(
    tokenizer: Tokenizer,
) -> None:
    ids = tokenizer.encode("𓂀")
    assert len(ids) > 1
    assert tokenizer.decode(ids) == "𓂀"
    assert tokenizer.decode(ids[:-1]).startswith("\ufffd")


@pytest.mark.parametrize("token", [-1, 49_152, 10**6])
def test_an_id_outside_the_vocabulary_is_refused(token: int, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=f"token id {token} is not in the vocabulary of 49152"):
        tokenizer.decode([5, token])


@pytest.mark.parametrize("ids", [[True], [1.0], ["5"], "5", b"5", 5, None, [[5]], torch.ones(2)])
def test_what_is_no_list_of_ids_is_refused(ids: object, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"decode\(\) takes token ids in one list, got "):
        tokenizer.decode(ids)  # type: ignore[arg-type]


def test_ids_may_be_a_tensor_or_an_array(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Hello, world!")
    assert tokenizer.decode(torch.tensor(ids)) == "Hello, world!"
    assert tokenizer.decode(torch.tensor(ids).numpy()) == "Hello, world!"


@pytest.mark.parametrize("text", [None, 5, ["Hi"], b"Hi"])
def test_what_is_no_text_is_not_encoded(text: object, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"encode\(\) takes text, got "):
        tokenizer.encode(text)  # type: ignore[arg-type]


@pytest.mark.parametrize("stop", [[True], [-1], ["2"], [2**32], "2"])
def test_a_stop_token_is_an_id(stop: object, tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"stop.token.* got "):
        Tokenizer(tokenizer._backend, stop)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", [text for text in TEXTS if text not in SET_APART])
def test_ids_are_those_of_the_transformers_library(
    text: str, tokenizer: Tokenizer, library: PreTrainedTokenizerBase
) -> None:
    """It reads the same file without setting digits apart, which shows in two of the texts."""
    assert tokenizer.encode(text) == library.encode(text)


def test_digits_are_set_apart_before_spaces_are_looked_at(
    tokenizer: Tokenizer, metadata: dict
) -> None:
    """Two spaces are one token when a digit follows, and would be two without the digit step."""
    two_spaces, one_space, seven = oracle("  ", metadata), oracle(" ", metadata), [39]
    assert len(two_spaces) == len(one_space) == 1
    assert tokenizer.encode("  7") == two_spaces + seven
    assert tokenizer.encode(" 7") == one_space + seven


# Chat

CHATS = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    [
        {"role": "user", "content": "Name a color."},
        {"role": "assistant", "content": "Blue.\n"},
        {"role": "user", "content": "  Another, 中 😀?"},
    ],
    [{"role": "system", "content": ""}],
    [{"role": "user", "content": "a"}, {"role": "system", "content": "late"}],
]


@pytest.mark.parametrize("messages", CHATS)
def test_the_chat_format_is_the_one_of_the_template_in_the_file(
    messages: list[dict[str, str]], library: PreTrainedTokenizerBase
) -> None:
    expected = library.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert smollm2_chat(messages) == expected


def test_a_chat_is_one_control_token_around_each_message(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(smollm2_chat([{"role": "user", "content": "Hi"}]))
    assert [token for token in ids if token < 17] == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("messages", [[], [{"role": "tool", "content": "x"}], [{"content": "x"}]])
def test_a_chat_with_an_unknown_role_is_refused(messages: list[dict[str, str]]) -> None:
    with pytest.raises(ValueError, match="allowed: one or more of system, user and assistant"):
        smollm2_chat(messages)


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (None, "None"),
        ([{"type": "text", "text": "Hi"}], r"\[\{'text': 'Hi', 'type': 'text'\}\]"),
        (7, "7"),
        (b"Hi", "b'Hi'"),
        ({}, r"\{\}"),
    ],
)
def test_a_content_that_is_no_text_is_refused(content: object, shown: str) -> None:
    """Blaizzy/mlx-vlm#1864, langfuse/langfuse-python#1894: "None" and a list inside the prompt."""
    good = {"role": "user", "content": "Hi"}
    with pytest.raises(ValueError, match=f"message 1 has the content {shown}; allowed: text"):
        smollm2_chat([good, {"role": "user", "content": content}])  # type: ignore[dict-item]


def test_a_message_without_content_is_refused() -> None:
    with pytest.raises(ValueError, match="message 0 has the content None"):
        smollm2_chat([{"role": "user"}])


@pytest.mark.parametrize(
    "messages", [None, "Hi", {"role": "user", "content": "Hi"}, ["Hi"], [None], 3, b"Hi"]
)
def test_what_is_no_list_of_messages_is_refused(messages: object) -> None:
    with pytest.raises(ValueError, match=r"messages must be a list of .*, got "):
        smollm2_chat(messages)  # type: ignore[arg-type]


# Folders


@pytest.fixture
def folder(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize("text", TEXTS)
def test_a_folder_with_the_same_tokenizer_gives_the_same_ids(
    text: str, folder: Path, tokenizer: Tokenizer
) -> None:
    loaded = load_tokenizer(folder)
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.decode(tokenizer.encode(text)) == text


def test_nothing_is_added_even_if_the_folder_asks_for_a_first_token(folder: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    backend.save(str(folder / "tokenizer.json"))
    assert load_tokenizer(folder).encode("7") == [39]


@pytest.mark.parametrize("stop", [True, "2", -1, [2, "3"], {"id": 2}, 2**40])
def test_a_stop_token_of_a_folder_that_is_no_id_is_named(stop: object, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"eos_token_id": stop}))
    with pytest.raises(WeightFileError, match=r"config\.json has eos_token_id "):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("files", "stop"),
    [
        ({}, set()),
        ({"config.json": {"eos_token_id": 7}}, {7}),
        ({"config.json": {"eos_token_id": 7}, "generation_config.json": {}}, {7}),
        (
            {
                "config.json": {"eos_token_id": 7},
                "generation_config.json": {"eos_token_id": [8, 9]},
            },
            {8, 9},
        ),
        ({"config.json": {"eos_token_id": None}}, set()),
    ],
)
def test_stop_tokens_come_from_the_generation_config_first(
    files: dict[str, dict], stop: set[int], folder: Path
) -> None:
    for name, fields in files.items():
        (folder / name).write_text(json.dumps(fields))
    assert load_tokenizer(folder).stop_tokens == stop


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightFileError, match=r"there is no .*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer_file_is_named(folder: Path) -> None:
    path = folder / "tokenizer.json"
    path.write_text(path.read_text(encoding="utf-8")[:1000], encoding="utf-8")
    with pytest.raises(WeightFileError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(folder)


def test_a_gguf_tokenizer_of_another_kind_is_refused() -> None:
    other = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
    with pytest.raises(UnsupportedModelError, match=r"\('llama', 'default'\)"):
        module._from_gguf(SimpleNamespace(path="x", metadata=other))
