"""Measured peaks and times, and results compared with eager to the last bit.

- `fresh_process`: run a function in a fresh process
- `torch_settings`: the settings of torch that a fresh process must have too
- `parked_tensors`: the model waits in the host's memory while a fresh process uses the device
- `measure_step`: the canonical training step, its peak by two methods, and its time
- `trained_steps`: the state after each step of a training, on disk, and differences from it
- `repeated_ops`: ops that give other bits when they run again
- `eager_noise`: judge a plan where eager training differs from itself
- `comparison`: training with a plan and without it, from the same start, compared step by step
- `verify_plan`: verify a plan: its results, its peak and its time
- `verify_sharded`: the same by all processes of a model that is divided among them
- `rounding`: how far a plan that rounds is from eager, and eager from float64
- `verdict`: the answer in words, and notes on unreliable measurements
"""
