"""Advantages, loss and backward of 512 samples x 8,192 tokens against reading and writing the logprob tensors once.

`make bench NAME=algorithms`. The baseline copies each of the logprob tensors that the measured step reads (current,
old, rollout, reference) into a buffer of its own: the memory traffic that no implementation can avoid. Both are
measured in turns within one run, in processor time of one thread, so that other programs' turns do not count.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable

import torch

from vime_trainer.algorithms import (
    AdvantageConfig,
    AdvantageInputs,
    PolicyBatch,
    PolicyLossConfig,
    batch_denominators,
    compute_advantages,
    index_of,
    policy_loss,
    tis,
)

SAMPLES, TOKENS, GROUP = 512, 8192, 8
ROUNDS = 9
LIMIT = 10.0

CASES: dict[str, tuple[str, PolicyLossConfig]] = {
    "grpo": ("grpo", PolicyLossConfig()),
    "dapo_tis": ("grpo", PolicyLossConfig(eps_clip_high=0.28, reducer="token_mean", correction=tis())),
    "grpo_tis_kl": ("grpo", PolicyLossConfig(correction=tis(), kl_loss_coef=0.001, kl_loss_type="k3")),
    "gspo": ("gspo", PolicyLossConfig(objective="gspo", eps_clip=3e-4, eps_clip_high=4e-4)),
    "cispo": ("cispo", PolicyLossConfig(objective="cispo", eps_clip=1.0, eps_clip_high=4.0, reducer="token_mean")),
    "reinforce_plus_plus": ("reinforce_plus_plus", PolicyLossConfig()),
    "ppo": ("ppo", PolicyLossConfig()),
}
HEADLINE = "grpo"


class Step:
    """One training step's tensors, float32, about 16 MiB each."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(scale: float) -> torch.Tensor:
            return scale * torch.randn(SAMPLES, TOKENS, generator=generator)

        self.old_BT = -normal(1.0).abs()
        self.logprobs_BT = (self.old_BT + normal(0.05)).requires_grad_()
        self.rollout_BT, self.ref_BT = self.old_BT + normal(0.02), self.old_BT + normal(0.1)
        self.values_BT = normal(1.0)
        lengths_B = torch.randint(TOKENS // 4, TOKENS + 1, (SAMPLES, 1), generator=generator)
        self.mask_BT = torch.arange(TOKENS)[None] < lengths_B
        self.rewards_B = torch.randint(0, 2, (SAMPLES,), generator=generator).double()
        self.groups = index_of([sample // GROUP for sample in range(SAMPLES)])

    def run(self, estimator: str, config: PolicyLossConfig) -> None:
        """From rewards to the gradient of every logprob."""
        reads_values = estimator == "ppo"
        inputs = AdvantageInputs(
            self.rewards_B,
            self.mask_BT,
            self.groups,
            old_logprobs_BT=self.old_BT,
            values_BT=self.values_BT if reads_values else None,
        )
        advantages = compute_advantages(inputs, AdvantageConfig(estimator))
        batch = PolicyBatch(
            self.logprobs_BT,
            advantages.advantages_BT,
            advantages.loss_mask_BT,
            self.old_BT,
            self.rollout_BT,
            self.ref_BT if config.kl_loss_coef else None,
        )
        policy_loss(batch, config, batch_denominators(batch, config)).loss.backward()
        self.logprobs_BT.grad = None

    def copies(self, config: PolicyLossConfig) -> Callable[[], None]:
        """The baseline for a case: read and write each logprob tensor that it reads."""
        read = [self.logprobs_BT.detach(), self.old_BT, self.rollout_BT]
        read += [self.ref_BT] if config.kl_loss_coef else []
        buffers = [torch.empty_like(x_BT) for x_BT in read]

        def once() -> None:
            for buffer, x_BT in zip(buffers, read, strict=True):
                buffer.copy_(x_BT)

        return once


def seconds(work: Callable[[], None]) -> float:
    """Processor time of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def measure(step: Step, estimator: str, config: PolicyLossConfig) -> tuple[float, float]:
    """Least seconds of the step and of its baseline, taken in turns after a warm-up of each: what disturbs a run can
    only add to it.
    """
    baseline = step.copies(config)
    step.run(estimator, config)
    baseline()
    pairs = [(seconds(lambda: step.run(estimator, config)), seconds(baseline)) for _ in range(ROUNDS)]
    ours, copies = zip(*pairs, strict=True)
    return min(ours), min(copies)


def run() -> dict[str, object]:
    """Measure every case; the headline is the library's default, GRPO with a clip, and the mismatch metrics."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    step = Step()
    cases = {name: measure(step, estimator, config) for name, (estimator, config) in CASES.items()}
    torch.set_num_threads(threads)
    ours, baseline = cases[HEADLINE]
    return {
        "name": "algorithms",
        "ours": round(ours, 4),
        "baseline": round(baseline, 4),
        "ratio": round(ours / baseline, 2),
        "unit": "s",
        "limit": LIMIT,
        "case": HEADLINE,
        "ratios": {name: round(step_s / copy_s, 2) for name, (step_s, copy_s) in cases.items()},
        "samples": SAMPLES,
        "tokens": TOKENS,
        "threads": 1,
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
    }


if __name__ == "__main__":
    print(json.dumps(run()))
