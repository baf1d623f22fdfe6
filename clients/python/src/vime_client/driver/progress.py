"""What a driver knows of a run, from the trainer's events and the launcher's state. No drawing here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vime.trainer.v1 import trainer_service_pb2 as pb
from vime_client.launcher.state import RunState
from vime_client.report.history import History
from vime_client.report.names import DIFF, LOSS, REWARD, SAMPLES, SPLIT, UNSCORED, is_supervised, parts_of


@dataclass
class Progress:
    """Grows with each event; asking again for events that were seen changes nothing."""

    name: str
    num_steps: int
    rewards: dict[int, float] = field(default_factory=dict)
    """Mean raw reward by step."""
    evals: dict[str, dict[int, float]] = field(default_factory=dict)
    """Mean reward of eval tables by step."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last step."""
    step: int = 0
    """Last completed step."""
    skipped: int = 0
    """Steps that changed nothing."""
    activity: str = ""
    """What the trainer waits for."""
    trouble: str = ""
    """What failed since the last step, if anything did."""
    state: RunState | None = None
    """The launcher's view."""

    def seed(self, history: History) -> None:
        """Take over what was trained before this driver came."""
        for row in history.steps:
            reward = row.get("rollout/raw_reward")
            if isinstance(reward, (int, float)):
                self.rewards[int(row["step"])] = float(reward)
            self.step = max(self.step, int(row["step"]))
        for table in history.evals:
            series = history.eval_series(table)
            self.evals.setdefault(table, {}).update(zip(series.steps, series.values, strict=True))

    def take(self, event: pb.WatchResponse) -> str:
        """Take an event in; a line that tells it, or "" if it tells nothing new."""
        match event.WhichOneof("event"):
            case "step":
                return self._take_step(event.step)
            case "eval":
                return self._take_eval(event.eval)
            case "status":
                return self._take_status(event.status)
            case _:  # an event of a newer trainer
                return ""

    def mean_reward(self, window: int = 10) -> float | None:
        """Mean over the last steps."""
        last = [self.rewards[step] for step in sorted(self.rewards)[-window:]]
        return sum(last) / len(last) if last else None

    def _take_step(self, report: pb.StepReport) -> str:
        seen = report.train_step in self.rewards and report.train_step <= self.step
        self.step = max(self.step, report.train_step)
        self.metrics = dict(report.metrics)
        if "rollout/raw_reward" in report.metrics:
            self.rewards[report.train_step] = report.metrics["rollout/raw_reward"]
        if seen:
            return ""
        if report.skipped:
            self.skipped += 1
            return f"step {report.train_step}/{self.num_steps} skipped: nothing was trained"
        return f"step {report.train_step}/{self.num_steps}  {step_line(report.metrics)}"

    def _take_eval(self, report: pb.EvalReport) -> str:
        what = f"{report.table} at step {report.step}"
        n = report.metrics.get(f"{report.table}/n", 0.0)
        lost = sum(report.metrics.get(f"{report.table}/{kind}", 0.0) for kind in ("unscored", "given_up"))
        if report.table not in report.metrics:
            return f"{what}: nothing was scored ({lost:.0f} without a reward)"
        value = report.metrics[report.table]
        rounds = self.evals.setdefault(report.table, {})
        if rounds.get(report.step) == value:
            return ""
        rounds[report.step] = value
        return f"{what}: {value:.3f} (n = {n:.0f}{f', {lost:.0f} without a reward' if lost else ''})"

    def _take_status(self, status: pb.TrainerStatus) -> str:
        """The activity changes many times a second: displays show it when they think fit. A death is told once."""
        self.activity = status.activity
        self.num_steps = status.num_steps or self.num_steps
        return status.detail if status.state == pb.TRAINER_STATE_RECOVERING else ""

    def waits_for(self) -> str:
        """What holds the run up now, in the words of the trainer, else of the launcher; and what fails meanwhile."""
        activity = self.activity or (self.state.activity if self.state else "")
        return "; ".join(filter(None, (activity, self.trouble)))


def what_is_learnt(metrics: Mapping[str, float]) -> str:
    """The reward with its parts; of demonstrations, whose reward is not the model's, the loss."""
    if is_supervised(metrics):
        return f"loss {metrics[LOSS]:.4f}"
    if REWARD not in metrics:
        return ""
    parts = ", ".join(f"{name} {value:.3f}" for name, value in parts_of(metrics).items())
    return f"reward {metrics[REWARD]:.3f}" + (f" ({parts})" if parts else "")


def step_line(metrics: Mapping[str, float]) -> str:
    """The numbers of a step that people look at."""
    shown = [
        ("|Δlogp|", DIFF, ".1e"),
        ("no replay", f"{DIFF}_no_replay", ".1e"),
        ("staleness", "staleness/mean", ".2f"),
        ("length", "rollout/response_len/mean", ".1f"),
        ("tok/s", "perf/tokens_per_s", ",.0f"),
    ]
    parts = [f"{label} {metrics[name]:{form}}" for label, name, form in shown if name in metrics]
    if lost := metrics.get(UNSCORED):
        parts.insert(0, f"unscored {lost:.0f} of {metrics.get(SAMPLES, lost):.0f}")
    if learnt := what_is_learnt(metrics):
        parts.insert(0, learnt)
    split = [f"{label} {metrics[name]:.2f}" for label, name in SPLIT if name in metrics]
    if "perf/step_time" in metrics:
        parts.append(
            f"{metrics['perf/step_time']:.2f} s ({', '.join(split)})" if split else f"{metrics['perf/step_time']:.2f} s"
        )
    return "  ".join(parts)
