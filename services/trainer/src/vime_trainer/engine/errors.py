"""What can be wrong with what the engine is given. Each message names the thing and the numbers."""


class EngineError(Exception):
    """Base of every error that this package raises on purpose."""


class UnsupportedModelError(EngineError, ValueError):
    """The model is outside of what the engine can build faithfully."""


class UnsupportedLayoutError(EngineError, ValueError):
    """The parallel layout is not one that was verified."""


class WeightMapError(EngineError, ValueError):
    """HF and Megatron tensors do not match one to one."""


class SampleError(EngineError, ValueError):
    """A sample's fields contradict each other or hold impossible numbers."""


class RoutingTraceError(EngineError, ValueError):
    """A routing trace does not fit the sample or the model."""


class PeerFailed(EngineError, RuntimeError):
    """This rank is well, but another one failed at what all of them do together."""


class CheckpointError(EngineError, RuntimeError):
    """A checkpoint could not be written, found or read."""
