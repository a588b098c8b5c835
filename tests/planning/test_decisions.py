"""Every combination of what is held at the floor gives sentences that read as English."""

import re
from dataclasses import replace
from itertools import product

import pytest
from synthetic import chain

from lowtide.facts import Kind, Region, Storage
from lowtide.planning.decisions import LASTING, floor_hint, hint, library_bytes, listed
from lowtide.planning.planner import Planner
from lowtide.planning.schedules import eager_timeline

COMBINATIONS = [
    (region, {kind: 100 for kind, there in zip(LASTING, present, strict=True) if there} | others)
    for region in Region
    for present in product((False, True), repeat=len(LASTING))
    for others in ({}, {Kind.ACTIVATION: 50}, {Kind.ACTIVATION: 9000, Kind.OTHER: 1})
    if any(present) or others
]

THING = (
    r"(?:fused=True|foreach=False|an optimizer with less state such as SGD|a smaller model|lower precision)"
)
HELD = r"(?:parameters|gradients|optimizer state|buffers)"
LIST = r"(?i:{0}(?:, {0})*(?: {1} {0})?)"
AMOUNTS = r"[\d.]+ \w+ [a-z ]+(?:, [\d.]+ \w+ [a-z ]+)*"
SENTENCES = re.compile(
    rf"(?:The optimizer step sets it|{LIST.format(HELD, 'and')} set it) \({AMOUNTS}\), "
    rf"which no recompute lowers\. Try {LIST.format(THING, 'or')}\."
    rf"|It holds {AMOUNTS}\. Try that budget, or a smaller batch\."
)


@pytest.mark.parametrize(("region", "held"), COMBINATIONS)
def test_every_hint_is_whole_sentences(region, held):
    text = " ".join(hint(region, held))
    assert SENTENCES.fullmatch(text) and text[0].isupper(), text


@pytest.mark.parametrize(("region", "held"), COMBINATIONS)
def test_only_what_is_held_is_blamed(region, held):
    text = " ".join(hint(region, held))
    assert ("SGD" in text) <= bool(held.get(Kind.OPTIMIZER_STATE))
    blamed = text.partition(" set it")[0].lower() if " set it" in text else ""
    assert all(held.get(kind) for kind, words in LASTING.items() if words in blamed)


def test_workspaces_of_libraries_have_their_own_name():
    cause, _ = hint(Region.FORWARD, {Kind.OTHER: 18 << 20}, libraries={"cuBLAS workspaces": 17 << 20})
    assert cause == "It holds 17.0 MiB cuBLAS workspaces, 1.0 MiB temporaries and other."


def test_workspaces_of_libraries_are_found_by_their_storages():
    step = chain(length=3)
    names = ("workspace of cuBLAS, forward", "workspace of cuBLAS, backward", "library workspaces")
    kept = [
        Storage(id=len(step.storages) + i, nbytes=(1 + i) << 20, kind=Kind.OTHER, name=name, static=True)
        for i, name in enumerate(names)
    ]
    step = replace(step, storages=(*step.storages, *kept))
    assert library_bytes(step) == {"cuBLAS workspaces": 3 << 20, "library workspaces": 3 << 20}
    assert "3.0 MiB cuBLAS workspaces" in floor_hint(step, eager_timeline(step)).cause


def test_lists_are_joined_as_people_do():
    assert [listed("abc"[:n], "or") for n in (1, 2, 3)] == ["a", "a or b", "a, b or c"]


def test_the_module_of_the_peak_is_named():
    step = chain(length=3)
    nameless = replace(step, nodes=tuple(replace(node, module="") for node in step.nodes))
    named, plain = (floor_hint(each, Planner(each).lowest()).cause for each in (step, nameless))
    assert named == f"This op is in layers.2. {plain}"
