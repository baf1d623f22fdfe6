"""The trainer service: Megatron-core ranks, the training loop, R3 replay and weight publication."""
