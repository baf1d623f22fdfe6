"""What the main job gains on the held-out set: three seeds at k = 0 and k = 3, one at k = 1.

`make bench NAME=learning` (about half an hour on 2 cores). Every run is `vime run recipes/addition/grpo.toml` with
nothing changed but seed and staleness; each prints its line when it ends. A run that fails counts as lost.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "addition" / "grpo.toml"
VIME = Path(sys.executable).with_name("vime")
RUNS = [(k, seed) for seed in range(3) for k in (0, 3)] + [(1, 0)]
GAIN = 0.25
"""Points on the held-out set that every run must gain, of 1."""
LONGEST_S = 1800
KEYS = (
    *("steps", "seconds", "reward_first", "reward_last", "eval_before", "eval_after", "eval_n"),
    *("logprob_abs_diff_replay", "mismatch_kl"),
)


def train(folder: Path, k: int, seed: int) -> dict[str, object]:
    """One run to its end; the numbers of its summary, or how it failed."""
    name = f"k{k}-seed{seed}"
    settings = (f"run.dir={folder}", f"run.seed={seed}", f"tables.train.max_staleness={k}")
    sets = [part for setting in settings for part in ("--set", setting)]
    command = [str(VIME), "run", str(RECIPE), "--name", name, *sets]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    if done.returncode != 0:
        return {"exit_code": done.returncode, "said": done.stdout[-500:] + done.stderr[-500:]}
    summary = json.loads((folder / name / "summary.json").read_text())
    numbers = {key: summary[key] for key in KEYS}
    return numbers | {"gain": round(summary["eval_after"] - summary["eval_before"], 3)}


def run() -> dict[str, object]:
    """All runs; `ratio` is the smallest gain over the gain that is asked for."""
    runs: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory(prefix="vime-learning-") as folder:
        for k, seed in RUNS:
            runs[f"k{k}-seed{seed}"] = found = train(Path(folder), k, seed)
            print(f"k = {k}, seed {seed}: {found}", flush=True)
    gains = [float(str(found.get("gain", "-1"))) for found in runs.values()]
    return {
        "name": "learning",
        "ratio": round(min(gains) / GAIN, 2),
        "least_gain": min(gains),
        "limit": GAIN,
        "lost": sum(gain < GAIN for gain in gains),
        "runs": runs,
    }
