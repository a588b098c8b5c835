"""Training loops of libraries that people install, one file each, for `bench/client_suite.py`.

A file reads as the library's own tutorial does, with random weights and made-up data: nothing is downloaded.
`LIBRARY` is the distribution on PyPI, whose version `requirements.txt` pins; `LOOP` says in a few words what
trains; `train(run)` takes `run.steps` optimizer steps. The one line that a user would add for lowtide is
`run.plan(model, batch, optimizer=optimizer)`, or `callbacks=run.callbacks(Lowtide, model)` where the library
has the loop and lowtide a callback: without a plan they change nothing.
"""
