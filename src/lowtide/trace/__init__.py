"""From a model to joint graphs of forward and backward, without running it. In the order of the data flow:

- `model_call`: how a model is called, what a step differentiates, the loss and optimizers of a loop
- `batch_arguments`: whether a batch fits the arguments of a model's forward
- `compile_settings`: all that lowtide changes in torch while torch traces, one thread at a time
- `user_state`: the model, its objects and all random states are as before when a capture ends
- `trace_model`: the forward pass and the loss through Dynamo and AOTAutograd, on fake tensors
- `collector`: the torch.compile backend that keeps the graphs and returns fake results
- `uncaptured`: what uncaptured code makes and keeps live
- `python_frames`: outputs of graphs that frames of Python keep live
- `identity`: names and hashes of graphs, tensors, models and batches
- `step_device`: the device of a step
- `segments`: the graphs: `Segment`, `Execution`, `Trace`, and the slot for a plan, `GraphBinding`
- `tangents`: which gradients reach a graph, and with which strides
- `failures`: one-line errors for models that cannot be captured, with source line and next step
"""
