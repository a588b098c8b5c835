"""The default planner: one walk along the border between bytes and seconds, for all budgets at once.

Every plan it meets goes into an archive, from which a budget takes the cheapest that fits; the plans
of the other planners are there too, so that it is never worse than any of them. All limits are
counts of moves, never of time, so that the same step always gives the same archive.

1. `_walk_down`: from the plain step through falling targets; at each, evict what costs least per
   byte won (`descent`), merge back what still fits, then `_climb` halfway back up.
2. `_walk_up`: from plans with few, narrow cuts (deep models need them near their floor), merge
   back what fits into rising targets.
3. `_walk_down_from_lowest`: shrinking steps to the lowest peak there is.
4. `_refine_some`: at some budgets, exchange dear recomputes for cheaper ones.

What lies between two plans of the archive is worked out when a budget asks for it: see `polish`.
"""

from lowtide.planning import baselines, mu_two
from lowtide.planning.search.archive import Archive
from lowtide.planning.search.descent import climb, descend, refine, trim
from lowtide.planning.search.moves import delay
from lowtide.planning.search.runs import Runs
from lowtide.planning.search.table import Table

NUM_TARGETS = 24
MAX_MOVES = 4000
REFINE_WORK = 900
"""Budgets that are refined, times blocks of the forward pass."""


def build_archive(table: Table, prefixes: list[mu_two.Prefix]) -> Archive:
    """All plans that `auto` chooses from; `prefixes` are those of `mu-two`."""
    archive = Archive(table)
    runs = Runs(table)
    archive.record(runs)
    least = lower_bound_bytes(table, runs)
    targets = _targets(runs.peak_bytes(), least)
    if not table.uses:
        return archive
    _walk_down(archive, runs, targets)
    for plan in _cut_plans(table):
        _walk_up(archive, runs, plan, targets)
    _walk_down_from_lowest(archive, runs, least)
    _record_others(archive, runs, prefixes)
    _refine_some(archive, runs)
    return archive


def lower_bound_bytes(table: Table, runs: Runs) -> int:
    """No schedule holds less: what some node reads and makes, with all that is pinned by then."""
    most = pinned = 0
    for slot in range(table.size):
        if slot in table.on_demand:
            continue
        key = table.last_key(slot)
        blocks = {id(b): b for b in runs.held[key].values()}
        for read in table.plain[slot].reads:
            blocks.update((id(b), b) for b in runs.held[runs.latest(read, key)].values())
        pinned += sum(nbytes for _, nbytes, is_pinned in table.plain[slot].fresh if is_pinned)
        own = sum(b.nbytes for b in blocks.values() if not b.pinned)
        most = max(most, pinned + own + table.plain[slot].workspace_bytes)
    return most + table.static_bytes


def _targets(peak: int, least: int) -> list[int]:
    """Falling targets, evenly spaced between the plain peak and the lower bound."""
    return [peak - (peak - least) * i // NUM_TARGETS for i in range(1, NUM_TARGETS + 1)]


def _record_others(archive: Archive, runs: Runs, prefixes: list[mu_two.Prefix]) -> None:
    table = archive.table
    for plan in (baselines.retain_none(table), baselines.every_block(table), baselines.square_root(table)):
        runs.go_to(plan)
        archive.record(runs)
    for last, prefix in enumerate(prefixes):
        if archive.would_keep(prefix.peak_bytes, prefix.recompute_seconds):
            archive.add(prefix.peak_bytes, mu_two.plan_of(table, prefixes, last))


def _walk_down(archive: Archive, runs: Runs, targets: list[int]) -> None:
    above = runs.peak_bytes()
    for target in targets:
        if runs.peak_bytes() > target:
            start = runs.plan()
            fits = descend(runs, target, max_moves=MAX_MOVES)
            trim(runs, target)
            archive.record(runs)
            if not fits:
                runs.go_to(start)
                return
        _climb(archive, runs, above)
        above = target


def _climb(archive: Archive, runs: Runs, limit: int) -> None:
    """Record what merging gives between here and `limit`, and come back."""
    runs.journal.clear()
    start = runs.peak_bytes()
    for _ in climb(runs, [start + (limit - start) * part // 4 for part in range(1, 5)]):
        archive.record(runs)
    runs.rollback(0)


def _cut_plans(table: Table) -> list[frozenset[tuple[int, int]]]:
    """Plans that keep only what crosses some narrow cuts of the forward pass: few to many cuts."""
    plans: dict[frozenset[tuple[int, int]], None] = {}
    num_cuts = 1
    while num_cuts < max(2, len(table.uses) // 4):
        plans[baselines.cut_plan(table, num_cuts)] = None
        num_cuts = num_cuts * 3 // 2 + 1
    return list(plans)


def _walk_up(archive: Archive, runs: Runs, plan: frozenset[tuple[int, int]], targets: list[int]) -> None:
    runs.go_to(plan)
    delay(runs, 0)
    if not archive.record(runs):
        return
    lowest = runs.peak_bytes()
    for target in reversed(targets):
        if target >= lowest:
            trim(runs, target)
            delay(runs, 0)
            archive.record(runs)
    runs.journal.clear()


def _walk_down_from_lowest(archive: Archive, runs: Runs, least: int) -> None:
    """From the lowest peak so far to the lowest reachable, by steps that shrink where they fail."""
    lowest = archive.entries[0]
    runs.go_to(lowest.plan)
    step_bytes = max(1, (lowest.peak_bytes - least) // 2)
    failures = 0
    while failures < 6:
        here = runs.plan()
        target = runs.peak_bytes() - step_bytes
        fits = descend(runs, target, max_moves=MAX_MOVES)
        if fits:
            trim(runs, target)
        better = archive.record(runs)
        if not fits:
            failures += 1
            step_bytes = max(1, step_bytes // 3)
            if not better:
                runs.go_to(here)


def _refine_some(archive: Archive, runs: Runs) -> None:
    """Refine the best plan at some budgets, the lowest first; large steps get fewer of them."""
    low, high = archive.entries[0].peak_bytes, archive.entries[-1].peak_bytes
    count = min(NUM_TARGETS, REFINE_WORK // max(1, len(runs.forward_blocks)))
    for part in range(count):
        budget = low + (high - low) * (part + 1) // (count + 1)
        entry = archive.best(budget)
        assert entry is not None
        runs.go_to(entry.plan)
        for _ in range(3):
            if not refine(runs, budget, tries=40):
                break
        archive.record(runs)
