"""A training loop with resting state that is killed at any time, and goes on from its last checkpoint.

python killed_loop.py FOLDER STEPS [eager]
"""

import sys
from pathlib import Path

import torch
from torch import nn

import lowtide


def main(folder: Path, number: int, *, eager: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.Dropout(0.1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = torch.randn(64, 256)
    saved, first = folder / "checkpoint.pt", 0
    if saved.exists():
        found = torch.load(saved)
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        first = found["steps"]
    if not eager:
        profile = lowtide.profile(
            model,
            batch,
            optimizer=optimizer,
            loss=lambda output: output.square().mean(),
            offload=f"disk:{folder / 'store'}",
            offload_what="activations,state",
        )
        profile.plan(profile.floor_bytes).apply(model)
    for step in range(first, number):
        print("step", step, flush=True)
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "steps": step + 1}
        torch.save(state, folder / "new.pt")
        (folder / "new.pt").replace(saved)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), eager=len(sys.argv) > 3)
