"""The rollout worker: `python -m vime_client.worker`, `vime worker`."""
