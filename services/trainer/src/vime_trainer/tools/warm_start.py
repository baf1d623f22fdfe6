"""Make the starting model of the addition recipe with the trainer's own supervised step.

    python -m vime_trainer.tools.warm_start --out recipes/addition/model

A fresh tiny Qwen3-MoE learns from demonstrations that show the working mostly where the last digits carry. It ends up
good at worked answers and bad at direct ones, and undecided between them: what reinforcement learning then has to teach
is the habit of working. Stop when about a third of the *sampled* answers are right; earlier, too few groups are mixed.
"""

import argparse
import random
import tempfile
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from vime_trainer.engine.config import EngineConfig, OptimizerConfig
from vime_trainer.engine.engine import Engine
from vime_trainer.engine.sft import Demonstration
from vime_trainer.tools import addition, fresh_model
from vime_trainer.tools.addition import Problem

MAX_NEW_TOKENS = 32  # the longest worked answer takes 31


@dataclass(frozen=True)
class Evaluation:
    """Answers to a list of problems."""

    reward: float
    """Share of the answers that are right and ended by themselves."""
    worked: float
    """Share of the answers that show the working."""
    length: float
    """Mean response tokens."""


def demonstration(problem: Problem, tokenizer: Any, generator: random.Random) -> Demonstration:
    """Token ids of prompt, answer and end; the prompt is not learnt."""
    prompt = tokenizer.encode(problem.prompt).ids
    answer = [*tokenizer.encode(problem.demonstration(generator)).ids, fresh_model.EOS]
    mask = [False] * len(prompt) + [True] * len(answer)
    return Demonstration(torch.tensor(prompt + answer), torch.tensor(mask))


def generate(
    engine: Engine, prompts: torch.Tensor, temperature: float, generator: torch.Generator | None = None
) -> list[list[int]]:
    """Responses to prompts of one length, int64 [batch, prompt]: greedy at temperature 0, else sampled. No cache."""
    ids, done = prompts, torch.zeros(len(prompts), dtype=torch.bool)
    for _ in range(MAX_NEW_TOKENS):
        logits = engine.next_token_logits(ids, torch.full((len(ids),), ids.size(1))).cpu()
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]
        token = torch.where(done, fresh_model.PAD, token)
        ids, done = torch.cat([ids, token[:, None]], 1), done | (token == fresh_model.EOS)
        if bool(done.all()):
            break
    rows: list[list[int]] = ids[:, prompts.size(1) :].tolist()
    return [row[: row.index(fresh_model.EOS) + 1] if fresh_model.EOS in row else row for row in rows]


def evaluate(engine: Engine, tokenizer: Any, problems: list[Problem], temperature: float, seed: int = 0) -> Evaluation:
    """Answer each problem once."""
    prompts = torch.tensor([tokenizer.encode(p.prompt).ids for p in problems])
    responses = generate(engine, prompts, temperature, torch.Generator().manual_seed(seed))
    texts = ["".join(fresh_model.VOCABULARY[i] for i in response) for response in responses]
    right = [t.split("</think>")[-1] == p.answer + "<eos>" for t, p in zip(texts, problems, strict=True)]
    count = len(problems)
    return Evaluation(sum(right) / count, sum("</think>" in t for t in texts) / count, sum(map(len, responses)) / count)


def train(engine: Engine, tokenizer: Any, options: argparse.Namespace) -> None:
    """The supervised steps, with a greedy look at held-out problems now and then."""
    generator = random.Random(1000 + options.seed)
    problems = addition.draw(generator, held_out=False)
    heldout = addition.distinct(256, addition.HELDOUT_SEED, held_out=True)
    start = time.monotonic()
    for step in range(1, options.steps + 1):
        rows = [demonstration(p, tokenizer, generator) for p in islice(problems, options.batch)]
        result = engine.sft_step(rows)
        if step % options.every == 0 or step == options.steps:
            seen = evaluate(engine, tokenizer, heldout, temperature=0)
            took = time.monotonic() - start
            print(
                f"step {step} loss {result.loss:.3f} grad_norm {result.grad_norm:.2f} lr {result.lr:.2e} "
                f"greedy {seen.reward:.3f} worked {seen.worked:.2f} {took:.0f} s",
                flush=True,
            )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Train the starting model of the addition recipe.")
    parser.add_argument("--out", type=Path, required=True, help="HF directory to write; must not exist")
    parser.add_argument("--steps", type=int, default=265, help="supervised steps")
    parser.add_argument("--batch", type=int, default=128, help="demonstrations a step")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate; it falls linearly to a tenth")
    parser.add_argument("--warmup", type=int, default=20, help="steps of linear warm-up")
    parser.add_argument("--layers", type=int, default=2, help="decoder layers")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 64")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the demonstrations")
    parser.add_argument("--every", type=int, default=50, help="steps between evaluations")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; results differ with their number")
    return parser.parse_args()


def main() -> None:
    """Fresh model, supervised steps, evaluation, HF directory."""
    options = parse()
    optimizer = OptimizerConfig(
        lr=options.lr,
        min_lr=options.lr / 10,
        schedule="linear",
        warmup_steps=options.warmup,
        decay_steps=options.steps,
        beta1=0.9,
        beta2=0.95,
    )
    settings = fresh_model.config(options.layers, options.hidden)
    with tempfile.TemporaryDirectory() as scratch:
        fresh_model.write(Path(scratch), settings, options.seed)
        engine = Engine.from_hf(scratch, EngineConfig(optimizer=optimizer, threads=options.threads, seed=options.seed))
        tokenizer = fresh_model.build_tokenizer()
        train(engine, tokenizer, options)
        heldout = addition.distinct(512, addition.HELDOUT_SEED, held_out=True)
        greedy = evaluate(engine, tokenizer, heldout, temperature=0)
        sampled = evaluate(engine, tokenizer, heldout, temperature=1.0)
        print(f"held out, greedy: reward {greedy.reward:.3f} worked {greedy.worked:.2f} tokens {greedy.length:.1f}")
        print(f"held out, T = 1:  reward {sampled.reward:.3f} worked {sampled.worked:.2f} tokens {sampled.length:.1f}")
        engine.save_hf(options.out)
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
