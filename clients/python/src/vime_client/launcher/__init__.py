"""The local launcher: what to start, who watches it, and an end that leaves nothing behind.

`plan` turns a recipe into services, `preflight` asks each whether its settings can work, the supervisor
(`python -m vime_client.launcher RUN_DIR`) keeps them running, and `client` is how a driver finds and stops it.
"""
