"""fastai: a Learner with its own data loaders, and an optimizer of torch."""

from functools import partial

import torch
from fastai.callback.progress import ProgressCallback
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper
from torch import nn
from torch.utils.data import TensorDataset

from client_runs.run import Run

LIBRARY = "fastai"
LOOP = "perceptron, Learner.fit"


def train(run: Run) -> None:
    count = run.steps * 1024
    data = TensorDataset(torch.randn(count, 64), torch.randint(0, 5, (count,)))
    loaders = DataLoaders(DataLoader(data, bs=1024, shuffle=True), DataLoader(data, bs=1024), device="cpu")
    model = nn.Sequential(
        nn.Linear(64, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 512), nn.ReLU()
    )
    model.append(nn.Linear(512, 5))
    learner = Learner(
        loaders, model, loss_func=nn.CrossEntropyLoss(), opt_func=partial(OptimWrapper, opt=torch.optim.Adam)
    )
    learner.create_opt()
    run.plan(learner.model, torch.randn(1024, 64), optimizer=learner.opt.opt)
    learner.remove_cb(ProgressCallback)
    learner.fit(1, lr=1e-3)
