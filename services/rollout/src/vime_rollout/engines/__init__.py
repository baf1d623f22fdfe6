"""Implementations of `vime_rollout.engine.Engine`."""
