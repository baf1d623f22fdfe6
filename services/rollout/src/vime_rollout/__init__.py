"""vime's rollout service: one vLLM engine in process, token in and token out."""
