"""The transfers of a schedule to the store of offloaded values and back, on one clock with the compute.

    compute   [make v][ ... ][free v] ...       [fetch v][ ... ][read v]
    write             [=========]
    read                                                 [=========]

A write begins when the value has been made, a read where the schedule fetches the value. A weight that rests
on the store is never written. Each direction has
one transfer at a time, in the order of the requests. The run that frees a value waits for its write, and the
first run that reads a fetched value waits for its read. Such a stall is added to the step; the rest of a
transfer hides behind the compute, which is slower by `TransferSpeed.slows_compute`.

`last_forward_reads`, `with_releases` and `released_after` say where the forward pass frees offloaded values:
by the runs of the step's movable nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum

from lowtide.facts import FETCH, Action, Node, Region, Remat, Run, Step, TransferSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One copy of a value to the store or back; seconds count from the start of the step.

    `node` is the rank of the value. The transfer is asked for at position `asked_at` of the schedule, and the
    run at `awaited_at` waits `stall_seconds` for its end; -1 where no run waits. Compute beside the transfer
    takes `slowed_seconds` longer.
    """

    node: int
    is_write: bool
    nbytes: int
    asked_at: int
    awaited_at: int
    begin_seconds: float
    end_seconds: float
    stall_seconds: float
    slowed_seconds: float = 0.0

    @property
    def added_seconds(self) -> float:
        return self.stall_seconds + self.slowed_seconds

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.begin_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """All transfers of a schedule in the order they begin, and when each run begins, stalls counted."""

    transfers: tuple[Transfer, ...]
    run_seconds: tuple[float, ...]

    @property
    def stall_seconds(self) -> float:
        return fsum(transfer.stall_seconds for transfer in self.transfers)

    @property
    def slowed_seconds(self) -> float:
        """The seconds by which copies slow the compute beside them."""
        return fsum(transfer.slowed_seconds for transfer in self.transfers)

    @property
    def transfer_seconds(self) -> float:
        return fsum(transfer.seconds for transfer in self.transfers)

    @property
    def hidden_seconds(self) -> float:
        """The transfer seconds that hide behind compute."""
        return max(0.0, self.transfer_seconds - self.stall_seconds)

    @property
    def store_bytes(self) -> int:
        """The largest size of the store: all bytes that a step writes."""
        return sum(transfer.nbytes for transfer in self.transfers if transfer.is_write)

    @property
    def pinned_bytes(self) -> int:
        """The same in pinned memory of the host: torch rounds each block to a power of two."""
        return sum(_power_of_two(transfer.nbytes) for transfer in self.transfers if transfer.is_write)


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes - 1).bit_length() if nbytes else 0


@dataclass(slots=True)
class _Open:
    """A transfer that was asked for and not yet waited for."""

    node: int
    is_write: bool
    nbytes: int
    asked_at: int
    begin_seconds: float
    end_seconds: float


def can_offload(step: Step) -> bool:
    """Whether some value of the step can release device memory."""
    return step.transfer_speed is not None and any(node.movable or node.op == FETCH for node in step.nodes)


def rests_on_store(step: Step) -> bool:
    """Whether weights of the step rest on its store, so that every schedule of it has transfers."""
    return any(node.op == FETCH for node in step.nodes)


def is_fetch(step: Step, run: Run) -> bool:
    """Whether a run fetches a value from the store, or a weight that rests there."""
    if run.is_first:
        return step.nodes[run.rank].op == FETCH
    remat = step.nodes[run.rank].remat(run.rule)
    return remat is not None and remat.action is Action.OFFLOAD


def offload_remat(node: Node) -> Remat | None:
    """The remat that fetches a node's value from the store."""
    return next((remat for remat in node.remats if remat.action is Action.OFFLOAD), None)


def transfer_bytes(step: Step, rank: int) -> int:
    """The bytes that a transfer of the value of `rank` moves."""
    remat = offload_remat(step.nodes[rank])
    assert remat is not None
    return sum(step.storages[storage].nbytes for storage in remat.makes)


def value_of(step: Step, release: int) -> int:
    """The rank of the value that a movable node frees."""
    return step.nodes[release].reads[0]


def simulate_transfers(step: Step, runs: Sequence[Run], speed: TransferSpeed) -> Traffic:
    """The transfers of a schedule, and the seconds at which its runs begin."""
    written = {value_of(step, run.rank) for run in runs if run.is_first and step.nodes[run.rank].movable}
    clock = 0.0
    free = {True: 0.0, False: 0.0}
    writes: dict[int, _Open] = {}
    reads: dict[int, _Open] = {}
    done: list[Transfer] = []
    run_seconds: list[float] = []

    def ask(node: int, position: int, *, is_write: bool) -> _Open:
        nbytes = transfer_bytes(step, node)
        takes = speed.write_seconds(nbytes) if is_write else speed.read_seconds(nbytes)
        begin = max(clock, free[is_write])
        free[is_write] = begin + takes
        return _Open(node, is_write, nbytes, position, begin, begin + takes)

    def wait(transfer: _Open, position: int) -> None:
        nonlocal clock
        stall = max(0.0, transfer.end_seconds - clock)
        clock += stall
        done.append(_closed(transfer, position, stall, speed))

    for position, run in enumerate(runs):
        node = step.nodes[run.rank]
        source = node if run.is_first else node.remat(run.rule)
        assert source is not None
        if run.is_first and node.movable:
            wait(writes.pop(value_of(step, run.rank)), position)
        else:
            for read in source.reads:
                if read in reads:
                    wait(reads.pop(read), position)
        run_seconds.append(clock)
        if is_fetch(step, run):
            if run.rank in reads:
                done.append(_closed(reads.pop(run.rank), -1, 0.0, speed))
            reads[run.rank] = ask(run.rank, position, is_write=False)
        clock += source.seconds
        if run.is_first and run.rank in written:
            writes[run.rank] = ask(run.rank, position, is_write=True)
    done += [_closed(transfer, -1, 0.0, speed) for transfer in (*writes.values(), *reads.values())]
    return Traffic(
        transfers=tuple(sorted(done, key=lambda t: (t.begin_seconds, t.asked_at, t.is_write))),
        run_seconds=tuple(run_seconds),
    )


def _closed(transfer: _Open, position: int, stall: float, speed: TransferSpeed) -> Transfer:
    hidden = max(0.0, transfer.end_seconds - transfer.begin_seconds - stall)
    return Transfer(
        node=transfer.node,
        is_write=transfer.is_write,
        nbytes=transfer.nbytes,
        asked_at=transfer.asked_at,
        awaited_at=position,
        begin_seconds=transfer.begin_seconds,
        end_seconds=transfer.end_seconds,
        stall_seconds=stall,
        slowed_seconds=speed.slows_compute * hidden,
    )


def last_forward_reads(step: Step) -> dict[int, int]:
    """By movable node, the rank of the last forward read of its value in its segment."""
    movable = [node for node in step.nodes if node.movable]
    last: dict[tuple[int, int], int] = {}
    for node in step.nodes[: step.first_backward_rank] if movable else ():
        if node.on_demand or node.op == "output":
            continue
        for read in node.reads:
            for storage in step.nodes[read].holds:
                last[storage, node.segment] = node.rank
    found: dict[int, int] = {}
    for node in movable:
        value = value_of(step, node.rank)
        reads = [last.get((storage, node.segment), value) for storage in step.nodes[value].holds]
        found[node.rank] = max([value, *reads])
    return found


def with_releases(step: Step, runs: Sequence[Run], after: Mapping[int, int]) -> tuple[Run, ...]:
    """The same runs, each movable node of `after` right after the first run of the rank that it names."""
    present = [run.rank for run in runs if run.is_first and run.rank in after]
    behind: dict[int, list[int]] = {}
    for release in sorted(present):
        behind.setdefault(after[release], []).append(release)
    found: list[Run] = []
    for run in runs:
        if run.is_first and run.rank in after:
            continue
        found.append(run)
        if run.is_first:
            found += [Run(release) for release in behind.pop(run.rank, ())]
    if behind:
        raise ValueError(f"a value is freed after rank {min(behind)}, which does not run")
    return tuple(found)


def released_after(step: Step, runs: Sequence[Run]) -> dict[int, int]:
    """By movable node that runs, the rank of the last op that runs before it, movable ones apart."""
    found: dict[int, int] = {}
    latest = -1
    for run in runs:
        node = step.nodes[run.rank]
        if node.region is not Region.FORWARD:
            break
        if node.movable:
            found[run.rank] = latest
        elif not node.on_demand:
            latest = run.rank
    return found
