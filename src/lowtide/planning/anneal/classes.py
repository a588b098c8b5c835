"""Classes of a storage's readers: a recipe may bring a storage back for some of them only.

The sign of a ReLU's value serves the gradient that asks whether it is above zero, and nobody else. Readers
that the same recipes serve are one class, a bit; a storage all of whose recipes serve all of its readers has
only one, and is not told of here.
"""

from collections.abc import Iterable

from lowtide.planning.values import Values

MOST = 8
"""Classes of one storage. Where there would be more, only what serves all readers brings it back."""


class Classes:
    """`all` are the classes of each storage that has several, `served` by recipe and storage those that it
    brings back, of storages with one class as well."""

    def __init__(self, values: Values) -> None:
        self._values = values
        self.all: dict[int, int] = {}
        self.served: dict[int, dict[int, int]] = {}
        self._readers: dict[int, dict[int, int]] = {}
        storages = values.table.step.storages
        for storage in sorted(values.readers):
            if not storages[storage].pinned:
                self._add(storage)

    def _add(self, storage: int) -> None:
        found = self._values.classes(storage)
        if len(found) == 1 or len(found) > MOST:
            for number in sorted(frozenset.intersection(*(recipes for _, recipes in found))):
                self.served.setdefault(number, {})[storage] = 1
            return
        self.all[storage] = (1 << len(found)) - 1
        self._readers[storage] = {
            reader: 1 << i for i, (readers, _) in enumerate(found) for reader in readers
        }
        for i, (_, recipes) in enumerate(found):
            for number in sorted(recipes):
                mine = self.served.setdefault(number, {})
                mine[storage] = mine.get(storage, 0) | 1 << i

    def read(self, reads: Iterable[int]) -> dict[int, int]:
        """By storage with several classes, those that these reads need."""
        found: dict[int, int] = {}
        if self.all:
            for read in reads:
                for source in self._values.sources(read):
                    for storage in self._values.required[source]:
                        if storage in self.all:
                            one = self._readers[storage].get(source, self.all[storage])
                            found[storage] = found.get(storage, 0) | one
        return found

    def through(self, view: int, storage: int) -> int:
        """The classes of the readers of a storage that may read it through a view."""
        readers = self._readers[storage].items()
        return sum({one for reader, one in readers if view in self._values.way_back(reader)})

    def made(self, number: int) -> list[tuple[int, int]]:
        """The blocks that a recipe makes, as (storage, class)."""
        mine = self.served.get(number, {})
        return [
            (storage, one)
            for storage, _, _ in self._values.table.recipes[number].fresh
            for one in single_classes(mine.get(storage, 0) if storage in self.all else 1)
        ]


def single_classes(classes: int) -> list[int]:
    return [1 << i for i in range(MOST) if classes >> i & 1]
