"""Seeds depend on the run, the prompt and the sample, and on nothing else."""

from __future__ import annotations

from vime_buffer.seeds import group_seeds, sample_seed


def test_seeds_are_exact_as_a_double_and_never_change():
    assert sample_seed(0, "train:0:0", 0) == 6647231217562776
    seeds = [sample_seed(seed, "p", index) for seed in range(20) for index in range(20)]
    assert all(0 <= seed < 2**53 and int(float(seed)) == seed for seed in seeds)


def test_every_ingredient_makes_another_seed():
    seeds = {
        sample_seed(run, prompt, index) for run in (0, 1) for prompt in ("a:0:1", "a:0:11", "a:1:1") for index in (0, 1)
    }
    assert len(seeds) == 12


def test_a_larger_group_keeps_the_seeds_of_a_smaller_one():
    assert group_seeds(3, "p", 8)[:4] == group_seeds(3, "p", 4)
