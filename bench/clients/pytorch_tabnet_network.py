"""pytorch-tabnet: its network with the sparsity loss beside the output, in a loop of one's own."""

import torch
from pytorch_tabnet.tab_network import TabNet
from torch import nn

from client_runs.run import Run

LIBRARY = "pytorch-tabnet"
LOOP = "TabNet for tables, ghost batch norm and sparsemax"


def train(run: Run) -> None:
    group_matrix = torch.eye(16)
    model = TabNet(16, 3, cat_idxs=[], cat_dims=[], cat_emb_dim=[], group_attention_matrix=group_matrix)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    model = run.plan(model, torch.randn(512, 16), optimizer=optimizer)
    for _ in range(run.steps):
        values, labels = torch.randn(512, 16), torch.randint(0, 3, (512,))
        for parameter in model.parameters():
            parameter.grad = None
        output, sparsity = model(values)
        loss = nn.functional.cross_entropy(output, labels) - 1e-3 * sparsity
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
