"""Whole steps again, bounded and jittered (shared with the client)."""

from vime_client.retry import is_transient, whole_step

__all__ = ["is_transient", "whole_step"]
