"""Seeds of samples: f(run seed, prompt id, sample index), never of attempt or worker."""

from __future__ import annotations

from hashlib import blake2b


def sample_seed(run_seed: int, prompt_id: str, sample_index: int) -> int:
    """53 bits that stay the same on every machine and in every language: a double, JavaScript's number, holds them."""
    text = f"{run_seed}\x00{prompt_id}\x00{sample_index}".encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big") >> 11


def group_seeds(run_seed: int, prompt_id: str, num_samples: int) -> tuple[int, ...]:
    """One seed per sample."""
    return tuple(sample_seed(run_seed, prompt_id, index) for index in range(num_samples))
