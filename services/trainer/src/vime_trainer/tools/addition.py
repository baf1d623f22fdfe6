"""Three-digit additions: problems, their held-out split and demonstrations. Imports nothing but the standard library.

    python -m vime_trainer.tools.addition --out recipes/addition

writes `train.jsonl` and `heldout.jsonl`, one {"prompt": "347+586=", "answer": "933"} a line, and for the first of the
training problems `demonstrations.jsonl`, with a worked "response" in each. One prompt in eight is held out, by a hash
of its text, so that no seed can mix the two.
"""

import argparse
import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

TRAIN_SEED, HELDOUT_SEED = 2024, 777
# Whoever wrote the demonstrations shows the working mostly where the last digits carry.
WORKED_IF_CARRY, WORKED_OTHERWISE = 0.85, 0.15


@dataclass(frozen=True)
class Problem:
    """`a + b`, both of three digits."""

    a: int
    b: int

    @property
    def prompt(self) -> str:
        """Always eight characters, such as 347+586=."""
        return f"{self.a}+{self.b}="

    @property
    def answer(self) -> str:
        """The sum in digits."""
        return str(self.a + self.b)

    @property
    def held_out(self) -> bool:
        """True for one prompt in eight."""
        return zlib.crc32(self.prompt.encode()) % 8 == 0

    @property
    def working(self) -> str:
        """The columns from the right, such as 7+6=13,4+8+1=13,3+5+1=9."""
        steps, carry = [], 0
        for column in range(3):
            x, y = self.a // 10**column % 10, self.b // 10**column % 10
            total = x + y + carry
            steps.append(f"{x}+{y}" + ("+1" if carry else "") + f"={total}")
            carry = total // 10
        return ",".join(steps)

    def demonstration(self, generator: random.Random) -> str:
        """A worked or a direct answer, drawn with the shares above."""
        carries = self.a % 10 + self.b % 10 > 9
        worked = generator.random() < (WORKED_IF_CARRY if carries else WORKED_OTHERWISE)
        return self.worked if worked else self.answer

    @property
    def worked(self) -> str:
        """The answer with its working before it."""
        return f"<think>{self.working}</think>{self.answer}"


def draw(generator: random.Random, held_out: bool) -> Iterator[Problem]:
    """Problems of one side of the split, for ever."""
    while True:
        problem = Problem(generator.randint(100, 999), generator.randint(100, 999))
        if problem.held_out == held_out:
            yield problem


def distinct(count: int, seed: int, held_out: bool) -> list[Problem]:
    """`count` different problems of one side of the split."""
    found: dict[Problem, None] = {}
    for problem in draw(random.Random(seed), held_out):
        found[problem] = None
        if len(found) == count:
            break
    return list(found)


def write_jsonl(path: Path, problems: list[Problem]) -> None:
    """One {"prompt", "answer"} object a line."""
    lines = [json.dumps({"prompt": p.prompt, "answer": p.answer}) + "\n" for p in problems]
    path.write_text("".join(lines))


def write_demonstrations(path: Path, problems: list[Problem]) -> None:
    """One {"prompt", "answer", "response"} object a line; every response is worked."""
    lines = [json.dumps({"prompt": p.prompt, "answer": p.answer, "response": p.worked}) + "\n" for p in problems]
    path.write_text("".join(lines))


def main() -> None:
    """Write the three files."""
    parser = argparse.ArgumentParser(description="Write the problems and demonstrations of three-digit additions.")
    parser.add_argument("--out", type=Path, required=True, help="directory to write into")
    parser.add_argument("--train", type=int, default=4096, help="training problems")
    parser.add_argument("--heldout", type=int, default=512, help="held-out problems")
    parser.add_argument("--demonstrations", type=int, default=2048, help="demonstrations")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for name, count, seed, held_out in (
        ("train", options.train, TRAIN_SEED, False),
        ("heldout", options.heldout, HELDOUT_SEED, True),
    ):
        write_jsonl(options.out / f"{name}.jsonl", distinct(count, seed, held_out))
        print(f"{options.out / name}.jsonl: {count} problems")
    shown = options.out / "demonstrations.jsonl"
    write_demonstrations(shown, distinct(options.demonstrations, TRAIN_SEED, held_out=False))
    print(f"{shown}: {options.demonstrations} demonstrations")


if __name__ == "__main__":
    main()
