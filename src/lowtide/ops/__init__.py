"""What lowtide knows of ops: calls and schemas, passes over captured graphs, and ops of its own.

- `calls`: one call of an op, and its cost
- `device_memory`: the device of a step's tensors, and the bytes that they take there
- `schema`: what an op writes and which results share storages, by its schema; readers of a value
- `repeatable_ops`: ops of other libraries that a plan may run again, well known or named by the user
- `collectives`: ops by which processes exchange values inside of a graph
- `live_ranges`: bytes that are live at each op of a graph
- `passes`: the passes over a captured graph, in order
- `gradient_terms`: sums of gradients in eager's order, autocast included
- `recurrent`: how recurrent layers are traced, and what they keep live
- `recurrent_cells`: recurrent layers that eager computes cell by cell, as one op
- `recurrent_probe`: eager's recurrent layers in one call, and the layouts of their results
- `recurrent_stack`: recurrent layers on accelerators: eager's own op, and autograd's own backward
- `random_ops`: random ops and their generators; dropout as eager computes it
- `discrete`: indices and masks made from floats, which the forward pass makes once on accelerators
- `eager_batch_norm`: batch norm by the library that eager chooses on an accelerator
- `traced_ops`: rules for ops that torch traces wrongly: by number, by value, norms
- `packing`: masks and signs as bits, indices in fewer bytes
- `chunk_sizes`: how large chunks are on a device
- `loss_chunks`: cross entropy in chunks of rows, and log-probabilities in the memory of their logits
- `head_chunks`: a linear layer and its loss in chunks of rows, which rounds; `rounded_head` finds them
- `pointwise_chunks`: chains of pointwise ops in chunks, forward and backward
- `in_place`: ops that can write over an input
- `fake_values`: fake values of a graph, renewed where an edit gives ops other inputs
- `absent_gpu`: attention and autocast as on a GPU that is not here
- `direct`: a graph as a function that calls its ops directly
"""
