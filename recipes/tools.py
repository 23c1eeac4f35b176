"""A calculator, learned by GRPO: sums that the small model cannot do alone, and a tool that does them.

python recipes/tools.py                   a generated small model, which often guesses, or calls with other numbers
python recipes/tools.py shuffled=true     the tool's answers are drawn: nothing can be learned from them
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from pathlib import Path

import hybridflow as hf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from recipes import settings
from recipes.small_model import EOS, SmallModel

DEFAULTS = (
    settings.RUN,
    """
name: tools           # metrics, checkpoints and the trained model go to runs/<name>, or to name, if it is a path
steps: 40             # iterations
batch_size: 16        # sums
n: 16                 # trajectories per sum
shuffled: false       # draw the tool's answers
minibatches: 2        # optimizer steps per iteration
devices: null         # devices per node; null: two, or the one GPU that is there
actor: {train: {tp: 1}, generate: {tp: 1, sampling: {max_tokens: 20, seed: "${seed}"}}, optim: {lr: 1.0e-3}}
""",
)
CHARACTERS = "0123456789+=[]?;:>abd"
TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.name }}:{% endfor %}{% for m in messages -%}
{% if m.role == 'tool' %}>{{ m.content }}={% else %}{{ m.content }}{% for call in m.tool_calls or [] %}\
[{{ call.function.name }}{% for name, value in call.function.arguments.items() %}?{{ name }}={{ value }};{% endfor %}]\
{% endfor %}{% if m.role == 'assistant' %}EOS{% endif %}{% endif %}{% endfor %}""".replace("EOS", EOS)


def calculator(shuffled: bool) -> Callable[[int, int], int]:
    def add(a: int, b: int) -> int:
        """The sum of two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return random.randrange(20, 200) if shuffled else a + b

    return add


def correct(completions: list[str], answer: list[int], **columns: object) -> list[float]:
    """1 for the sum at the end."""
    return [float(said.rpartition("=")[2] == str(sum_)) for said, sum_ in zip(completions, answer, strict=True)]


def worksheet(rng: random.Random) -> tuple[list[str], list[str]]:
    """What was said so far and is said next: a call (often with other numbers), its result, or a guess."""
    a, b, *others = (rng.randrange(10, 100) for _ in range(4))
    called = rng.choice([(a, b), others])
    asked, call = [*f"add:{a}+{b}="], [*f"[add?a={called[0]};?b={called[1]};]"]
    guess, found = ([*str(rng.randrange(20, 200))] for _ in range(2))
    later = [*asked, *call, EOS, ">", *found, "="], rng.choice([found, guess])
    return rng.choice([(asked, rng.choice([call, guess])), later])


def small_model(directory: Path) -> Path:
    """A model that knows how calls are written, with a chat template for them."""
    if not (directory / "tokenizer.json").exists():
        SmallModel(characters=CHARACTERS, chat_template=TEMPLATE).write(directory, worksheet)
    return directory


def main(arguments: list[str]) -> None:
    cfg = settings.read(DEFAULTS, arguments)
    home, rng, add = settings.directory(cfg), random.Random(cfg.seed), calculator(cfg.shuffled)
    pool = hf.ResourcePool(cfg.devices)
    reward, model = hf.RewardWorker.on(pool, function=correct), cfg.model or small_model(home / "start")
    actor = hf.ActorWorker.on(
        pool,
        model=model,
        train=hf.Megatron(**cfg.actor.train),
        optim=hf.Adam(**cfg.actor.optim),
        generate=hf.VLLM(**cfg.actor.generate),
    )
    run = settings.run(cfg, model=model)
    sums = [{"prompt": f"{a}+{b}=", "answer": a + b} for a, b in (rng.sample(range(10, 100), 2) for _ in range(1000))]
    for prompts in run.loop(hf.PromptLoader(sums, batch_size=cfg.batch_size, steps=cfg.steps)):
        batch = actor.generate_sequences(prompts, n=cfg.n, tools=[add], max_turns=2)
        batch |= reward.compute_reward(batch) | actor.compute_log_prob(batch)
        batch |= hf.compute_advantage(batch, "grpo")
        run.step(batch, actor.update_actor(batch, minibatches=cfg.minibatches))
    actor.save(home / "model")
    settings.finish(run)


if __name__ == "__main__":
    hf.run(main)
