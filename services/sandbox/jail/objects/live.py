"""Containers that the solution holds on to: one for both sides, like the object it stands for."""

from __future__ import annotations

from typing import Any

from . import values

MOST = 256  # whose changes are looked for


class Live:
    """Those that cross by number, as both sides last saw them."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, list[Any]]] = {}  # by number
        self._places: dict[int, int] = {}  # their numbers, by the containers' ids here

    def number(self, container: Any) -> Any:
        """Its number; None if it has none."""
        return self._places.get(id(container))

    def container(self, number: int) -> Any:
        return self._known[number][0]

    def share(self, held: list[tuple[int, Any]]) -> None:
        """From now on they cross by number. Both sides forget the same ones, the oldest."""
        for number, container in held:
            if number in self._known:
                self._places.pop(id(self._known[number][0]), None)
            self._known[number] = (container, values.state(container))
            self._places[id(container)] = number
        while len(self._known) > MOST:
            container, _ = self._known.pop(next(iter(self._known)))
            self._places.pop(id(container), None)

    def changes(self, message: values.Message) -> list[Any]:
        """[number, content] of those that were changed here since the other side last saw them."""
        found = []
        for number, (container, before) in list(self._known.items()):
            now = values.state(container)
            if not values.same(now, before):
                found.append([number, message.content(container)])
                self._known[number] = (container, now)
        return found

    def change(self, changes: Any, message: values.Message) -> None:
        """Does to them what the other side has told."""
        for number, content in changes:
            container, _ = self._known[int(number)]
            message.fill(container, content)
            self._known[int(number)] = (container, values.state(container))
