"""The papers' formulas with loops over samples and tokens: float64, plain PyTorch, no line of the product.

A batch is a list of groups, a group a list of `Piece`s (samples). Nothing here is fast or general; it is meant to be
read beside the papers. Sources: GRPO 2402.03300, Dr.GRPO 2503.20783, RLOO 2402.14740, REINFORCE++ 2501.03262, GAE
1506.02438, PPO 1707.06347, DAPO 2503.14476, dual clip 1912.09729, GSPO 2507.18071, CISPO 2506.13585, OPSM 2512.02556,
IcePop 2510.18855, KL estimators (Schulman 2020), on-policy distillation 2306.13649.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Key = tuple[int, int]  # (place of the group, place in the group)


@dataclass
class Piece:
    """One sample. Lists have an entry per response token."""

    reward: float | None
    mask: list[bool]
    old: list[float]
    rollout: list[float]
    ref: list[float]
    teacher: list[float]
    value_before: list[float]
    now: Tensor  # the policy's logprobs, with gradient
    value: Tensor  # the critic's values, with gradient
    fork: str = ""
    truncated: bool = False
    failed: bool = False


@dataclass
class Rules:
    """What is to be computed; the defaults are plain GRPO."""

    estimator: str = "grpo"
    gamma: float = 1.0
    lam: float = 1.0
    kl_coef: float = 0.0
    whiten: bool = False
    opd: float = 0.0
    overlong: tuple[int, int, float] | None = None  # L, C, factor
    mask_truncated: bool = False
    objective: str = "clip"
    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    opsm: float | None = None
    reducer: str = "token_mean"
    length: int = 1
    kl_loss: float = 0.0
    kl_type: str = "k3"
    correction: dict[str, Any] = field(default_factory=dict)  # level, mode, low, high, veto, normalize, renormalize
    value_clip: float | None = 0.2


def judged(piece: Piece) -> bool:
    return not piece.failed and piece.reward is not None and math.isfinite(piece.reward)


def trajectory(place: int, i: int, piece: Piece) -> tuple[Any, ...]:
    return (place, "fork of", piece.fork) if piece.fork else (place, "sample", i)


def trained(piece: Piece, rules: Rules) -> list[int]:
    """Places of the tokens that are trained."""
    usable = not piece.failed if rules.objective == "sft" else judged(piece)
    if not usable or (rules.mask_truncated and piece.truncated):
        return []
    return [t for t, kept in enumerate(piece.mask) if kept]


def reward_of(group: list[Piece], place: int, i: int, rules: Rules) -> float:
    """The trajectory's reward, less DAPO's punishment (eq. 13) of its longest response."""
    reward = group[i].reward
    assert reward is not None
    if rules.overlong is None:
        return reward
    longest = 0
    for j, piece in enumerate(group):
        if judged(piece) and trajectory(place, j, piece) == trajectory(place, i, group[i]):
            longest = max(longest, len(piece.mask))
    limit, cache, factor = rules.overlong
    if longest <= limit - cache:
        return reward
    if longest <= limit:
        return reward + factor * ((limit - cache) - longest) / cache
    return reward - factor


def advantages(
    batch: list[list[Piece]], rules: Rules
) -> tuple[dict[Key, dict[int, float]], dict[Key, dict[int, float]]]:
    """A_t and value targets G_t of every trained token."""
    a: dict[Key, dict[int, float]] = {}
    g: dict[Key, dict[int, float]] = {}
    for place, group in enumerate(batch):
        scores: dict[tuple[Any, ...], float] = {}
        for i, piece in enumerate(group):
            if judged(piece):
                scores[trajectory(place, i, piece)] = reward_of(group, place, i, rules)
        for i, piece in enumerate(group):
            if not judged(piece):
                continue
            tokens = trained(piece, rules)
            mine = trajectory(place, i, piece)
            a[place, i], g[place, i] = _of_sample(piece, tokens, scores[mine], scores, mine, rules)
    for key, row in a.items():
        piece = batch[key[0]][key[1]]
        for t in row:
            row[t] -= rules.opd * (piece.old[t] - piece.teacher[t])
    if rules.whiten:
        every = [x for row in a.values() for x in row.values()]
        mean = sum(every) / len(every)
        variance = sum((x - mean) ** 2 for x in every) / (len(every) - 1)
        for row in a.values():
            for t in row:
                row[t] = (row[t] - mean) / math.sqrt(variance + 1e-8)
    return a, g


def _of_sample(
    piece: Piece,
    tokens: list[int],
    reward: float,
    scores: dict[tuple[Any, ...], float],
    mine: tuple[Any, ...],
    rules: Rules,
) -> tuple[dict[int, float], dict[int, float]]:
    n = len(scores)
    # equal rewards, and a reward without others, say nothing: exactly 0, and not what rounding leaves of R − mean
    says_nothing = len(set(scores.values())) == 1
    mean = reward if says_nothing else sum(scores.values()) / n
    if rules.estimator in ("grpo", "gspo", "cispo"):
        if says_nothing:
            return dict.fromkeys(tokens, 0.0), {}
        std = math.sqrt(sum((x - mean) ** 2 for x in scores.values()) / (n - 1))
        return dict.fromkeys(tokens, (reward - mean) / (std + 1e-6)), {}
    if rules.estimator == "dr_grpo":
        return dict.fromkeys(tokens, reward - mean), {}
    if rules.estimator == "rloo":
        others = [x for key, x in scores.items() if key != mine]
        return dict.fromkeys(tokens, 0.0 if says_nothing else reward - sum(others) / len(others)), {}
    if rules.estimator == "opd":
        return dict.fromkeys(tokens, 0.0), {}
    if rules.estimator == "reinforce_plus_plus_baseline":
        return {t: reward - mean - rules.kl_coef * (piece.old[t] - piece.ref[t]) for t in tokens}, {}
    r = {t: -rules.kl_coef * (piece.old[t] - piece.ref[t]) for t in tokens}
    if tokens:
        r[tokens[-1]] += reward
    a: dict[int, float] = {}
    g: dict[int, float] = {}
    after, v_next = 0.0, 0.0
    for t in reversed(tokens):
        if rules.estimator == "reinforce_plus_plus":
            after = r[t] + rules.gamma * after
            a[t] = after
        else:  # GAE: the next state is that before the next trained token
            v = piece.value_before[t]
            after = r[t] + rules.gamma * v_next - v + rules.gamma * rules.lam * after
            a[t], g[t], v_next = after, after + v, v
    return a, g


@dataclass
class Found:
    """Loss of one mini-batch (its gradient is in the pieces' leaves), and shares of tokens."""

    loss: Tensor
    clipped: float = 0.0
    lower: float = 0.0


def policy_loss(batch: list[list[Piece]], keys: list[Key], a: dict[Key, dict[int, float]], rules: Rules) -> Found:
    """Loss of the samples `keys`."""
    pieces = {key: batch[key[0]][key[1]] for key in keys}
    tokens = {key: trained(piece, rules) for key, piece in pieces.items()}
    weights, counted = corrections(pieces, tokens, rules)
    w = token_weights(pieces, counted, rules)
    loss = torch.zeros((), dtype=torch.float64)
    clipped: dict[Key, list[float]] = {}
    lower: dict[Key, list[float]] = {}
    for key, piece in pieces.items():
        if not tokens[key]:
            continue
        gap = torch.stack([piece.now[t] - piece.old[t] for t in tokens[key]]).mean()
        clipped[key], lower[key] = [], []
        for t in tokens[key]:
            adv = 0.0 if rules.objective == "sft" else a[key][t]
            log_ratio = gap if rules.objective == "gspo" else piece.now[t] - piece.old[t]
            term, was_clipped, was_lower = objective(piece.now[t], log_ratio, adv, rules)
            clipped[key].append(was_clipped)
            lower[key].append(was_lower)
            if rules.opsm is not None and adv < 0 and float(-gap.detach()) > rules.opsm:
                term = term * 0
            if rules.correction:
                term = term * weights[key][t]
            if rules.kl_loss:
                term = term + rules.kl_loss * kl(piece.now[t] - piece.ref[t], rules.kl_type)
            loss = loss + w[key] * term
    return Found(loss, share(clipped, rules), share(lower, rules))


def share(marks: dict[Key, list[float]], rules: Rules) -> float:
    """Averaged as the loss is: over tokens, or per sample and then over samples."""
    if not marks:
        return 0.0
    if rules.reducer == "token_mean":
        every = [x for row in marks.values() for x in row]
        return sum(every) / len(every)
    return sum(sum(row) / len(row) for row in marks.values()) / len(marks)


def objective(now: Tensor, log_ratio: Tensor, adv: float, rules: Rules) -> tuple[Tensor, float, float]:
    if rules.objective == "sft":
        return -now, 0.0, 0.0
    ratio = log_ratio.exp()
    bounded = min(max(float(ratio.detach()), max(1 - rules.low, 0.0)), 1 + rules.high)
    if rules.objective == "cispo":
        return -bounded * adv * now, float(bounded != float(ratio.detach())), 0.0
    if rules.objective == "reinforce":
        return -adv * now, 0.0, 0.0
    free, cut = -ratio * adv, -bounded * adv
    was_clipped = cut > float(free.detach())
    term = torch.full_like(free, cut) if was_clipped else free
    was_lower = rules.dual is not None and adv < 0 and float(term.detach()) > -(rules.dual or 0.0) * adv
    if was_lower:
        term = torch.full_like(free, -(rules.dual or 0.0) * adv)
    return term, float(was_clipped), float(was_lower)


def kl(delta: Tensor, kind: str) -> Tensor:
    if kind == "k1":
        return delta
    if kind == "k2":
        return delta**2 / 2
    k3 = (-delta).exp() - 1 + delta
    return k3 if kind == "k3" else k3.clamp(-10, 10)


def corrections(
    pieces: dict[Key, Piece], tokens: dict[Key, list[int]], rules: Rules
) -> tuple[dict[Key, dict[int, float]], dict[Key, int]]:
    """Weight of each token, and how many tokens of each sample count in the denominators."""
    how = rules.correction
    if not how:
        return {}, {key: len(row) for key, row in tokens.items()}
    weights: dict[Key, dict[int, float]] = {}
    kept: dict[Key, list[int]] = {}
    for key, piece in pieces.items():
        logs = {t: piece.old[t] - piece.rollout[t] for t in tokens[key]}
        weights[key], kept[key] = {}, []
        vetoed = how.get("veto") is not None and any(x < math.log(how["veto"]) for x in logs.values())
        for t, own in logs.items():
            total = sum(logs.values())
            log = {"token": own, "sequence": total, "geometric": total / len(logs)}[how["level"]]
            ratio = math.exp(min(max(log, -20.0), 20.0))
            inside = how["low"] <= ratio <= how["high"]
            if vetoed or (how["mode"] == "mask" and not inside):
                weights[key][t] = 0.0
                continue
            kept[key].append(t)
            floor = how["low"] if how["mode"] == "clip" else 0.0
            weights[key][t] = ratio if how["mode"] == "mask" else min(max(ratio, floor), how["high"])
    if how.get("normalize"):
        every = [weights[key][t] for key in kept for t in kept[key]]
        mean = sum(every) / len(every) if every else 1.0
        weights = {key: {t: x / mean for t, x in row.items()} for key, row in weights.items()}
    return weights, {key: len(kept[key] if how.get("renormalize") else tokens[key]) for key in pieces}


def token_weights(pieces: dict[Key, Piece], counted: dict[Key, int], rules: Rules) -> dict[Key, float]:
    """Weight of a token of each sample, by the reducer."""
    owner = {key: trajectory(*key, piece) for key, piece in pieces.items()}
    per_trajectory: dict[tuple[Any, ...], int] = {}
    for key, number in counted.items():
        per_trajectory[owner[key]] = per_trajectory.get(owner[key], 0) + number
    alive = sum(number > 0 for number in per_trajectory.values())
    found = {}
    for key in pieces:
        n = per_trajectory[owner[key]]
        divisor = {
            "token_mean": sum(counted.values()),
            "sequence_mean": alive * n,
            "fixed_length": alive * rules.length,
        }
        found[key] = 1 / divisor[rules.reducer] if divisor[rules.reducer] else 0.0
    return found


def value_loss(batch: list[list[Piece]], keys: list[Key], g: dict[Key, dict[int, float]], rules: Rules) -> Found:
    """The critic's loss of the samples `keys`; `clipped` is its share of clipped tokens."""
    pieces = {key: batch[key[0]][key[1]] for key in keys}
    tokens = {key: trained(piece, rules) for key, piece in pieces.items()}
    w = token_weights(pieces, {key: len(row) for key, row in tokens.items()}, rules)
    loss = torch.zeros((), dtype=torch.float64)
    marks: dict[Key, list[float]] = {}
    for key, piece in pieces.items():
        for t in tokens[key]:
            v, before, target = piece.value[t], piece.value_before[t], g[key][t]
            free = (v - target) ** 2
            moved = rules.value_clip is not None and abs(float(v.detach()) - before) > rules.value_clip
            near = before + math.copysign(rules.value_clip or 0.0, float(v.detach()) - before)
            worse = moved and (near - target) ** 2 > float(free.detach())
            loss = loss + w[key] * (torch.full_like(free, (near - target) ** 2) if worse else free)
            marks.setdefault(key, []).append(float(worse))
    return Found(loss, share(marks, rules))
