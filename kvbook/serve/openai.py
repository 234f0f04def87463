"""What a client sends and gets, in the form of OpenAI's completions.

Knows: fields of requests and answers. Does not know: how they travel, when they are served.

https://platform.openai.com/docs/api-reference/completions and …/chat
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbook.cache.block_key import Identity
from kvbook.generate.sampling import Sampler
from kvbook.model.tokenizer import Tokenizer
from kvbook.serve.records import RequestRecord
from kvbook.serve.request import Request

Fields = Mapping[str, Any]
Chat = Callable[[Sequence[Mapping[str, str]]], str]  # messages to the text of a prompt

# Fields that may be given, but only with the value that changes nothing.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1, None), "best_of": (1, None), "echo": (False, None), "logprobs": (None, False),
    "top_logprobs": (None,), "suffix": (None, ""), "stop": (None, [], ""),
    "presence_penalty": (0, None), "frequency_penalty": (0, None), "logit_bias": (None, {}),
    "tools": (None, []), "response_format": (None, {"type": "text"}),
}  # fmt: skip
TAKEN = {
    "model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "top_k", "seed", "stream", "stream_options", "stop_token_ids", "priority", "drafts",
    "cache_salt", "user", "metadata", "store",
}  # fmt: skip


@dataclass(frozen=True)
class Format:
    """How one of the two endpoints writes its answers."""

    object: str
    chunk: str
    prefix: str
    whole: Callable[[str], dict[str, Any]]
    part: Callable[[str], dict[str, Any]]


COMPLETION = Format(
    "text_completion", "text_completion", "cmpl",
    whole=lambda text: {"text": text},
    part=lambda text: {"text": text},
)  # fmt: skip
CHAT = Format(
    "chat.completion", "chat.completion.chunk", "chatcmpl",
    whole=lambda text: {"message": {"role": "assistant", "content": text}},
    part=lambda text: {"delta": {"role": "assistant", "content": text}},
)  # fmt: skip


def parse(fields: object, tokenizer: Tokenizer, chat: Chat | None) -> Request:
    """The request that a client's fields describe. ``chat`` is given where they are messages.

    Raises ``ValueError`` for a field that is unknown, or known and not implemented: nothing that
    a client asked for is left out in silence.
    """
    if not isinstance(fields, dict):
        raise ValueError(f"the request must be a JSON object, got {fields!r:.80}")
    unknown = sorted(fields.keys() - TAKEN - NEUTRAL.keys())
    if unknown:
        raise ValueError(f"unknown fields {unknown}; known are {sorted(TAKEN | NEUTRAL.keys())}")
    for name, neutral in NEUTRAL.items():
        if name in fields and fields[name] not in neutral:
            raise ValueError(
                f"{name} is not implemented, got {fields[name]!r:.80}; leave it out"
                + ("; stop_token_ids takes token ids" if name == "stop" else "")
            )
    limits = [
        name for name in ("max_tokens", "max_completion_tokens") if fields.get(name) is not None
    ]
    if len(limits) > 1 and fields[limits[0]] != fields[limits[1]]:
        raise ValueError("max_tokens and max_completion_tokens differ; give one of them")
    temperature, top_p = _given(fields, "temperature", 1.0), _given(fields, "top_p", 1.0)
    salt = fields.get("cache_salt")
    return Request(
        _prompt(fields, tokenizer, chat),
        fields[limits[0]] if limits else 16,
        Sampler(temperature=temperature, top_k=fields.get("top_k"), top_p=top_p),
        seed=_given(fields, "seed", 0),
        stop_tokens=_given(fields, "stop_token_ids", tuple(tokenizer.stop_tokens)),
        priority=_given(fields, "priority", 0),
        identity=Identity(salt=salt),
        drafts=_given(fields, "drafts", 0),
    )


def streams(fields: Fields) -> bool:
    """Whether tokens shall come as they are drawn."""
    stream = _given(fields, "stream", False)
    if type(stream) is not bool:
        raise ValueError(f"stream must be true or false, got {stream!r:.80}")
    return stream


def wants_usage(fields: Fields) -> bool:
    """Whether a stream shall end with the counts of its tokens."""
    options = _given(fields, "stream_options", {})
    if not isinstance(options, dict) or not options.keys() <= {"include_usage"}:
        raise ValueError(f"stream_options takes include_usage alone, got {options!r:.80}")
    wanted = _given(options, "include_usage", False)
    if type(wanted) is not bool:
        raise ValueError(f"include_usage must be true or false, got {wanted!r:.80}")
    return wanted


def usage(record: RequestRecord) -> dict[str, Any]:
    return {
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.new_tokens,
        "total_tokens": record.prompt_tokens + record.new_tokens,
        "prompt_tokens_details": {"cached_tokens": record.cached_tokens},
    }


def error(message: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def _given(fields: Fields, name: str, default: Any) -> Any:
    """Null is how some clients leave a field out."""
    value = fields.get(name)
    return default if value is None else value


def _prompt(fields: Fields, tokenizer: Tokenizer, chat: Chat | None) -> list[int]:
    wanted, other = ("messages", "prompt") if chat else ("prompt", "messages")
    if wanted not in fields or other in fields:
        raise ValueError(f"this endpoint takes {wanted}, and not {other}")
    given = fields[wanted]
    if chat is not None:
        return tokenizer.encode(chat(given))
    if isinstance(given, str):
        return tokenizer.encode(given)
    if isinstance(given, list) and all(type(token) is int for token in given):
        return list(given)
    raise ValueError(f"prompt must be a text or a list of token ids, got {given!r:.80}")
