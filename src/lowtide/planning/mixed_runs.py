"""Combinations of schedules in which the runs of one graph differ, to use a budget up.

    forward    [B][B][B][B]        B runs four times: by a slower schedule s, or by f, which saves more

    slower     [s][s][s][s]        fits into the budget
    faster     [f][f][f][f]        does not
    mixed      [s][s][f][f]        with as many f as fit

The last runs are the faster ones: their backward passes come first, so that what they save is live for the
shortest time.
"""

from collections.abc import Iterator, Sequence

NUM_MIXED = 16
"""The number of combinations that are mixed, each with each."""

Options = tuple[int, ...]
"""The number of a schedule for each graph of a step."""


def mixtures(front: Sequence[Options], kinds: Sequence[Sequence[int]]) -> Iterator[Options]:
    """Mixtures of two combinations of a `front`, which begins with the fastest: of `NUM_MIXED` combinations
    that are spread evenly over it. `kinds`: the graphs of a step, equal ones together."""
    last = len(front) - 1
    places = dict.fromkeys(round(number * last / (NUM_MIXED - 1)) for number in range(NUM_MIXED))
    few = [front[place] for place in places]
    most = max(map(len, kinds))
    for place, faster in enumerate(few):
        for slower in few[place + 1 :]:
            for number in range(1, most):
                options = list(slower)
                for graphs in kinds:
                    for graph in graphs[round(number * len(graphs) / most) :]:
                        options[graph] = faster[graph]
                yield tuple(options)
