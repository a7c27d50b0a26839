# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep", "gymnasium>=1.0"]
# ///
"""Policy gradient (REINFORCE with a learnt baseline) on CartPole-v1: many environments, gradients in lockstep.

python reinforcement.py
lockstep run --nproc-per-node 2 reinforcement.py

The samples are episodes: each is a seed for an environment, drawn again in every epoch, and a micro-batch is the
episodes that a rank plays at once. So the result does not depend on the number of ranks. With ``--own-environments``
each rank has environments of its own, seeded by its rank once and never again, as is usual: then it does depend.
"""

import argparse
from dataclasses import dataclass

import gymnasium
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import lockstep

EPISODES = 32  # of a step, over all ranks
AT_ONCE = 8  # played by a rank, in one micro-batch
STEPS = 10  # in an epoch
HELD_OUT = 64
DISCOUNT = 0.99


class Episodes(Dataset[int]):
    """Each sample is the seed of an episode, another one each time it is asked for."""

    def __len__(self) -> int:
        return STEPS * EPISODES

    def __getitem__(self, index: int) -> int:
        return int(torch.randint(2**31, ()))


class Player(nn.Module):
    """How good each action is, and how much is still to be won."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
        self.value = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the actions, (..., 2), and values, (...): discounted rewards to come, times 1 - DISCOUNT."""
        return self.policy(observations), self.value(observations).squeeze(-1)


@dataclass
class Played:
    """Games played at the same time, each for one episode; the first dimension is time, the second the game."""

    observations: Tensor  #: (time, games, 4)
    actions: Tensor  #: (time, games)
    rewards: Tensor  #: (time, games)
    going: Tensor  #: (time, games): whether the game still went on; what is told of the others is no matter


def play(model: nn.Module, games: list[gymnasium.Env], seeds: list[int | None], device: torch.device) -> Played:
    """An episode of each game from its seed, or from where its own generator stands; actions are drawn."""
    seen = torch.tensor([game.reset(seed=seed)[0].tolist() for game, seed in zip(games, seeds, strict=True)])
    going = torch.ones(len(games), dtype=torch.bool)
    told = []
    with torch.no_grad():
        while going.any():
            scores, _ = model(seen.to(device))  # of all games: so the model sees equal shapes to the end
            actions = torch.multinomial(scores.softmax(1), 1).squeeze(1).cpu()
            before, seen, rewards, still = seen, seen.clone(), torch.zeros(len(games)), going.clone()
            for n in going.nonzero().flatten().tolist():
                observation, reward, ended, cut, _ = games[n].step(int(actions[n]))
                seen[n], rewards[n], still[n] = torch.from_numpy(observation), float(reward), not (ended or cut)
            told.append((before, actions, rewards, going))
            going = still
    return Played(*(torch.stack(column).to(device) for column in zip(*told, strict=True)))


def rewards_to_come(rewards: Tensor) -> Tensor:
    """The discounted sum of the rewards from each time on, times 1 - DISCOUNT; of the shape of ``rewards``."""
    come, sums = torch.zeros_like(rewards[0]), []
    for reward in rewards.flip(0):
        come = reward + DISCOUNT * come
        sums.append(come)
    return torch.stack(sums).flip(0) * (1 - DISCOUNT)


def loss_of(model: nn.Module, played: Played) -> Tensor:
    """Mean over all moments played: actions that won more than expected become more likely, expectations truer."""
    scores, values = model(played.observations[played.going])
    come = rewards_to_come(played.rewards)[played.going]
    surprise = come - values.detach()
    surprise = (surprise - surprise.mean()) / (surprise.std() + 1e-6)
    said = torch.distributions.Categorical(logits=scores)
    policy = -(said.log_prob(played.actions[played.going]) * surprise).mean()
    return policy + F.mse_loss(values, come) - 0.01 * said.entropy().mean()


def main(epochs: int = 6, seed: int = 0, own_environments: bool = False) -> float:
    """Train; the mean return of held-out episodes."""
    # Environments that continue are an effect of the loop's body: it cannot be tried whether it repeats.
    with lockstep.Run(seed=seed, replay=not own_environments) as run:
        model = run.model(Player())
        optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))
        run.scheduler(torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=epochs * STEPS))
        batches = run.loader(Episodes(), global_batch=EPISODES, micro_batch=AT_ONCE, workers=0)
        held_out = run.loader(torch.arange(HELD_OUT), global_batch=HELD_OUT, micro_batch=AT_ONCE, shuffle=False)
        games, held_out_games = ([gymnasium.make("CartPole-v1") for _ in range(AT_ONCE)] for _ in range(2))
        if own_environments:
            for n, game in enumerate(games):
                game.reset(seed=run.rank * AT_ONCE + n)

        def evaluate() -> float:
            for seeds in run.evaluate(held_out):
                played = play(model, held_out_games, seeds.tolist(), run.device)
                run.measure(held_out_return=played.rewards.sum(0))
            return run.metrics["held_out_return"]

        for epoch in run.epochs(epochs):
            for seeds in run.train(batches):
                played = play(model, games, [None] * AT_ONCE if own_environments else seeds.tolist(), run.device)
                # A mean over moments, of which each micro-batch holds another number.
                run.step(loss_of(model, played), count=int(played.going.sum()))
                run.measure(won=played.rewards.sum(0))
            evaluate()
            run.log(epoch=epoch + 1)
        won = evaluate()
        run.say(f"mean return of {HELD_OUT} held-out episodes: {won:.1f} of 500")
    return won


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--own-environments", action="store_true", help="one set for each rank, seeded by its rank")
    options = parser.parse_args()
    won = main(**vars(options))
    if options.epochs >= 6:  # fewer are for a try
        assert won >= 400, f"a mean return of {won:.1f}, expected 400 or more"
