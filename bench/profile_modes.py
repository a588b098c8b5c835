"""Compare both profile modes: ops timed alone on random data, and real runs of the whole graph.

For each target: the fresh bytes and the workspace of each node must be equal, and the sums of all
times should differ by at most 15 %. Prints a table and writes CSV; ratios hold within one run only.

    python bench/profile_modes.py transformer:8 bert-base:4 resnet152:4 -o modes.csv
"""

import argparse
import csv
import logging
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition

from lowtide.ops.calls import Call, call_of, signature, target_name
from lowtide.profiling.op_costs import measure_calls
from lowtide.profiling.whole_run import GraphProfiler
from lowtide.profiling.work import fresh_storages
from lowtide.zoo.targets import Target, load_target

DEFAULT_TARGETS = ("transformer:8", "bert-base:4", "vit:2", "unet:2", "resnet152:4")


def joint_graph(target: Target) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """The joint graph of the target's forward and backward, and real inputs for it."""
    joint = fx.GraphModule(torch.nn.Module(), fx.Graph())
    values: dict[str, torch.Tensor] = {}

    def partition(graph: fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        joint.graph.output(joint.graph.graph_copy(graph.graph, {}))
        joint.recompile()
        return default_partition(graph, inputs, num_fwd_outputs=num_fwd_outputs)

    def forward(graph: fx.GraphModule, inputs: Any) -> Any:
        names = [node.name for node in graph.graph.find_nodes(op="placeholder")]

        def run(*args: torch.Tensor) -> Any:
            values.update(zip(names, (arg.detach() for arg in args), strict=True))
            return graph(*args)

        return run

    backend = aot_autograd(fw_compiler=forward, bw_compiler=lambda graph, _: graph, partition_fn=partition)
    output = torch.compile(target.model, backend=backend, dynamic=False)(**target.batch)
    output = output.loss if hasattr(output, "loss") else output
    assert output.ndim == 0, "the target returns no scalar loss"
    names = [node.name for node in joint.graph.find_nodes(op="placeholder")]
    # What the forward graph does not take are the tangents: here of a scalar.
    return joint, [values.get(name, torch.ones(())) for name in names]


def compare(name: str, batch_size: int, *, details: bool) -> dict[str, Any]:
    """One row of the table."""
    joint, inputs = joint_graph(load_target(name, batch_size=batch_size))
    nodes = [node for node in joint.graph.nodes if node.op == "call_function"]
    calls = {node.name: call_of(node) for node in nodes}
    start = time.perf_counter()
    costs = dict(zip(calls, measure_calls(list(calls.values())).costs, strict=True))
    profiling_seconds = time.perf_counter() - start
    runs = GraphProfiler(joint).profile(*inputs, workspace=True)

    made = {
        node.name: sum(fresh_storages(node.meta["val"], [read.meta["val"] for read in node.all_input_nodes]))
        for node in nodes
    }
    op_seconds = {key: cost.seconds for key, cost in costs.items()}
    run_seconds = {key: runs[key].seconds for key in calls}
    if details:
        print_details(calls, op_seconds, run_seconds)
        for key in calls:
            if made[key] != runs[key].made_bytes or costs[key].workspace_bytes != runs[key].workspace_bytes:
                print(f"  {key}: {made[key]}+{costs[key].workspace_bytes} against {runs[key]}")
    return {
        "target": name,
        "batch_size": batch_size,
        "nodes": len(nodes),
        "signatures": len({signature(call) for call in calls.values()}),
        "estimated": sum(cost.estimated for cost in costs.values()),
        "made_bytes_differ": sum(made[key] != runs[key].made_bytes for key in calls),
        "workspace_differ": sum(costs[key].workspace_bytes != runs[key].workspace_bytes for key in calls),
        "run_seconds": round(sum(run_seconds.values()), 3),
        "op_seconds": round(sum(op_seconds.values()), 3),
        "op_to_run": round(sum(op_seconds.values()) / sum(run_seconds.values()), 3),
        "profiling_seconds": round(profiling_seconds, 1),
    }


def print_details(
    calls: Mapping[str, Call], op_seconds: Mapping[str, float], run_seconds: Mapping[str, float]
) -> None:
    """The ops that take longest, with their share of the step and the ratio of the two ways."""
    alone, together = Counter[str](), Counter[str]()
    for key, call in calls.items():
        alone[target_name(call.target)] += op_seconds[key]  # type: ignore[assignment]
        together[target_name(call.target)] += run_seconds[key]  # type: ignore[assignment]
    for op, seconds in together.most_common(15):
        share = seconds / sum(together.values())
        print(f"  {op:50} {seconds * 1e3:9.1f} ms {share:6.1%}  ratio {alone[op] / seconds:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", default=DEFAULT_TARGETS, metavar="TARGET:BATCH_SIZE")
    parser.add_argument("-o", "--output", type=Path, help="CSV file to write")
    parser.add_argument("-d", "--details", action="store_true", help="show the ops that take longest")
    options = parser.parse_args()
    logging.basicConfig()
    rows = []
    for text in options.targets:
        name, _, batch_size = text.rpartition(":")
        rows.append(compare(name, int(batch_size), details=options.details))
        if len(rows) == 1:
            print(" | ".join(rows[0]))
        print(" | ".join(str(value) for value in rows[-1].values()), flush=True)
    if options.output is not None:
        with options.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads", file=sys.stderr)


if __name__ == "__main__":
    main()
