"""Parts of a store never overlap, and what was given back is taken again."""

from hypothesis import given
from hypothesis import strategies as st

from lowtide.offload.disk_store import PAGE_BYTES, Slots, whole_pages


@given(st.lists(st.tuples(st.integers(1, 5 * PAGE_BYTES), st.integers(0, 3)), max_size=40))
def test_parts_never_overlap_and_the_end_covers_them(wanted):
    slots, held = Slots(), []
    for nbytes, drop in wanted:
        start = slots.take(nbytes)
        mine = (start, start + nbytes)
        assert all(mine[1] <= low or high <= mine[0] for low, high in held)
        held.append(mine)
        assert slots.end >= max(high for _, high in held)
        for _ in range(min(drop, len(held))):
            low, high = held.pop(len(held) // 2)
            slots.give_back(low, high - low)


def test_gaps_are_joined_and_taken_again():
    slots = Slots()
    sizes = [PAGE_BYTES, 3 * PAGE_BYTES, 2 * PAGE_BYTES]
    starts = [slots.take(nbytes) for nbytes in sizes]
    for start, nbytes in zip(starts, sizes, strict=True):
        slots.give_back(start, nbytes)
    assert slots.take(sum(sizes)) == 0
    assert slots.end == sum(sizes)


def test_a_gap_at_the_end_grows():
    slots = Slots()
    slots.give_back(slots.take(100), 100)
    assert slots.take(3 * PAGE_BYTES) == 0
    assert slots.end == whole_pages(3 * PAGE_BYTES)
