"""stable-baselines3: PPO learns to balance a pole; the library has the loop, the policy is a module."""

import gymnasium
import torch
from stable_baselines3 import PPO

from client_runs.run import Run

LIBRARY = "stable-baselines3"
LOOP = "PPO, the policy's evaluate_actions"


def train(run: Run) -> None:
    agent = PPO(
        "MlpPolicy",
        gymnasium.make("CartPole-v1"),
        n_steps=64 * run.steps,
        batch_size=64,
        n_epochs=1,
        policy_kwargs={"net_arch": [256, 256]},
        seed=7,
        device="cpu",
    )
    # the policy is called as `evaluate_actions`, past the module's own call: plan the network inside, and
    # count Adam's state, the two temporaries of its step for the largest parameter, and the parameters and
    # gradients of the rest, as bytes that are there besides
    network = agent.policy.mlp_extractor
    every, inside = (sum(p.nbytes for p in module.parameters()) for module in (agent.policy, network))
    largest = max(p.nbytes for p in agent.policy.parameters())
    run.plan(network, torch.randn(64, 4), reserve=2 * every + 2 * (every - inside) + 2 * largest)
    run.models.append(agent.policy)
    agent.learn(total_timesteps=64 * run.steps)
