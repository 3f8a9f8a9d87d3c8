"""Several answers as one stream of pieces. Owns the tasks that read them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from nereid.gateway.pieces import Piece

_End = BaseException | None


async def merged(answers: Sequence[AsyncGenerator[Piece, None]]) -> AsyncGenerator[tuple[int, Piece], None]:
    """The pieces of all `answers` as they come, each with its answer's number.

    Raises what an answer raises. However it ends, every answer is closed by then. No piece is read ahead of its time:
    a consumer that is slow slows its answers.
    """
    queue: asyncio.Queue[tuple[int, Piece | _End]] = asyncio.Queue(maxsize=1)
    tasks = [asyncio.ensure_future(_read(number, answer, queue)) for number, answer in enumerate(answers)]
    open_answers = len(tasks)
    try:
        while open_answers:
            number, item = await queue.get()
            if isinstance(item, Piece):
                yield number, item
            elif item is not None:
                raise item
            else:
                open_answers -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _read(
    number: int, answer: AsyncGenerator[Piece, None], queue: asyncio.Queue[tuple[int, Piece | _End]]
) -> None:
    try:
        async for piece in answer:
            await queue.put((number, piece))
    except Exception as error:
        await queue.put((number, error))
    else:
        await queue.put((number, None))
    finally:
        await answer.aclose()
