"""From traced graphs to the facts of one training step: ranked nodes, storages, remats.

- `captured_step`: the entry, `capture`: trace, analyze, add the optimizer
- `capture_warnings`: what a capture cannot count, or cannot promise
- `analyze_again`: the same graphs in a loop with other settings
- `graph_facts`: nodes and storages of the graphs, forward and backward
- `rounded_graphs`: graphs whose heads run in chunks of rows, where the user lets them round
- `analysis`: the facts while they are collected
- `gradient_sums`: which gradients leave a graph as terms, so that autograd adds them in eager's order
- `backward_facts`: the order of backward ops, writes over inputs, chains in chunks
- `gradient_facts`: gradients that arrive at a graph, leave it, and accumulate
- `last_outputs`: outputs of the last step, which the loop keeps live through the forward pass
- `resting_facts`: which weights may rest on a store between their uses
- `own_checkpoints`: the user's own calls of torch.utils.checkpoint, by node
- `formulas`: eager's formulas of gradients, of which captured ops do not tell the bytes
- `uncaptured_facts`: code between the graphs
- `optimizer_facts`: the optimizer's step, in backward, whole or split
"""
