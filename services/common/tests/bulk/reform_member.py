"""One receiving process of test_reform: obeys lines on stdin, answers lines on stdout.

usage: reform_member.py NAME ENDPOINT MANIFEST.json [DIE_AT_BUCKET]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from vime_service.bulk import Deadline, Manifest, MemoryStaging, TransportError, WeightReceiver
from vime_service.bulk.gloo import GlooTransport


class DyingTransport(GlooTransport):
    """Kills its process with SIGKILL when the given bucket begins."""

    die_at = -1
    taken = 0

    def broadcast(self, bucket: torch.Tensor, deadline: Deadline) -> None:
        if self.taken == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.taken += 1
        super().broadcast(bucket, deadline)


def main() -> None:
    name, endpoint, path = sys.argv[1:4]
    manifest = Manifest.from_dict(json.loads(Path(path).read_text()))
    transport = DyingTransport.join(name, endpoint, Deadline.after(15))
    transport.die_at = int(sys.argv[4]) if len(sys.argv) > 4 else -1
    print("joined", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        try:
            transport.form(order["generation"], order["members"], Deadline.after(10))
            staging = MemoryStaging(manifest.plan.total_bytes)
            WeightReceiver(transport, manifest, staging, bucket_timeout_s=2).receive(Deadline.after(10))
            print("staged", flush=True)
        except TransportError as error:
            print("failed", str(error).replace("\n", " "), flush=True)
    transport.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
