"""Steps of sizes that were not captured, and fits for one budget."""

from lowtide.experiments.fit import find_fits
from lowtide.experiments.interpolate import form_of, interpolate_step, sizes_alike


def step_at(size, captured, *, degree):
    """The step at `size` from the `captured` ones; None where no two have the same ops."""
    chosen = sizes_alike(size, {other: form_of(step) for other, step in captured.items()}, degree=degree)
    return interpolate_step(size, {other: captured[other] for other in chosen}) if chosen else None


def find_fit(source, *, budget, **options):
    [found] = find_fits(source, budgets=[budget], **options)
    return found
