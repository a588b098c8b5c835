"""Classes of a storage's readers: a recipe may bring a storage back for some of them only.

The sign of a ReLU's value serves the gradient that asks whether it is above zero, and nobody else. Readers
that the same recipes serve are one class, a bit; a storage all of whose recipes serve all of its readers has
only one, and is not told of here.
"""

from collections.abc import Iterable

from lowtide.planning.values import Values

NEAR = 0.01
"""Of all ops of a step, how many may run between two reads of a storage for it to stay anyway."""
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
        free = [storage for storage in sorted(values.readers) if not storages[storage].pinned]
        found = {storage: values.classes(storage) for storage in free}
        reads = self._reads([storage for storage in free if 1 < len(found[storage]) <= MOST])
        for storage in free:
            self._add(storage, found[storage], reads.get(storage, {}))

    def _reads(self, storages: list[int]) -> dict[int, dict[int, list[int]]]:
        """By storage and reader, when the backward pass reads it: after how many ops that make something."""
        table, values = self._values.table, self._values
        found: dict[int, dict[int, list[int]]] = {storage: {} for storage in storages}
        place = 0
        for op in table.plain[table.first_backward :] if storages else ():
            place += bool(op.fresh)
            for source in {source for read in op.reads for source in values.sources(read)}:
                for storage in values.required[source] & found.keys():
                    found[storage].setdefault(source, []).append(place)
        return found

    def _is_near(self, mine: frozenset[int], reads: dict[int, list[int]]) -> bool:
        """Whether each read of some readers comes right after one of others, for which the block is there."""
        own = [place for reader in mine for place in reads.get(reader, ())]
        others = [place for reader in reads if reader not in mine for place in reads[reader]]
        most = 1 + NEAR * self._values.table.size
        return bool(own) and all(any(0 <= place - other <= most for other in others) for place in own)

    def _add(
        self,
        storage: int,
        found: list[tuple[frozenset[int], frozenset[int]]],
        reads: dict[int, list[int]],
    ) -> None:
        if not 1 < len(found) <= MOST or any(self._is_near(readers, reads) for readers, _ in found):
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
