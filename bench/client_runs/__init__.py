"""How `bench/client_suite.py` runs a client.

- `run`: what a client's `train` gets, with or without a plan
- `journal`: every loss, gradient and result of a training as digests
- `peak_watch`: the most bytes live in its last steps
- `torchvision_ops`: what lets torchvision be imported beside a torch of another build
- `trained`: one training of a client in its own process
- `compare`: two trainings, with and without a plan, as a row
- `client_row`, `client_page`: rows, and the page of all of them
"""
