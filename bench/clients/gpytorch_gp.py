"""gpytorch: an exact Gaussian process; the marginal likelihood is computed outside of the model."""

import gpytorch
import torch

from client_runs.run import Run

LIBRARY = "gpytorch"
LOOP = "exact GP regression"


class Regression(gpytorch.models.ExactGP):
    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, likelihood: torch.nn.Module) -> None:
        super().__init__(inputs, targets, likelihood)
        self.mean_module = gpytorch.means.ConstantMean()
        self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, inputs: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
        return gpytorch.distributions.MultivariateNormal(self.mean_module(inputs), self.covar_module(inputs))


def train(run: Run) -> None:
    inputs = torch.linspace(0, 1, 100)
    targets = torch.sin(inputs * 6.28) + torch.randn(100) * 0.2
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = Regression(inputs, targets, likelihood)
    model.train()
    likelihood.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    marginal = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    model = run.plan(model, inputs, optimizer=optimizer, loss=lambda output: -marginal(output, targets))
    for _ in range(run.steps):
        optimizer.zero_grad()
        loss = -marginal(model(inputs), targets)
        loss.backward()
        optimizer.step()
