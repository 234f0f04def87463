"""An engine for coroutines: steps run in a thread, tokens come as they are drawn.

Knows: what may be done between two steps, which stream waits for what. Does not know: how
requests are planned, how a client asks.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Self, TypeVar

from kvbook.cache.sizes import check_class
from kvbook.serve.engine import Engine
from kvbook.serve.records import Output
from kvbook.serve.request import Request
from kvbook.serve.totals import Totals

T = TypeVar("T")


class AsyncEngine:
    """``async for output in serving.stream(request)``, as many at once as there are clients.

    It is a context: inside, the engine is this object's alone; at its end every request that is
    still under way is cancelled. Closing a stream early cancels its request, and its blocks are
    free with the next step: use ``contextlib.aclosing`` if you leave the loop yourself.

    >>> from kvbook.model.toy import toy_model
    >>> async def main():
    ...     async with AsyncEngine(Engine(toy_model(), blocks=8, block_size=4)) as serving:
    ...         request = Request([1, 2, 3], max_new_tokens=3)
    ...         return [len(output.tokens) async for output in serving.stream(request)]
    >>> asyncio.run(main())
    [1, 1, 1]
    """

    def __init__(self, engine: Engine) -> None:
        check_class("engine", engine, Engine, "Engine(model, blocks)")
        self.engine, self.totals = engine, Totals()
        self._todo: deque[Callable[[], object]] = deque()  # for between two steps
        self._streams: dict[int, Stream] = {}
        self._wake = asyncio.Event()
        self._open = False

    async def __aenter__(self) -> Self:
        self._open = True
        self._runner = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._open = False
        self._soon(self._cancel_all)
        await self._runner

    async def stream(self, request: Request) -> AsyncGenerator[Output, None]:
        """Outputs of one request, the last with a ``reason`` and the request's record.

        Raises what ``Engine.add`` refuses, before the first output; and the error of a request
        that ends with one.
        """
        async with aclosing(await self.submit(request)) as stream:
            async for output in stream:
                yield output

    async def submit(self, request: Request) -> "Stream":
        """Take a request in. Its outputs are to be iterated, and to be closed in any case.

        Raises what ``Engine.add`` refuses.
        """
        stream = Stream(self)

        def add() -> int:
            stream.id = self.engine.add(request)
            self._streams[stream.id] = stream
            return stream.id

        try:
            await self._ask(add)
        except asyncio.CancelledError:
            await stream.aclose()
            raise
        return stream

    async def between_steps(self, look: Callable[[Engine], T]) -> T:
        """What ``look`` says of the engine at a moment when no step is under way."""
        return await self._ask(lambda: look(self.engine))

    def _ask(self, question: Callable[[], T]) -> "asyncio.Future[T]":
        """The answer to a question that is put between two steps, or its error."""
        if not self._open:
            raise ValueError("the engine is closed; enter it: async with AsyncEngine(engine)")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def ask() -> None:
            if answer.cancelled():  # whoever asked has gone
                return
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        self._soon(ask)
        return answer

    def _soon(self, action: Callable[[], object]) -> None:
        self._todo.append(action)
        self._wake.set()

    def leave(self, stream: "Stream") -> None:
        """Nobody reads this stream any more. If its request is under way, it ends."""

        def end() -> None:
            if stream.id is not None and self._streams.pop(stream.id, None) is not None:
                self._cancel(stream.id)

        self._soon(end)

    def _cancel_all(self) -> None:
        for id in self._streams:
            self._cancel(id)

    def _cancel(self, id: int) -> None:
        """End a request, unless it has ended and nobody was told yet."""
        if id in self.engine.scheduler.jobs:
            self.engine.cancel(id)

    async def _run(self) -> None:
        """Step after step while there is something to do; in between, what was asked for."""
        try:
            while self._open or self._todo or self.engine.busy:
                while self._todo:
                    self._todo.popleft()()
                if self.engine.busy:
                    self._hand_out(await asyncio.to_thread(self.engine.step))
                    continue
                self._wake.clear()
                if self._open and not self._todo:
                    await self._wake.wait()
        except BaseException as error:  # nobody waits for ever
            self._open = False
            for stream in self._streams.values():
                stream.outputs.put_nowait(error)
            raise

    def _hand_out(self, outputs: list[Output]) -> None:
        for output in outputs:
            if output.record is not None:
                self.totals.add(output.record)
            stream = self._streams.get(output.id)
            if stream is not None:
                stream.outputs.put_nowait(output)
                if output.reason is not None:
                    del self._streams[output.id]


class Stream:
    """Outputs of one request, as they come. Made by ``AsyncEngine.submit``."""

    def __init__(self, serving: AsyncEngine) -> None:
        self.id: int | None = None  # once it is taken in
        self.outputs: asyncio.Queue[Output | BaseException] = asyncio.Queue()
        self._serving, self._over = serving, False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        if self._over:
            raise StopAsyncIteration
        output = await self.outputs.get()
        self._over = isinstance(output, BaseException) or output.reason is not None
        if isinstance(output, BaseException):
            raise output
        if output.error is not None:
            raise output.error
        return output

    async def aclose(self) -> None:
        """End the request, if it is under way; its blocks are free with the next step."""
        self._over = True
        self._serving.leave(self)
