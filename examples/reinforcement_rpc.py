# /// script
# requires-python = ">=3.11"
# dependencies = ["torch-lockstep", "gymnasium>=1.0"]
# ///
"""Reinforcement learning over RPC: observers play, one agent decides for all of them at once, and learns.

lockstep run --nproc-per-node 3 reinforcement_rpc.py

    rank 1, observer    play ──► what I see ──┐                              ┌──► what to do ──► play
                                              ├──► rank 0, agent: one pass ──┤
    rank 2, observer    play ──► what I see ──┘    of the model for all      └──► what to do ──► play

There is no `lockstep.Run` here, only the launcher, which tells each rank its place and names the one that dies.
"""

import argparse
import os
import queue
from collections import deque

import gymnasium
import torch
from torch import Tensor, nn
from torch.distributed import rpc
from torch.futures import Future
from torch.nn import functional as F

import lockstep

GAMES = 8  # of each observer
MOMENTS = 64  # between two updates
DISCOUNT = 0.99
RECENT = 64  # episodes that the result is a mean of

#: On the agent: what observers ask, in the order in which it comes.
requests: queue.Queue[tuple[int, Tensor, Future]] = queue.Queue()


@rpc.functions.async_execution
def decide(observer: int, moment: Tensor) -> Future:
    """Called by observers, run on the agent: an action for each of the observer's games, or None at the end.

    What comes back is a promise: the thread that took the call is free for the next one, and the agent keeps the
    promises of all observers at the same time.

    Args:
        observer: the rank that asks.
        moment: (games, 6): of each game the observation, the last action's reward, and whether it ended an episode.
    """
    answer: Future = Future()
    requests.put((observer, moment, answer))
    return answer


def observe(rank: int) -> None:
    """Play as the agent says until it has learnt enough."""
    games = [gymnasium.make("CartPole-v1") for _ in range(GAMES)]
    seen = [game.reset(seed=rank * GAMES + number)[0] for number, game in enumerate(games)]
    moment = torch.tensor([[*observation, 0.0, 0.0] for observation in seen])
    while (actions := rpc.rpc_sync("agent", decide, (rank, moment))) is not None:
        for number, game in enumerate(games):
            observation, reward, ended, cut, _ = game.step(int(actions[number]))
            if ended or cut:
                observation, _ = game.reset()
            moment[number] = torch.tensor([*observation, float(reward), float(ended or cut)])


class Player(nn.Module):
    """How good each action is, and how much is still to be won."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
        self.value = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of the actions, (..., 2), and values, (...): discounted rewards to come, times 1 - DISCOUNT."""
        return self.policy(observations), self.value(observations).squeeze(-1)


class Agent:
    """Decides for all games of all observers, and learns from what came of it (advantage actor-critic)."""

    def __init__(self, observers: int, updates: int) -> None:
        self.observers = observers
        self.updates = updates
        self.model = Player()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=7e-3)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, total_iters=updates)
        self.running = torch.zeros(observers * GAMES)  # what each game's episode has brought so far
        self.returns: deque[float] = deque(maxlen=RECENT)

    def work(self) -> float:
        """Serve and learn until the end; the mean return of the last episodes."""
        moments, actions = [], []
        for update in range(self.updates):
            while len(moments) <= MOMENTS:
                moment, answers = self.next_moment()
                with torch.no_grad():
                    scores, _ = self.model(moment[:, :4])
                actions.append(torch.multinomial(scores.softmax(1), 1).squeeze(1))
                moments.append(moment)
                if len(moments) <= MOMENTS:
                    self.answer(answers, actions[-1])
            self.learn(torch.stack(moments), torch.stack(actions))
            if update + 1 < self.updates:
                # The last moment is the first one of the next update: its actions are still to be played.
                moments, actions = moments[-1:], actions[-1:]
                self.answer(answers, actions[-1])
            if update % 25 == 24:
                print(f"update {update + 1}: mean return {self.mean_return():.1f}", flush=True)
        for answer in answers:
            answer.set_result(None)
        return self.mean_return()

    def next_moment(self) -> tuple[Tensor, list[Future]]:
        """One request of every observer, in the order of their ranks, and the promises that wait for an answer."""
        asked = sorted((requests.get() for _ in range(self.observers)), key=lambda request: request[0])
        moment = torch.cat([seen for _, seen, _ in asked])
        self.running += moment[:, 4]
        for game in moment[:, 5].nonzero().flatten().tolist():
            self.returns.append(self.running[game].item())
            self.running[game] = 0
        return moment, [answer for _, _, answer in asked]

    def answer(self, answers: list[Future], actions: Tensor) -> None:
        """Give each observer its part of ``actions``."""
        for answer, part in zip(answers, actions.split(GAMES), strict=True):
            answer.set_result(part.clone())

    def learn(self, moments: Tensor, actions: Tensor) -> None:
        """One update from ``moments`` (time, games, 6) and ``actions`` (time, games); the last ones are yet to come."""
        scores, values = self.model(moments[..., :4])
        come, sums = values[-1].detach(), []
        for came in moments[1:].flip(0):
            reward, ended = came[:, 4], came[:, 5]
            come = (1 - DISCOUNT) * reward + DISCOUNT * come * (1 - ended)
            sums.append(come)
        come, values, scores = torch.stack(sums).flip(0), values[:-1], scores[:-1]
        surprise = come - values.detach()
        surprise = (surprise - surprise.mean()) / (surprise.std() + 1e-6)
        said = torch.distributions.Categorical(logits=scores)
        loss = (
            -(said.log_prob(actions[:-1]) * surprise).mean() + F.mse_loss(values, come) - 0.01 * said.entropy().mean()
        )
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.schedule.step()

    def mean_return(self) -> float:
        """Of the last episodes that ended."""
        return sum(self.returns) / max(1, len(self.returns))


def main(updates: int = 200) -> float | None:
    """Play and learn; on the agent the mean return of the last episodes."""
    world = lockstep.World.from_env(os.environ)
    if world.size < 2:
        raise SystemExit("an agent needs at least one observer: lockstep run --nproc-per-node 3 reinforcement_rpc.py")
    os.environ.update(world.rank_variables())  # whichever launcher it was: what torch reads
    torch.manual_seed(0)
    torch.set_num_threads(1)
    name = "agent" if world.leads else f"observer-{world.rank}"
    agent = Agent(world.size - 1, updates) if world.leads else None
    rpc.init_rpc(name, rank=world.rank, world_size=world.size)
    if agent is None:
        observe(world.rank)
    won = agent.work() if agent is not None else None
    rpc.shutdown()  # when all have come to it
    return won


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=200)
    options = parser.parse_args()
    won = main(**vars(options))
    if won is not None:
        print(f"mean return of the last {RECENT} episodes: {won:.1f} of 500")
        if options.updates >= 200:  # fewer are for a try
            assert won >= 300, f"a mean return of {won:.1f}, expected 300 or more"
