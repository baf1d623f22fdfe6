"""The Megatron engine of a rank process: domain code alone, no gRPC and no proto.

`engine.Engine` (module `vime_trainer.engine.engine`) is all that a rank needs. `config` and `shape` import no torch,
so that the service process can read and check settings without loading an engine.
"""
