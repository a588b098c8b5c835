"""Storages instead of values: which storages a run needs, through which views, and which recipes serve.

A value refers to storages; a view or a part of a tuple makes none of its own. So whoever reads a value
needs a block of its storages, made by a first run or by a recipe, and, after a recipe, the views on the
way again. Bounds and annealing both think so: they choose blocks, and the views follow.
"""

from dataclasses import dataclass
from functools import cached_property

from lowtide.planning.search.table import Table


@dataclass(frozen=True)
class Values:
    """What the values of a step refer to. All storages are those that are not static."""

    table: Table

    @cached_property
    def is_dynamic(self) -> list[bool]:
        return [not storage.static for storage in self.table.step.storages]

    @cached_property
    def required(self) -> list[frozenset[int]]:
        """By rank, the storages that every run of it gives its value."""
        found = []
        for node in self.table.step.nodes:
            held = set(node.holds).intersection(*(recipe.holds for recipe in node.recipes))
            found.append(frozenset(s for s in held if self.is_dynamic[s]))
        return found

    @cached_property
    def view_recipe(self) -> list[int | None]:
        """By rank, the recipe that takes its value again without making anything, if it has such a one."""
        recipes = self.table.recipes
        return [next((n for n in mine if not recipes[n].fresh), None) for mine in self.table.again]

    def is_view(self, rank: int) -> bool:
        """Whether every run of a rank only refers to what others made."""
        mine = self.table.again[rank]
        return bool(mine) and not any(self.table.recipes[n].fresh for n in mine)

    def sources(self, rank: int) -> frozenset[int]:
        """The forward ranks whose values a backward rank refers to, itself for a forward one."""
        if rank not in self._sources:
            table = self.table
            if rank < table.first_backward:
                self._sources[rank] = frozenset((rank,))
            else:
                shared = [u for s, providers in table.plain[rank].shared for u in providers[:1]]
                self._sources[rank] = frozenset().union(*(self.sources(u) for u in shared))
        return self._sources[rank]

    @cached_property
    def _sources(self) -> dict[int, frozenset[int]]:
        return {}

    def way_back(self, rank: int) -> frozenset[int]:
        """A rank and those that its value can be taken from again, view by view."""
        if rank not in self._ways_back:
            found = {rank}
            recipe = self.view_recipe[rank]
            if recipe is not None:
                for read in self.table.recipes[recipe].reads:
                    if not self.required[rank].isdisjoint(self.required[read]):
                        found |= self.way_back(read)
            self._ways_back[rank] = frozenset(found)
        return self._ways_back[rank]

    @cached_property
    def _ways_back(self) -> dict[int, frozenset[int]]:
        return {}

    @cached_property
    def readers(self) -> dict[int, set[int]]:
        """By storage, the forward ranks through which the backward pass or a recipe reads it."""
        table = self.table
        found: dict[int, set[int]] = {}
        read = {u for op in table.plain[table.first_backward :] for u in op.reads}
        read |= {u for op in table.recipes if op.fresh for u in op.reads}
        for rank in read:
            for source in self.sources(rank):
                for storage in self.required[source]:
                    found.setdefault(storage, set()).add(source)
        return found

    def ways(self, storage: int) -> list[int]:
        """Recipes that make a storage anew for any of its readers."""
        return sorted(frozenset().union(*(self._serving(r, storage) for r in self.readers.get(storage, ()))))

    def _serving(self, reader: int, storage: int) -> frozenset[int]:
        """Recipes that make a storage anew for one of its readers."""
        back = self.way_back(reader)
        return frozenset(n for rank in back for n in self.table.again[rank] if self._makes(n, storage))

    def classes(self, storage: int) -> list[tuple[frozenset[int], frozenset[int]]]:
        """The readers of a storage that the same recipes serve, each with those recipes."""
        found: dict[frozenset[int], set[int]] = {}
        for reader in sorted(self.readers.get(storage, ())):
            found.setdefault(self._serving(reader, storage), set()).add(reader)
        return [(frozenset(readers), recipes) for recipes, readers in found.items()]

    def _makes(self, recipe: int, storage: int) -> bool:
        return any(made == storage for made, _, _ in self.table.recipes[recipe].fresh)

    def views(self, rank: int) -> list[int]:
        """Those among a rank and what it is taken from that can be taken again without making anything."""
        back = (r for source in self.sources(rank) for r in self.way_back(source))
        return sorted(r for r in back if self.view_recipe[r] is not None)

    def view_seconds(self, rank: int) -> float:
        recipe = self.view_recipe[rank]
        assert recipe is not None
        return self.table.recipes[recipe].seconds
