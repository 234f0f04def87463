"""The engine for coroutines: the same tokens, many streams at once, and every way to leave."""

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

import pytest
import torch
from oracles.toys import toy

from kvbook.generate import generate_cached
from kvbook.model.transformer import Transformer
from kvbook.serve.asynchronous import AsyncEngine
from kvbook.serve.engine import Engine
from kvbook.serve.request import Request

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[1, 2, 3], [1, 2, 3, 4, 5, 6], [7], [9, 8, 7, 6, 5, 4, 3]]


def engine(blocks: int = 16, **options: Any) -> Engine:
    return Engine(toy(torch.float64), blocks, 4, **options)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Within ten seconds: a stream that waits for ever is a failure, not a pause."""
    return asyncio.run(asyncio.wait_for(work, 10))


async def read(serving: AsyncEngine, request: Request) -> list[int]:
    return [token async for output in serving.stream(request) for token in output.tokens]


def test_streams_at_once_get_what_each_would_get_alone() -> None:
    model: Transformer = toy(torch.float64)

    async def main() -> list[list[int]]:
        async with AsyncEngine(engine()) as serving:
            requests = [Request(prompt, max_new_tokens=6) for prompt in PROMPTS]
            return await asyncio.gather(*(read(serving, request) for request in requests))

    alone = [generate_cached(model, [prompt], 6)[0] for prompt in PROMPTS]
    assert run(main()) == alone


def test_tokens_come_one_by_one_and_the_last_output_has_the_record() -> None:
    async def main() -> list[tuple[int, str | None, bool]]:
        async with AsyncEngine(engine()) as serving:
            stream = serving.stream(Request([1, 2], max_new_tokens=3))
            return [(len(o.tokens), o.reason, o.record is None) async for o in stream]

    assert run(main()) == [(1, None, True), (1, None, True), (1, "length", False)]


def test_a_request_that_is_refused_raises_in_its_own_stream_alone() -> None:
    async def main() -> tuple[Any, list[int]]:
        async with AsyncEngine(engine()) as serving:
            good = asyncio.create_task(read(serving, Request([1, 2, 3], max_new_tokens=5)))
            try:
                await read(serving, Request([1, 999]))
            except ValueError as error:
                return str(error), await good
            raise AssertionError("an unknown token was accepted")

    message, good = run(main())
    assert "999" in message
    assert len(good) == 5


def test_closing_a_stream_early_ends_its_request_and_gives_its_blocks_back() -> None:
    async def main() -> tuple[int, int, list[str]]:
        served = engine()
        async with AsyncEngine(served) as serving:
            async with aclosing(serving.stream(Request([1, 2], max_new_tokens=40))) as stream:
                async for _ in stream:
                    break
            in_use = await serving.between_steps(lambda engine: engine.pool.in_use)
            under_way = await serving.between_steps(lambda engine: len(engine.scheduler.jobs))
        return in_use, under_way, [record.reason for record in served.requests]

    assert run(main()) == (0, 0, ["cancelled"])


@pytest.mark.parametrize("after", [0.0, 0.005, 0.02])
def test_cancelling_whoever_reads_ends_the_request_too(after: float) -> None:
    """Also before it was taken in: a cancelled reader leaves nobody under way."""

    async def main() -> int:
        served = engine()
        async with AsyncEngine(served) as serving:
            reader = asyncio.create_task(read(serving, Request([1, 2], max_new_tokens=60)))
            await asyncio.sleep(after)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            return await serving.between_steps(lambda engine: len(engine.scheduler.jobs))

    assert run(main()) == 0


def test_leaving_the_context_ends_what_is_under_way() -> None:
    async def main() -> tuple[Any, int]:
        served = engine()
        async with AsyncEngine(served) as serving:
            stream = await serving.submit(Request([1, 2], max_new_tokens=60))
            await anext(stream)
        rest = [output async for output in stream]
        return rest[-1].reason, served.pool.in_use

    assert run(main()) == ("cancelled", 0)


def test_a_request_that_ends_with_an_error_raises_it_and_the_others_go_on() -> None:
    served = engine()
    draw = served._draw

    def failing(work: Any, logits: torch.Tensor) -> list[int]:
        if work.job.id == 0 and work.job.drawn:
            raise RuntimeError("no more")
        return draw(work, logits)

    served._draw = failing  # type: ignore[method-assign]

    async def main() -> list[Any]:
        async with AsyncEngine(served) as serving:
            requests = [Request(prompt, max_new_tokens=4) for prompt in PROMPTS[:2]]
            work = (read(serving, request) for request in requests)
            return await asyncio.gather(*work, return_exceptions=True)

    first, second = run(main())
    assert isinstance(first, RuntimeError)
    assert second == generate_cached(toy(torch.float64), [PROMPTS[1]], 4)[0]


def test_if_the_engine_itself_fails_nobody_waits_for_ever() -> None:
    served = engine()

    def broken() -> Any:
        raise ZeroDivisionError("a fault of the engine")

    served.step = broken  # type: ignore[method-assign]

    async def main() -> list[Any]:
        serving = await AsyncEngine(served).__aenter__()
        work = (read(serving, Request(prompt)) for prompt in PROMPTS)
        answers = await asyncio.gather(*work, return_exceptions=True)
        with pytest.raises(ZeroDivisionError):
            await serving.__aexit__()
        return answers

    assert [type(answer) for answer in run(main())] == [ZeroDivisionError] * 4


def test_an_engine_that_is_not_entered_or_has_been_left_takes_nothing() -> None:
    async def main() -> list[str]:
        serving, messages = AsyncEngine(engine()), []
        for _ in range(2):
            with pytest.raises(ValueError, match="closed; enter it") as refused:
                await read(serving, Request([1]))
            messages.append(str(refused.value))
            async with serving:
                pass
        return messages

    assert len(run(main())) == 2


def test_it_takes_an_engine() -> None:
    with pytest.raises(ValueError, match="'toy'"):
        AsyncEngine("toy")  # type: ignore[arg-type]
