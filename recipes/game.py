"""A game of several turns, learned by GRPO: find a number between 0 and 9 with four guesses, told higher or lower.

python recipes/game.py                    a generated small model, which guesses at random at first
python recipes/game.py shuffled=true      the answers to guesses are drawn: nothing can be learned from them
"""

from __future__ import annotations

import functools
import random
import sys
from pathlib import Path

import hybridflow as hf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes import settings
from recipes.small_model import EOS, SmallModel

DEFAULTS = (
    settings.RUN,
    """
name: game            # metrics, checkpoints and the trained model go to runs/<name>, or to name, if it is a path
steps: 60             # iterations
batch_size: 20        # games
n: 32                 # trajectories per game
turns: 4              # guesses
shuffled: false       # draw the answers to guesses
minibatches: 4        # optimizer steps per iteration
devices: null         # devices per node; null: two, or the one GPU that is there
actor: {train: {tp: 1}, generate: {tp: 1, sampling: {max_tokens: 2, seed: "${seed}"}}, optim: {lr: 1.0e-3}}
""",
)
NUMBERS = 10
GAMES = [{"prompt": "?", "number": number} for number in range(NUMBERS)]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}" + EOS + "{% endif %}{% endfor %}"


class Game:
    """The model says a digit; it hears h (the number is higher) or l (lower)."""

    def __init__(self, shuffled: bool = False) -> None:
        self.shuffled = shuffled

    def reset(self, number: int) -> None:
        self.number = number  # the row's prompt, "?", begins the conversation

    def step(self, text: str) -> tuple[str, float, bool]:
        if text == str(self.number):
            return "", 1.0, True
        higher = text < str(self.number) if not self.shuffled else random.random() < 0.5
        return "h" if higher else "l", 0.0, False


def worksheet(rng: random.Random) -> tuple[list[str], list[str]]:
    """A game of random guesses: tokens of what was said so far, and the next guess."""
    game, said = Game(), ["?"]
    game.reset(rng.randrange(NUMBERS))
    for _ in range(rng.randrange(4)):
        answer, _, done = game.step(guess := str(rng.randrange(NUMBERS)))
        if not done:
            said += [guess, EOS, answer]
    return said, [str(rng.randrange(NUMBERS))]


def small_model(directory: Path) -> Path:
    """A model that knows how to take turns, with a chat template of bare texts."""
    if not (directory / "tokenizer.json").exists():
        SmallModel(characters="0123456789?hl", chat_template=TEMPLATE, steps=200).write(directory, worksheet)
    return directory


def main(arguments: list[str]) -> None:
    cfg = settings.read(DEFAULTS, arguments)
    home = settings.directory(cfg)
    loader = hf.PromptLoader(GAMES, batch_size=cfg.batch_size, steps=cfg.steps, seed=cfg.seed)
    model = cfg.model or small_model(home / "start")
    actor = hf.ActorWorker.on(
        hf.ResourcePool(cfg.devices),
        model=model,
        train=hf.Megatron(**cfg.actor.train),
        optim=hf.Adam(**cfg.actor.optim),
        generate=hf.VLLM(**cfg.actor.generate),
    )
    run = settings.run(cfg, model=model)
    made = functools.partial(Game, cfg.shuffled)
    for prompts in run.loop(loader):
        batch = actor.generate_sequences(prompts, n=cfg.n, environment=made, max_turns=cfg.turns)
        batch |= actor.compute_log_prob(batch)
        batch |= hf.compute_advantage(batch, "grpo")
        run.step(batch, actor.update_actor(batch, minibatches=cfg.minibatches))
    actor.save(home / "model")
    settings.finish(run)


if __name__ == "__main__":
    hf.run(main)
