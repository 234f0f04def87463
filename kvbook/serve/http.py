"""The engine behind HTTP: an ASGI application that any OpenAI client can talk to.

Knows: routes, streams, status codes. Does not know: what requests mean, how they are served.

    from kvbook.serve.http import application
    uvicorn.run(application(engine, tokenizer, "smollm2", smollm2_chat))
"""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvbook.errors import QueueFullError
from kvbook.model.tokenizer import Tokenizer
from kvbook.serve import openai
from kvbook.serve.asynchronous import AsyncEngine, Stream
from kvbook.serve.engine import Engine
from kvbook.serve.metrics import prometheus
from kvbook.serve.openai import CHAT, COMPLETION, Chat, Format
from kvbook.serve.records import RequestRecord
from kvbook.serve.text import TextStream

CLIENT_HAS_GONE = 499  # nobody reads this status


def application(
    engine: Engine, tokenizer: Tokenizer, model: str, chat: Chat | None = None
) -> Starlette:
    """Routes /v1/completions, /v1/chat/completions (with ``chat``), /v1/models, /metrics, /health.

    ``model`` is the name that clients give. ``chat`` makes a prompt of messages.
    """
    server = _Server(AsyncEngine(engine), tokenizer, model, chat)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with server.engine:
            yield

    routes = [
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/models", server.models),
        Route("/metrics", server.metrics),
        Route("/health", server.health),
    ]
    if chat is not None:
        routes.append(Route("/v1/chat/completions", server.chat_completions, methods=["POST"]))
    return Starlette(routes=routes, lifespan=lifespan)


class _Server:
    """What the routes share."""

    def __init__(
        self, engine: AsyncEngine, tokenizer: Tokenizer, model: str, chat: Chat | None
    ) -> None:
        self.engine, self.tokenizer, self.model, self.chat = engine, tokenizer, model, chat
        self.numbers = itertools.count()

    async def health(self, _: HttpRequest) -> Response:
        return JSONResponse({"status": "ok"})

    async def models(self, _: HttpRequest) -> Response:
        own = {"id": self.model, "object": "model", "created": 0, "owned_by": "kvbook"}
        return JSONResponse({"object": "list", "data": [own]})

    async def metrics(self, _: HttpRequest) -> Response:
        text = await self.engine.between_steps(
            lambda engine: prometheus(engine, self.engine.totals)
        )
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def completions(self, http: HttpRequest) -> Response:
        return await self._answer(http, COMPLETION, None)

    async def chat_completions(self, http: HttpRequest) -> Response:
        return await self._answer(http, CHAT, self.chat)

    async def _answer(self, http: HttpRequest, form: Format, chat: Chat | None) -> Response:
        try:
            fields = json.loads(await http.body())
            request = openai.parse(fields, self.tokenizer, chat)
            if fields.get("model") not in (None, self.model):
                message = f"there is no model {fields['model']!r:.80}; this is {self.model}"
                return JSONResponse(openai.error(message, "not_found_error"), 404)
            stream = openai.streams(fields)
            with_usage = openai.wants_usage(fields)
            outputs = await self.engine.submit(request)
            if stream:
                return EventStream(outputs, self._events(outputs, form, with_usage))
            return await self._whole(http, outputs, form)
        except QueueFullError as full:
            return JSONResponse(openai.error(str(full), "rate_limit_error"), 429)
        except ValueError as wrong:
            return JSONResponse(openai.error(str(wrong), "invalid_request_error"), 400)
        except Exception as failed:
            return JSONResponse(openai.error(str(failed), "server_error"), 500)

    async def _whole(self, http: HttpRequest, outputs: Stream, form: Format) -> Response:
        """One answer at the end; no more work, and no answer, for a client that has gone."""
        async with aclosing(outputs):
            answer = asyncio.create_task(self._collect(outputs, form))
            gone = asyncio.create_task(_disconnect(http))
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            answer.cancel(), gone.cancel()
            return Response(status_code=CLIENT_HAS_GONE) if gone.done() else await answer

    async def _collect(self, outputs: Stream, form: Format) -> Response:
        tokens: list[int] = []
        record = None
        async for output in outputs:
            tokens += output.tokens
            record = output.record
        assert record is not None
        text = self.tokenizer.decode(tokens) if tokens else ""
        body = self._body(form.object, form, [{**form.whole(text), **_end(record)}])
        return JSONResponse(body | {"usage": openai.usage(record)})

    async def _events(
        self, outputs: Stream, form: Format, with_usage: bool
    ) -> AsyncGenerator[str, None]:
        """Server-sent events."""
        text, base = TextStream(self.tokenizer.decode), self._body(form.chunk, form, [])
        try:
            async for output in outputs:
                record = output.record
                new = text.add(output.tokens) + (text.end() if record else "")
                state = _end(record) if record else {"index": 0, "finish_reason": None}
                yield _event(base | {"choices": [{**form.part(new), **state}]})
                if record and with_usage:
                    yield _event(base | {"usage": openai.usage(record)})
        except Exception as failed:  # the status is sent already
            yield _event(openai.error(str(failed), "server_error"))
        yield "data: [DONE]\n\n"

    def _body(self, kind: str, form: Format, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": f"{form.prefix}-{next(self.numbers)}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
        }


class EventStream(StreamingResponse):
    """If the client closes, or however it ends, the request ends too."""

    def __init__(self, outputs: Stream, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.outputs = outputs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.outputs):
            await super().__call__(scope, receive, send)


async def _disconnect(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _end(record: RequestRecord) -> dict[str, Any]:
    return {"index": 0, "finish_reason": record.reason}


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
