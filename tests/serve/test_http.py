"""The endpoint: a server on a port of its own, asked by a plain client."""

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import uvicorn
from oracles.toys import toy

from kvbook.generate import generate_cached
from kvbook.serve.engine import Engine
from kvbook.serve.http import application
from kvbook.serve.text import TextStream

pytestmark = pytest.mark.usefixtures("one_thread")
STOP = 28


class Letters:
    """A tokenizer of 26 letters and a space, and one stop token."""

    stop_tokens = frozenset({STOP})

    def encode(self, text: str) -> list[int]:
        return ["abcdefghijklmnopqrstuvwxyz .".index(letter) for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join("abcdefghijklmnopqrstuvwxyz .!"[token] for token in tokens)


def chat(messages: Any) -> str:
    if not isinstance(messages, list):
        raise ValueError(f"messages must be a list, got {messages!r}")
    return " ".join(message["content"] for message in messages)


class Served:
    """A server in a thread."""

    def __init__(self) -> None:
        self.engine = Engine(toy(torch.float64), 16, 4, max_rows=4, max_waiting=2)
        self.gate = threading.Event()
        self.gate.set()
        step = self.engine.step

        def gated() -> Any:
            self.gate.wait(10)
            return step()

        self.engine.step = gated  # type: ignore[method-assign]
        app = application(self.engine, Letters(), "toy", chat)  # type: ignore[arg-type]
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        self.port = listening.getsockname()[1]
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none"))
        work = self.server.serve([listening])
        self.thread = threading.Thread(target=lambda: asyncio.run(work))
        self.thread.start()
        wait_for(lambda: self.server.started)

    def close(self) -> None:
        self.gate.set()
        self.server.should_exit = True
        self.thread.join(10)
        assert not self.thread.is_alive()

    def ask(self, path: str, fields: Any = None) -> tuple[int, str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        body = fields if isinstance(fields, str) else json.dumps(fields)
        connection.request("GET" if fields is None else "POST", path, body)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def begin(self, fields: Any) -> http.client.HTTPConnection:
        """Send a request and do not wait for the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        connection.request("POST", "/v1/completions", json.dumps(fields))
        return connection


def wait_for(true: Any) -> None:
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end, "it did not happen within ten seconds"
        time.sleep(0.005)


@pytest.fixture
def served() -> Iterator[Served]:
    server = Served()
    yield server
    server.close()


def greedy(prompt: str, n: int) -> str:
    tokens = Letters().encode(prompt)
    new = generate_cached(toy(torch.float64), [tokens], n, stop_tokens=[STOP])[0]
    return Letters().decode(new)


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


ASKED = {"model": "toy", "prompt": "hello", "max_tokens": 6, "temperature": 0}


def test_a_completion_is_the_text_that_the_model_gives_alone(served: Served) -> None:
    status, text = served.ask("/v1/completions", ASKED)
    answer = json.loads(text)
    assert status == 200
    assert (answer["object"], answer["model"]) == ("text_completion", "toy")
    [choice] = answer["choices"]
    expected = greedy("hello", 6)
    reason = "length" if len(expected) == 6 else "stop"
    assert choice == {"text": expected, "index": 0, "finish_reason": reason}
    assert answer["usage"] == {
        "prompt_tokens": 5, "completion_tokens": len(expected),
        "total_tokens": 5 + len(expected), "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_a_prompt_may_be_token_ids_and_a_second_time_it_is_found(served: Served) -> None:
    tokens = {**ASKED, "prompt": Letters().encode("hello there")}
    first, second = (json.loads(served.ask("/v1/completions", tokens)[1]) for _ in range(2))
    assert first["choices"][0]["text"] == second["choices"][0]["text"] == greedy("hello there", 6)
    found = [one["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second)]
    assert found == [0, 8]  # two full blocks of four; the last three tokens are computed


def test_a_cache_salt_separates(served: Served) -> None:
    def found(salt: str) -> int:
        asked = {**ASKED, "prompt": "hello there", "cache_salt": salt}
        usage = json.loads(served.ask("/v1/completions", asked)[1])["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [found("a"), found("b"), found("a")] == [0, 0, 8]


def test_a_stream_gives_the_same_text_in_parts(served: Served) -> None:
    asked = {**ASKED, "stream": True, "stream_options": {"include_usage": True}}
    status, text = served.ask("/v1/completions", asked)
    *parts, usage = events(text)
    assert status == 200
    assert len(parts) >= 2
    assert "".join(part["choices"][0]["text"] for part in parts) == greedy("hello", 6)
    assert [part["choices"][0]["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["choices"][0]["finish_reason"] in ("length", "stop")
    assert len({part["id"] for part in parts}) == 1
    assert (usage["choices"], usage["usage"]["prompt_tokens"]) == ([], 5)


def test_chat(served: Served) -> None:
    asked = {"messages": [{"role": "user", "content": "hi you"}], "max_tokens": 4, "temperature": 0}
    whole = json.loads(served.ask("/v1/chat/completions", asked)[1])
    parts = events(served.ask("/v1/chat/completions", {**asked, "stream": True})[1])
    expected = greedy("hi you", 4)
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": expected}
    assert "".join(part["choices"][0]["delta"]["content"] for part in parts) == expected
    assert parts[0]["object"] == "chat.completion.chunk"


def test_models_and_health(served: Served) -> None:
    assert json.loads(served.ask("/v1/models")[1])["data"][0]["id"] == "toy"
    assert served.ask("/health") == (200, '{"status":"ok"}')


@pytest.mark.parametrize(
    ("change", "status", "quoted"),
    [
        ({"prompt": ""}, 400, "at least one"),
        ({"prompt": 5}, 400, "5"),
        ({"prompt": [1, 999]}, 400, "999"),
        ({"prompt": [True]}, 400, "True"),
        ({"prompt": "a" * 80}, 400, "64"),
        ({"max_tokens": -1}, 400, "-1"),
        ({"max_tokens": 0}, 400, "0"),
        ({"stream_options": "yes"}, 400, "'yes'"),
        ({"stream_options": {"include_usage": 1}}, 400, "got 1"),
        ({"stream_options": {"include": True}}, 400, "include_usage"),
        ({"max_tokens": "6"}, 400, "'6'"),
        ({"max_tokens": 6, "max_completion_tokens": 7}, 400, "differ"),
        ({"temperature": -1}, 400, "-1"),
        ({"top_p": 2}, 400, "2"),
        ({"seed": "x"}, 400, "'x'"),
        ({"stream": "yes"}, 400, "'yes'"),
        ({"stop": ["x"]}, 400, "stop_token_ids"),
        ({"n": 2}, 400, "n is not implemented, got 2"),
        ({"logprobs": 3}, 400, "logprobs"),
        ({"tools": [{}]}, 400, "tools"),
        ({"best_off": 1}, 400, "best_off"),
        ({"messages": []}, 400, "not messages"),
        ({"stop_token_ids": 5}, 400, "5"),
        ({"stop_token_ids": [29]}, 400, "29"),
        ({"model": "gpt"}, 404, "gpt"),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_and_changes_nothing(
    served: Served, change: dict[str, Any], status: int, quoted: str
) -> None:
    answer = served.ask("/v1/completions", {**ASKED, **change})
    assert answer[0] == status
    assert quoted in json.loads(answer[1])["error"]["message"]
    assert served.engine.prefix.stats.prompts == 0
    assert served.ask("/v1/completions", ASKED)[0] == 200


@pytest.mark.parametrize("body", ["", "{", "[]", "7", "null"])
def test_a_body_that_is_no_object_is_refused(served: Served, body: str) -> None:
    status, text = served.ask("/v1/completions", body)
    assert status == 400
    assert json.loads(text)["error"]["type"] == "invalid_request_error"


def test_a_full_queue_says_so(served: Served) -> None:
    """Two may wait here; the third is refused while none of them has begun."""
    served.gate.clear()
    first = served.begin(ASKED)
    wait_for(lambda: len(served.engine.scheduler.waiting) == 1)  # the step stands at the gate
    served.gate.set()
    answer = first.getresponse()
    assert (answer.status, len(answer.read()) > 0) == (200, True)
    first.close()
    served.engine.scheduler.max_waiting = 0
    status, text = served.ask("/v1/completions", ASKED)
    assert status == 429
    assert json.loads(text)["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["waiting", "running"])
def test_a_client_that_closes_ends_its_request(served: Served, stream: bool, when: str) -> None:
    asked = {**ASKED, "max_tokens": 50, "stream": stream, "stop_token_ids": []}
    if when == "waiting":
        served.gate.clear()
    else:
        step = served.engine.step
        served.engine.step = lambda: (time.sleep(0.05), step())[1]  # type: ignore[method-assign]
    connection = served.begin(asked)
    wait_for(lambda: served.engine.scheduler.jobs)
    if when == "running":
        wait_for(lambda: served.engine.steps)
    assert connection.sock is not None
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    time.sleep(0.1)
    served.gate.set()
    wait_for(lambda: not served.engine.busy and served.engine.requests)
    [record] = served.engine.requests
    assert record.reason == "cancelled"
    assert record.new_tokens < 50
    assert served.engine.pool.in_use == 0
    assert served.ask("/v1/completions", ASKED)[0] == 200  # the others are unharmed


def test_metrics_are_what_the_engine_did(served: Served) -> None:
    for _ in range(2):
        served.ask("/v1/completions", {**ASKED, "prompt": "hello there", "stop_token_ids": []})
    status, text = served.ask("/metrics")
    assert status == 200
    lines = text.splitlines()
    for line in [
        'kvbook_blocks{state="used"} 0',
        'kvbook_blocks{state="evictable"} 4',  # 16 tokens written: 11 of the prompt, 5 of 6 drawn
        'kvbook_blocks{state="free"} 12',
        'kvbook_requests{state="running"} 0',
        'kvbook_requests_ended_total{reason="length"} 2',
        "kvbook_prompt_tokens_total 22",
        "kvbook_cached_tokens_total 8",
        "kvbook_new_tokens_total 12",
        "kvbook_computed_tokens_total 24",  # 16 and 8
        "kvbook_preemptions_total 0",
        "# TYPE kvbook_blocks gauge",
        "# TYPE kvbook_new_tokens_total counter",
    ]:
        assert line in lines
    names = [line.split("{")[0].split(" ")[0] for line in lines if not line.startswith("#")]
    assert set(names) == {line.split()[2] for line in lines if "# TYPE" in line}


def test_a_letter_of_several_tokens_is_handed_out_whole() -> None:
    """The three bytes of a euro sign, one token each."""
    whole = "€uro".encode()
    stream = TextStream(lambda tokens: bytes(tokens).decode(errors="replace"))
    parts = [stream.add([byte]) for byte in whole]
    assert parts == ["", "", "€", "u", "r", "o"]
    assert stream.end() == ""


def test_bytes_that_never_become_a_letter_come_at_the_end() -> None:
    stream = TextStream(lambda tokens: bytes(tokens).decode(errors="replace"))
    assert [stream.add([0x61]), stream.add([0xE2]), stream.end()] == ["a", "", "\ufffd"]
    assert TextStream(str).end() == ""
