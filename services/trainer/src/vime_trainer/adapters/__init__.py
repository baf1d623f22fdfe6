"""The loop's ports over gRPC: proto in, domain out. No policy."""
