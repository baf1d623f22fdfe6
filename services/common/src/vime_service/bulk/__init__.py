"""Out-of-band transfer of weight versions. Needs torch and numpy (extra `bulk`); nothing else here imports them."""

from vime_service.bulk.canary import CanaryRule, canary_rule
from vime_service.bulk.deadline import Deadline
from vime_service.bulk.errors import BulkError, DigestMismatch, ManifestError, StagingError, TransportError
from vime_service.bulk.layout import BucketLayout
from vime_service.bulk.manifest import Manifest, ManifestDiff, ManifestLimits, TensorMeta, VersionKey
from vime_service.bulk.staging import FileStaging, MemoryStaging, Staging
from vime_service.bulk.transport import Transport
from vime_service.bulk.weights import TransferStats, WeightReceiver, WeightSender

__all__ = [
    "BucketLayout",
    "BulkError",
    "CanaryRule",
    "Deadline",
    "DigestMismatch",
    "FileStaging",
    "Manifest",
    "ManifestDiff",
    "ManifestError",
    "ManifestLimits",
    "MemoryStaging",
    "Staging",
    "StagingError",
    "TensorMeta",
    "TransferStats",
    "Transport",
    "TransportError",
    "VersionKey",
    "WeightReceiver",
    "WeightSender",
    "canary_rule",
]
