"""Text to token ids and back.

Knows: how SmolLM2's GGUF metadata and a Hugging Face ``tokenizer.json`` describe a tokenizer, and
the chat format of SmolLM2. Does not know: weights, models, caches.
"""

import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from kvbook.errors import UnsupportedModelError, WeightFileError
from kvbook.model.arguments import check_is
from kvbook.model.download import smollm2_gguf
from kvbook.model.gguf_file import GGUFFile
from kvbook.model.json_file import read_object

LARGEST_ID = 2**32 - 1  # that the backend can hold
CONTROL_TOKEN = 3  # the GGUF token type of <|im_start|> and its like
DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class Tokenizer:
    """Text to ids and ids to text. With SmolLM2's, decoding the ids gives the same text back.

    ``stop_tokens``: ids after which generation ends. ``vocab_size``: control tokens included.
    """

    def __init__(self, backend: tokenizers.Tokenizer, stop_tokens: Iterable[int]) -> None:
        check_is("backend", backend, tokenizers.Tokenizer)
        if isinstance(stop_tokens, str | bytes):
            raise ValueError(f"stop_tokens must be token ids, got {reprlib.repr(stop_tokens)}")
        self._backend = backend
        self.stop_tokens = frozenset(_stop_token(token) for token in stop_tokens)
        self.vocab_size: int = backend.get_vocab_size()
        # Byte-level BPE spells text in 256 letters, one per byte. A letter that never occurred
        # in training may have no token; SmolLM2 lacks 21, six of them control characters.
        byte_level = isinstance(backend.decoder, decoders.ByteLevel) and backend.pre_tokenizer
        letters = pre_tokenizers.ByteLevel.alphabet() if byte_level else []
        self._letters_without_token = set(letters) - backend.get_vocab().keys()

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, with nothing added before or after.

        The name of a control token inside the text, such as ``<|im_end|>``, becomes that token.
        Raises ``ValueError`` for a character that the vocabulary cannot spell, such as U+0004,
        which the backend would drop without a word, and for what is no text.
        """
        if not isinstance(text, str):
            raise ValueError(f"encode() takes text, got {reprlib.repr(text)}; decode() takes ids")
        if self._letters_without_token and self._letters_of(text) & self._letters_without_token:
            lost = [c for c in text if self._letters_of(c) & self._letters_without_token]
            raise ValueError(
                f"the text has {lost[0]!r} (U+{ord(lost[0]):04X}) at character "
                f"{text.index(lost[0])}, for which this vocabulary has no token. Remove it."
            )
        try:
            return self._backend.encode(text, add_special_tokens=False).ids
        except Exception as error:  # the library raises the bare class
            raise ValueError(
                f"the tokenizer cannot encode {reprlib.repr(text)} ({error}); change the text, or "
                "use the model's own tokenizer"
            ) from error

    def _letters_of(self, text: str) -> set[str]:
        words = self._backend.pre_tokenizer.pre_tokenize_str(text)
        return {letter for word, _ in words for letter in word}

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of the ids, control tokens written out.

        Ids that stop in the middle of a character end in U+FFFD. Raises ``ValueError`` for an id
        outside the vocabulary, which the backend would drop without a word, and for what is no id.
        """
        ids = _ids(tokens)
        for token in ids:
            known = 0 <= token <= LARGEST_ID and self._backend.id_to_token(token) is not None
            if not known:
                raise ValueError(
                    f"token id {reprlib.repr(token)} is not in the vocabulary of {self.vocab_size} "
                    "tokens. Give ids from this tokenizer's own model."
                )
        return self._backend.decode(ids, skip_special_tokens=False)


def load_smollm2_tokenizer() -> Tokenizer:
    """The tokenizer of SmolLM2-135M-Instruct, fetched with the weights the first time."""
    return load_tokenizer(smollm2_gguf())


def load_tokenizer(source: str | Path) -> Tokenizer:
    """Load a tokenizer from a ``.gguf`` file, or from a folder that holds ``tokenizer.json``.

    Raises ``UnsupportedModelError`` for a GGUF tokenizer of another kind than SmolLM2's, and
    ``WeightFileError`` for a damaged file or a folder without a readable ``tokenizer.json``.
    """
    path = Path(source)
    if path.suffix == ".gguf":
        return _from_gguf(GGUFFile(path))
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


def _ids(tokens: Iterable[int]) -> list[int]:
    """Plain integers, from a list or from a tensor or array of one dimension."""
    try:
        ids = list(tokens)
        if isinstance(tokens, str | bytes) or any(isinstance(token, bool) for token in ids):
            raise TypeError("bool and text are no ids")
        return [operator.index(token) for token in ids]
    except TypeError as error:
        raise ValueError(
            f"decode() takes token ids in one list, got {reprlib.repr(tokens)} ({error})"
        ) from error


def _stop_token(token: object) -> int:
    if type(token) is not int or not 0 <= token <= LARGEST_ID:
        raise ValueError(
            f"a stop token must be an integer from 0 to {LARGEST_ID:,}, got {reprlib.repr(token)}"
        )
    return token


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _from_gguf(file: GGUFFile) -> Tokenizer:
    kind = file.metadata.get("tokenizer.ggml.model"), file.metadata.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise UnsupportedModelError(
            f"{file.path} has a tokenizer of kind {kind!r:.80}; allowed: ('gpt2', 'smollm'). Use "
            "the model's folder with tokenizer.json instead."
        )
    texts = _listed(file, "tokens", str)
    types = _listed(file, "token_type", int)
    merges = [tuple(merge.split(" ")) for merge in _listed(file, "merges", str)]
    stop = file.metadata.get("tokenizer.ggml.eos_token_id")
    vocabulary = {text: token for token, text in enumerate(texts)}
    if len(vocabulary) != len(texts) or len(types) != len(texts):
        raise WeightFileError(
            f"{file.path} lists {len(texts):,} tokens, {len(vocabulary):,} of them different, and "
            f"{len(types):,} types; each token needs a text and a type of its own. Fetch it again."
        )
    if type(stop) is not int or not 0 <= stop < len(texts):
        raise WeightFileError(
            f"{file.path} has eos_token_id {stop!r:.80}; it must be from 0 to {len(texts) - 1:,}. "
            "Fetch it again."
        )
    try:
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    except Exception as error:  # the library raises the bare class
        raise WeightFileError(
            f"{file.path} has merges that do not fit its tokens ({error}). Fetch it again."
        ) from error
    # "smollm": each digit stands alone, then GPT-2's split into words; bytes as printable letters.
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [
            AddedToken(text, special=True, normalized=False)
            for text, kind in zip(texts, types, strict=True)
            if kind == CONTROL_TOKEN
        ]
    )
    return Tokenizer(backend, [stop])


def _listed(file: GGUFFile, name: str, kind: type) -> list[Any]:
    """A list of the tokenizer's metadata, all of one kind."""
    found = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not all(type(entry) is kind for entry in found):
        raise WeightFileError(
            f"{file.path} has no list of {kind.__name__} as tokenizer.ggml.{name}, got "
            f"{reprlib.repr(found)}. Fetch it again."
        )
    return found


def _from_folder(folder: Path) -> Tokenizer:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise WeightFileError(
            f"there is no {file}; allowed: a folder with tokenizer.json, or a .gguf file. Save the "
            "tokenizer in that format (transformers: tokenizer.save_pretrained)."
        )
    stop = _stop_tokens(folder)
    try:
        return Tokenizer(tokenizers.Tokenizer.from_file(str(file)), stop)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises the bare class, or panics
        raise WeightFileError(
            f"{file} is not a tokenizer in the format of the tokenizers package ({error}). Fetch "
            "it again."
        ) from error


def _stop_tokens(folder: Path) -> list[int]:
    """``eos_token_id``, one number or a list, where Hugging Face folders keep it."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        stop = read_object(file).get("eos_token_id") if file.is_file() else None
        if stop is not None:
            listed = stop if isinstance(stop, list) else [stop]
            try:
                return [_stop_token(token) for token in listed]
            except ValueError as error:
                raise WeightFileError(
                    f"{file} has eos_token_id {reprlib.repr(stop)}: {error}. Fetch it again."
                ) from error
    return []
