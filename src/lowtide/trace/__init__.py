"""From a model to the facts of one training step, without running it.

- `trace`, `collector`: forward and loss through Dynamo and AOTAutograd, on fake tensors
- `graphs`: what a trace consists of: joint graphs, their inputs, their order
- `tangents`, `regions`: which gradients are asked for; which nodes run forward and which backward
- `analyse`, `records`, `gradients`: ranks, storages and remats of all nodes
- `outside`: what code between the graphs holds
- `optimizer`, `doubles`, `stand_ins`: what `optimizer.step()` allocates, op by op, or estimated
- `optimizer_nodes`: that behind the graphs, whole or in pieces
- `step`: all of that as one `Step`, with the call behind every run
- `sharding`, `on_paper`: the same on one of several processes, which may not even be there
- `gradient_layouts`: gradients that are not laid out like what they belong to
- `sums`: gradients that several graphs add up in another order than eager
- `names`, `fingerprint`, `identity`: where a node comes from; which graph, model and batch it is
- `failures`, `forecast`, `untouched`: what cannot be captured; what a real forward takes; nothing left behind
"""
