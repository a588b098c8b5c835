"""What a process holds for its exchanges, against the order in which FSDP2 makes and frees it."""

from dataclasses import replace

from lowtide.facts.sharding import Part, Passage, Sharding, Unit
from lowtide.parallel.exchange import ExchangeStep, exchange


def _unit(name: str, *, frees: bool = True, ranks: int = 2, between_ranks: int = 0) -> Unit:
    part = Part(
        name=f"{name}.weight",
        shard_bytes=50,
        whole_bytes=100,
        cast_bytes=0,
        reduced_bytes=100,
        gradient_bytes=50,
    )
    return Unit(
        name=name,
        parts=(part,),
        ranks=ranks,
        frees_after_forward=frees,
        root=0,
        between_ranks=between_ranks,
    )


def _step(*, frees: bool = True, ranks: int = 2, between_ranks: int = 0) -> tuple[Sharding, list[Passage]]:
    """A model of two blocks: graph 0 is its own, 1 and 2 are the blocks', 3 is its own again."""
    options = {"ranks": ranks, "between_ranks": between_ranks}
    units = (_unit("", frees=False, ranks=ranks), *(_unit(name, frees=frees, **options) for name in "ab"))
    passages = [
        Passage(0, True, 0, False),
        Passage(1, True, 1, True),
        Passage(1, False, 2, True),
        Passage(2, True, 2, True),
        Passage(2, False, 3, True),
        Passage(0, False, 4, True),
    ]
    return Sharding(ranks=ranks, units=units), passages


TRAINED = [".weight", "a.weight", "b.weight"]


def _names(steps: list[ExchangeStep]) -> list[str]:
    return [step.name for step in steps]


def test_a_unit_is_gathered_before_its_forward_and_resharded_after_it():
    found = exchange(*_step(), trained=TRAINED)
    assert _names(found.forward[0]) == ["all-gather the model", "copy out the model"]
    assert _names(found.forward[2]) == ["reshard a", "all-gather b", "copy out b"]


def test_the_last_buffer_lives_until_the_next_unit_has_its_own():
    found = exchange(*_step(), trained=TRAINED)
    assert found.forward[2][-1].frees == ["gathered parameters of unit 1"]
    assert found.forward[4][-1].frees == ["gathered parameters of unit 2"]


def test_the_unit_before_is_gathered_ahead_in_backward():
    found = exchange(*_step(), trained=TRAINED)
    assert _names(found.before[3]) == ["all-gather b"]
    assert _names(found.before[2]) == ["copy out b", "all-gather a"]
    assert _names(found.before[1]) == ["copy out a"]


def test_what_stays_after_forward_is_not_gathered_again():
    found = exchange(*_step(frees=False), trained=TRAINED)
    assert not any("all-gather " in name for steps in found.before.values() for name in _names(steps))


def test_gradients_are_reduced_when_a_unit_is_done_and_the_models_own_at_the_end():
    found = exchange(*_step(), trained=TRAINED)
    assert _names(found.after[2]) == ["reshard b", "copy in gradients of b", "reduce-scatter gradients of b"]
    assert found.after[2][1].gradients == ["b.weight"]
    assert "end of a reduction" in _names(found.after[1])
    assert "reduce-scatter gradients of the model" in _names(found.last)


def test_parameters_without_a_gradient_are_not_reduced():
    found = exchange(*_step(), trained=["a.weight"])
    assert _names(found.after[2]) == ["reshard b"]


def test_everything_that_is_made_is_freed_or_kept():
    found = exchange(*_step(), trained=TRAINED)
    live: set[str] = set()
    order = [found.forward[key] for key in sorted(found.forward)]
    for graph in (3, 2, 1, 0):
        order += [found.before.get(graph, []), found.after.get(graph, [])]
    for step in (step for steps in [*order, found.last] for step in steps):
        live |= set(step.makes)
        assert set(step.frees) <= live
        live -= set(step.frees)
        if step.kept:
            live -= set(step.makes)
    assert not live


def test_one_process_gathers_nothing():
    found = exchange(*_step(ranks=1), trained=TRAINED)
    assert found.forward[0][0].makes["gathered parameters of unit 0"][0] == 0


def test_a_part_for_fewer_processes_lives_from_forward_to_backward():
    found = exchange(*_step(ranks=4, between_ranks=2), trained=TRAINED)
    (reshard,) = (step for step in found.forward[2] if step.name == "reshard a")
    assert reshard.makes["part of unit 1 between forward and backward"][0] == 50
    (copy_out,) = (step for step in found.before[1] if step.name == "copy out a")
    assert "part of unit 1 between forward and backward" in copy_out.frees
    assert not any("between" in name for step in found.after[1] for name in step.makes)


def test_units_on_other_meshes_reduce_over_their_own_processes():
    sharding, passages = _step()
    own, a, b = sharding.units
    found = exchange(replace(sharding, units=(own, replace(a, ranks=1), b)), passages, trained=TRAINED)
    (reduction,) = (step for step in found.after[1] if step.name == "reduce-scatter gradients of a")
    assert [nbytes for nbytes, _ in reduction.makes.values()] == [100]
    assert reduction.workspace_bytes == 0
