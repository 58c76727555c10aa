"""Coroutine tests that a fixture runs, for example in virtual time."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from meshrl.sim.virtual_loop import run_virtual

Story = Callable[..., Awaitable[None]]


def story_on(
    stage: Callable[..., None], *fixtures: str, given: int = 1
) -> Callable[[Story], Callable[..., None]]:
    """Make a test of a story. `stage` gets the values of `fixtures` and a function that it awaits
    with the `given` first arguments of the story; the others are fixtures of the test.
    """

    def wrap_story(story: Story) -> Callable[..., None]:
        taken = list(inspect.signature(story).parameters.values())[given:]
        own = [one.name for one in taken]

        def test(**values: Any) -> None:
            rest = {name: values[name] for name in own}
            stage(*(values[name] for name in fixtures), lambda *first: story(*first, **rest))

        kind = inspect.Parameter.KEYWORD_ONLY
        names = dict.fromkeys((*own, *fixtures))
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
        test.__name__, test.__doc__ = story.__name__, story.__doc__
        test.__qualname__, test.__module__ = story.__qualname__, story.__module__
        test.__signature__ = signature  # type: ignore[attr-defined]
        return test

    return wrap_story


def virtual_test(**options: Any) -> Callable[[Story], Callable[..., None]]:
    """Make a test of a story that takes a virtual clock and random numbers first; `options` are
    those of `run_virtual`.
    """
    return story_on(lambda story: run_virtual(story, **options), given=2)
