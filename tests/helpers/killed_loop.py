"""Training loops that are killed at any time, and go on from their last checkpoint.

    python killed_loop.py    reads lines `FOLDER|MODE|STEPS` and starts a process for each

A child is forked for each line, which saves the imports. It prints its number, what it is about to do in each
step, and `ended` or `failed`; the parent then prints `over`.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowtide

EVERY = 4
"""A checkpoint is saved after so many steps."""
STATE = "activations,state"
ALL = "activations,state,frozen,parameters"
MODES: dict[str, dict[str, Any]] = {
    "state": {"offload_what": STATE},
    "weights": {"offload_what": ALL},
    "state in backward": {"offload_what": STATE, "step_in_backward": True},
    "weights in backward": {"offload_what": ALL, "step_in_backward": True},
}
EAGER = "eager"
WIDTH, ROWS = 384, 48


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
    model[0].weight.requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-3, amsgrad=True)


def planned(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any, folder: Path, mode: str) -> None:
    """Apply the plan at the floor; it is made once for all processes."""
    path = folder / f"{mode}.json"
    if not path.exists():
        profile = lowtide.profile(
            model,
            batch,
            optimizer=optimizer,
            loss=mean_square,
            offload=f"disk:{folder / 'store'}",
            **MODES[mode],
        )
        profile.plan(profile.floor_bytes).save(path)
    plan = lowtide.load_plan(path)
    assert plan.solution.resting
    plan.apply(model, optimizer=optimizer)


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def train(folder: Path, mode: str, number: int) -> None:
    model, optimizer = build()
    batch = torch.randn(ROWS, WIDTH)
    saved, first = folder / "checkpoint.pt", 0
    if saved.exists():
        found = torch.load(saved)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["steps"]
    if mode != EAGER:
        planned(model, optimizer, batch, folder, mode)
    for step in range(first, number):
        print("forward", step, flush=True)
        torch.manual_seed(step)
        optimizer.zero_grad()
        loss = mean_square(model(batch))
        print("backward", step, flush=True)
        loss.backward()
        print("step", step, flush=True)
        optimizer.step()
        if (step + 1) % EVERY == 0 or step + 1 == number:
            print("save", step, flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": step + 1}
            torch.save(state, folder / "new.pt")
            (folder / "new.pt").replace(saved)


def serve() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        folder, mode, number = line.strip().split("|")
        child = os.fork()
        if child == 0:
            word = "failed"
            try:
                print("process", os.getpid(), flush=True)
                train(Path(folder), mode, int(number))
                word = "ended"
            finally:
                print(word, flush=True)
                os._exit(word == "failed")
        os.waitpid(child, 0)
        print("over", flush=True)


if __name__ == "__main__":
    serve()
