"""One rank process: asks the service for commands and runs them on the Megatron engine."""
