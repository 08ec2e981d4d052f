"""Coroutines that run at the same time, and end together."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def together(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Their results, in order. Where one raises, the others are cancelled and have ended before it is raised."""
    tasks = [asyncio.create_task(one) for one in coroutines]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
