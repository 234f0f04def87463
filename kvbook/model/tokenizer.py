"""Text to token ids and back.

Knows: how SmolLM2's GGUF metadata and a Hugging Face ``tokenizer.json`` describe a tokenizer, and
the chat format of SmolLM2. Does not know: weights, models, caches.
"""

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvbook.errors import UnsupportedModelError, WeightFileError
from kvbook.model.download import smollm2_gguf
from kvbook.model.gguf_file import GGUFFile

CONTROL_TOKEN = 3  # the GGUF token type of <|im_start|> and its like
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Tokenizer:
    """Text to ids and ids to text. With SmolLM2's, decoding the ids gives the same text back.

    ``stop_tokens``: ids after which generation ends. ``vocab_size``: control tokens included.
    """

    def __init__(self, backend: tokenizers.Tokenizer, stop_tokens: Iterable[int]) -> None:
        self._backend = backend
        self.stop_tokens = frozenset(stop_tokens)
        self.vocab_size: int = backend.get_vocab_size()
        # Byte-level BPE spells text in 256 letters, one per byte. A letter that never occurred
        # in training may have no token; SmolLM2 lacks 21, six of them control characters.
        byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        letters = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
        self._letters_without_token = set(letters) - backend.get_vocab().keys()

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, with nothing added before or after.

        The name of a control token inside the text, such as ``<|im_end|>``, becomes that token.
        Raises ``ValueError`` for a character that the vocabulary cannot spell, such as U+0004,
        which the backend would drop without a word.
        """
        if self._letters_without_token and self._letters_of(text) & self._letters_without_token:
            lost = [c for c in text if self._letters_of(c) & self._letters_without_token]
            raise ValueError(
                f"the text has {lost[0]!r} (U+{ord(lost[0]):04X}) at character "
                f"{text.index(lost[0])}, for which this vocabulary has no token. Remove it."
            )
        return self._backend.encode(text, add_special_tokens=False).ids

    def _letters_of(self, text: str) -> set[str]:
        words = self._backend.pre_tokenizer.pre_tokenize_str(text)
        return {letter for word, _ in words for letter in word}

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of the ids, control tokens written out.

        Ids that stop in the middle of a character end in U+FFFD. Raises ``ValueError`` for an id
        outside the vocabulary, which the backend would drop without a word.
        """
        ids = [int(token) for token in tokens]
        for token in ids:
            if token < 0 or self._backend.id_to_token(token) is None:
                raise ValueError(
                    f"token id {token} is not in the vocabulary of {self.vocab_size} tokens. Give "
                    "ids from this tokenizer's own model."
                )
        return self._backend.decode(ids, skip_special_tokens=False)


def load_smollm2_tokenizer() -> Tokenizer:
    """The tokenizer of SmolLM2-135M-Instruct, fetched with the weights the first time."""
    return load_tokenizer(smollm2_gguf())


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Load a tokenizer from a ``.gguf`` file, or from a folder that holds ``tokenizer.json``.

    Raises ``UnsupportedModelError`` for a GGUF tokenizer of another kind than SmolLM2's, and
    ``WeightFileError`` for a folder without a readable ``tokenizer.json``.
    """
    path = Path(source)
    if path.suffix == ".gguf":
        return _from_gguf(GGUFFile(path).metadata)
    return _from_folder(path)


def smollm2_chat(messages: Sequence[Mapping[str, str]]) -> str:
    """The prompt for SmolLM2's answer to the messages, as text for ``Tokenizer.encode``.

    Each message has a ``role`` (system, user or assistant) and a ``content``. Without a system
    message first, the model's own one is put there. Source: the chat template in the model's file.
    Raises ``ValueError`` for another role and for a content that is no text.

    >>> print(smollm2_chat([{"role": "user", "content": "Hi"}]))
    <|im_start|>system
    You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
    <|im_start|>user
    Hi<|im_end|>
    <|im_start|>assistant
    <BLANKLINE>
    """
    if not _is_list(messages) or not all(isinstance(m, Mapping) for m in messages):
        raise ValueError(
            "messages must be a list of {'role': ..., 'content': ...}, got "
            f"{reprlib.repr(messages)}"
        )
    roles = [message.get("role") for message in messages]
    wrong = [role for role in roles if role not in ("system", "user", "assistant")]
    if wrong or not roles:
        raise ValueError(
            f"the messages have the roles {reprlib.repr(roles)}; allowed: one or more of system, "
            "user and assistant. Give each message a 'role' and a 'content'."
        )
    for place, message in enumerate(messages):
        if not isinstance(message.get("content"), str):
            raise ValueError(
                f"message {place} has the content {reprlib.repr(message.get('content'))}; allowed: "
                "text. Join the parts of a list, and leave out a message without text."
            )
    if roles[0] != "system":
        messages = [{"role": "system", "content": DEFAULT_SYSTEM}, *messages]
    turns = [f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages]
    return "".join(turns) + "<|im_start|>assistant\n"


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    kind = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise UnsupportedModelError(
            f"the GGUF file has a tokenizer of kind {kind}; allowed: ('gpt2', 'smollm'). Use the "
            "model's folder with tokenizer.json instead."
        )
    texts = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {text: token for token, text in enumerate(texts)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # "smollm": each digit stands alone, then GPT-2's split into words; bytes as printable letters.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    backend.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text, kind in zip(texts, types, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return Tokenizer(backend, [metadata["tokenizer.ggml.eos_token_id"]])


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise WeightFileError(
            f"there is no {file}; allowed: a folder with tokenizer.json, or a .gguf file. Save the "
            "tokenizer in that format (transformers: tokenizer.save_pretrained)."
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises the bare class
        raise WeightFileError(
            f"{file} is not a tokenizer in the format of the tokenizers package ({error}). Fetch "
            "it again."
        ) from error
    return Tokenizer(backend, _stop_tokens(folder))


def _stop_tokens(folder: Path) -> list[int]:
    """``eos_token_id``, one number or a list, where Hugging Face folders keep it."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        stop = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if stop is not None:
            return [stop] if isinstance(stop, int) else list(stop)
    return []
