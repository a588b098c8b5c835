"""What counts as an activation, and its attributes by hand."""

from hypothesis import given, settings
from strategies import StepBuilder, steps

from lowtide.facts import Region
from lowtide.planning.activations import activations


def by_name(step):
    return {a.name: a for a in activations(step)}


def small():
    build = StepBuilder()
    weight = build.given(100)
    first = build.op("a", (weight,), 10, 1.0)
    middle = build.op("b", (first,), 30, 2.0)
    third = build.op("c", (middle,), 20, 4.0)
    out, mean = build.several("norm", (third,), (20, 2), 8.0)
    start = build.backward()
    one = build.grad((start, out, mean), 3, 16.0)
    two = build.grad((one, third), 3, 32.0)
    build.grad((two, first, weight), 5, 64.0)
    return build.step()


def test_attributes_by_hand():
    found = by_name(small())
    assert list(found) == ["a_1", "c_3", "getitem_5", "getitem_6"]
    third = found["c_3"]
    assert (third.creation_rank, third.last_forward_use) == (3, 4)
    assert (third.first_backward_use, third.last_backward_use) == (9, 9)
    assert third.inactive_seconds == 16.0
    assert third.offload_seconds == 20 / 1e9
    assert third.recompute_sources == ("a_1",)
    assert third.recompute_nodes == ("b_2", "c_3")
    assert third.recompute_seconds == 6.0
    assert third.recompute_bytes == 50
    assert third.recompute_ratio == 20 / 6
    first = found["a_1"]
    assert first.recompute_sources == ("placeholder_0",)
    assert first.last_forward_use == 2
    assert first.inactive_seconds == 4 + 8 + 16 + 32
    mean = found["getitem_6"]
    assert mean.recompute_nodes == ("norm_4", "getitem_6")
    assert mean.recompute_sources == ("c_3",)


def test_a_view_is_the_same_activation():
    build = StepBuilder()
    first = build.op("a", (build.given(1),), 10, 1.0)
    view = build.view(first)
    build.op("b", (view,), 10, 1.0)
    start = build.backward()
    build.grad((start, view), 1, 1.0)
    (only,) = activations(build.step())
    assert (only.name, only.last_forward_use, only.first_backward_use) == ("a_1", 3, 5)


def test_a_dropout_is_made_again_from_its_mask():
    build = StepBuilder()
    first = build.op("a", (build.given(1),), 40, 1.0)
    out, mask = build.dropout(first, 40, 2.0)
    start = build.backward()
    build.grad((start, first, out, mask), 1, 1.0)
    found = by_name(build.step())
    assert found["getitem_3"].recompute_sources == ("a_1", "getitem_4")
    assert found["getitem_3"].recompute_nodes == ("getitem_3",)
    assert found["getitem_4"].recompute_nodes == ("native_dropout_2", "getitem_4")


def test_what_cannot_be_recomputed_says_why():
    build = StepBuilder()
    weight = build.given(1)
    written = build.fixed("write", (weight,), 10, 1.0)
    output = build.op("out", (written,), 10, 1.0, pinned=True)
    start = build.backward()
    build.grad((start, written, output), 1, 1.0)
    found = by_name(build.step())
    assert found["write_1"].fixed == "it has side effects"
    assert found["out_2"].fixed == "the caller holds it to the end of the step"
    assert found["write_1"].recompute_ratio == 0.0


@settings(max_examples=60, deadline=None)
@given(steps())
def test_activations_are_what_backward_reads(step):
    found = activations(step)
    assert len({a.name for a in found}) == len(found)
    expected = {
        storage
        for node in step.nodes
        if node.region is not Region.FORWARD
        for read in node.reads
        if step.nodes[read].region is Region.FORWARD
        for storage in step.nodes[read].holds
        if not step.storages[storage].static
    }
    assert {a.storage for a in found} == expected
    for a in found:
        assert a.creation_rank <= a.last_forward_use < a.first_backward_use <= a.last_backward_use
        assert a.inactive_seconds >= 0
