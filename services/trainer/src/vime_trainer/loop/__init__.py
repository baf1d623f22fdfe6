"""The training loop of the service process: plans, publishes, completes steps. No grpc, no proto, no torch."""
