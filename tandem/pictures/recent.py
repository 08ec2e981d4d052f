"""What is found again for a while, in bounded memory."""

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")


class Recent(Generic[Key, Item]):
    """At most so many items by their keys: what was used longest ago goes first."""

    def __init__(self, most: int):
        self._most = most
        self._items: OrderedDict[Key, Item] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def find(self, key: Key) -> Item | None:
        if key in self._items:
            self._items.move_to_end(key)
        return self._items.get(key)

    def keep(self, key: Key, item: Item) -> None:
        self._items[key] = item
        self._items.move_to_end(key)
        if len(self._items) > self._most:
            self._items.popitem(last=False)
