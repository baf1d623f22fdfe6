"""The buffer as the trainer's loop sees it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.in_process import RUN, service

from vime_client.channel import ChannelSettings, open_channel
from vime_client.errors import RpcError
from vime_trainer.adapters.ledger import GrpcLedger


async def test_a_lost_ledger_is_named_with_its_remedy_which_makes_the_groups_anew(tmp_path: Path) -> None:
    """A checkpoint of step 5 meets a buffer that knows nothing."""
    async with service("buffer", tmp_path) as buffer, open_channel(buffer.address, ChannelSettings()) as channel:
        with pytest.raises(RpcError, match=r"5.*trainer\.faults\.regenerate = true") as caught:
            await GrpcLedger(channel).open_incarnation(RUN, 5, 1, "r")
        assert caught.value.reason == "RESUME_OUT_OF_RANGE"
        opened = await GrpcLedger(channel, regenerate=True).open_incarnation(RUN, 5, 1, "r")
    assert opened.incarnation == 2
