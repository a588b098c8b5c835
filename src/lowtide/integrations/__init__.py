"""Callbacks for trainers, each in a module that imports its trainer, so that lowtide needs none of them.

- `transformers`: `Lowtide` for the `Trainer` of transformers, and for those of TRL
- `lightning`: `Lowtide` for the `Trainer` of Lightning
- `logged_peak`: the measured peak, for a trainer's own log
- `held_besides`: tensors that the process holds besides the step, said or counted
- `first_call`: a plan that is made when a model is first called to train
- `first_trained`: the first model that an unmodified script trains
"""
