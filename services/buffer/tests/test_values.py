"""The ledger's own enums carry the names and numbers of the contract."""

from __future__ import annotations

from vime.buffer.v1 import batch_service_pb2 as batch_pb
from vime.buffer.v1 import prompt_service_pb2 as prompt_pb
from vime.buffer.v1 import table_service_pb2 as table_pb
from vime_buffer.values import Blocked, Failure, Outcome, State


def test_states_are_the_contract_s():
    for state in State:
        if 1 <= state <= 7:
            assert table_pb.GroupState.Name(state) == f"GROUP_STATE_{state.name}"


def test_enums_are_the_contract_s():
    for blocked in Blocked:
        name = "UNSPECIFIED" if blocked is Blocked.NOT else blocked.name
        assert prompt_pb.BlockReason.Name(blocked) == f"BLOCK_REASON_{name}"
    for failure in Failure:
        assert prompt_pb.FailureClass.Name(failure) == f"FAILURE_CLASS_{failure.name}"
    for outcome in Outcome:
        assert batch_pb.StepOutcome.Name(outcome) == f"STEP_OUTCOME_{outcome.name}"
