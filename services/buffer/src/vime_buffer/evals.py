"""Eval rounds: every prompt of an `eval/<name>` table, sampled once on exactly one version.

A round opens before step 1, at the steps its interval names, and at the end. It is over when every prompt is inserted
or given up; until then LeaseBatch waits (unless the table says `eval_hold = false`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from math import comb

from vime_buffer.ledger import NO_LEASE, Ledger, Table
from vime_buffer.schema import Database
from vime_buffer.sources import JsonlSource
from vime_buffer.values import EVICT_LOST_LINEAGE, EVICT_STALE, RoundResult, State, Version, prompt_id
from vime_service.errors import NotFound
from vime_service.logging import get_logger

_log = get_logger(__name__)
_HELD_S = 60.0
"""How long training waits for a round whose table is blocked: a file that was moved comes back; then it goes on without
it."""


def is_due(interval: int, step: int, *, final: bool) -> bool:
    """Does the table hold a round at this step?"""
    return step == 0 or final or (interval > 0 and step % interval == 0)


def open_due_rounds(ledger: Ledger, step: int, version: Version, *, final: bool = False) -> tuple[str, ...]:
    """Open the rounds that `step` reaches and that are not there yet; names of the tables.

    The final round is of the weights that training ends with: one that ran on an older version starts over.
    """
    opened = []
    for table in ledger.tables.values():
        if not table.settings.is_eval or not is_due(table.settings.eval_interval, step, final=final):
            continue
        if table.source is None:
            _log.error("an eval round is left out: its table is blocked", table=table.name, step=step)
            continue
        found = ledger.db.one("SELECT version_step FROM rounds WHERE table_id = ? AND step = ?", table.id, step)
        if found is not None and final and found["version_step"] < version.step:
            _remove_round(ledger, table, step, EVICT_STALE)
            found = None
        if found is None:
            _open_round(ledger, table, table.source, step, version)
            opened.append(table.name)
    return tuple(opened)


def opened_at(ledger: Ledger, step: int) -> tuple[str, ...]:
    """Tables that have a round at `step`: what a repeated CompleteStep answers."""
    rows = ledger.db.all("SELECT table_id FROM rounds WHERE step = ? ORDER BY table_id", step)
    return tuple(ledger.table_by_id(row["table_id"]).name for row in rows)


def _open_round(ledger: Ledger, table: Table, source: JsonlSource, step: int, version: Version) -> None:
    ledger.db.run(
        "INSERT INTO rounds (table_id, step, incarnation, version_step, opened_at) VALUES (?, ?, ?, ?, ?)",
        table.id, step, version.incarnation, version.step, ledger.wall(),
    )  # fmt: skip
    admission = ledger.db.value("SELECT next_admission FROM tables WHERE id = ?", table.id)
    rows = [
        (
            table.id,
            f"{table.name}@{step}/{prompt_id(source.settings.name, 0, index)}",
            admission + index,
            0,
            index,
            step,
            State.QUEUED,
        )
        for index in range(source.records)
    ]
    # A round that was taken back left its rows behind; their attempts go on counting, so that late results of the
    # lost round can never pass for results of this one.
    ledger.db.many(
        "INSERT INTO groups (table_id, group_id, admission, epoch, source_index, eval_step, state) "
        "VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (group_id) DO UPDATE SET state = excluded.state, "
        "admission = excluded.admission, attempt = attempt + 1, failures = 0, reason = ''",
        rows,
    )
    ledger.db.run("UPDATE tables SET next_admission = ? WHERE id = ?", admission + source.records, table.id)


def finish_round_if_done(ledger: Ledger, table: Table, step: int) -> bool:
    """Close the round when no prompt of it is open or queued; its groups count as consumed from then on."""
    left = ledger.db.one(
        "SELECT 1 FROM groups WHERE table_id = ? AND eval_step = ? AND state IN (0, 1) LIMIT 1", table.id, step
    )
    if left is not None:
        return False
    ledger.db.run(
        "UPDATE groups SET state = ? WHERE table_id = ? AND eval_step = ? AND state = ?",
        State.CONSUMED, table.id, step, State.STORED,
    )  # fmt: skip
    ledger.db.run(
        "UPDATE rounds SET done_at = ? WHERE table_id = ? AND step = ? AND done_at IS NULL",
        ledger.wall(), table.id, step,
    )  # fmt: skip
    return True


def holding(ledger: Ledger) -> int:
    """Prompts of rounds that LeaseBatch has to wait for; 0 if none holds."""
    now = ledger.clock.now()
    held = [
        t.id
        for t in ledger.tables.values()
        if t.settings.is_eval and t.settings.eval_hold and not (t.blocked and now - t.blocked_at > _HELD_S)
    ]
    marks = ",".join("?" * len(held))
    sql = (
        "SELECT count(*) FROM rounds JOIN groups ON groups.table_id = rounds.table_id AND eval_step = rounds.step "
        f"WHERE rounds.table_id IN ({marks}) AND done_at IS NULL AND groups.state IN (0, 1)"
    )
    return int(ledger.db.value(sql, *held))


def will_hold(ledger: Ledger, steps: Iterable[int]) -> bool:
    """True if one of `steps` (leased, not completed) will open a round that LeaseBatch has to wait for."""
    held = [t.settings for t in ledger.tables.values() if t.settings.is_eval and t.settings.eval_hold and not t.blocked]
    return any(is_due(settings.eval_interval, step, final=False) for settings in held for step in steps)


LATEST_ROUND = (
    "(eval_step IS NOT NULL AND eval_step = (SELECT max(step) FROM rounds WHERE rounds.table_id = groups.table_id))"
)
"""Of rows of `groups`: those of the newest round of their table. Its payloads can be read until the next one opens."""


def rewind_rounds(ledger: Ledger, resume_step: int) -> int:
    """Rounds after a rewind to `resume_step`; the number of prompts queued again.

    Later ones ran on weights that are lost: they are taken back and open again when training gets there. The one at
    `resume_step`, if it is not done, starts over once the first version is announced. Earlier ones that were not done
    never can be: their versions are served no more; they end as they are.
    """
    requeued = 0
    for row in ledger.db.all("SELECT table_id, step, done_at FROM rounds ORDER BY step"):
        table, step = ledger.table_by_id(row["table_id"]), row["step"]
        if step > resume_step:
            _remove_round(ledger, table, step, EVICT_LOST_LINEAGE)
        elif row["done_at"] is None and step == resume_step:
            requeued += _take_back(ledger, table, step, State.QUEUED, EVICT_LOST_LINEAGE)
            ledger.db.run(
                "UPDATE rounds SET incarnation = NULL, version_step = NULL WHERE table_id = ? AND step = ?",
                table.id,
                step,
            )
        elif row["done_at"] is None:
            _abandon(ledger, table, step)
    return requeued


def _remove_round(ledger: Ledger, table: Table, step: int, reason: str) -> None:
    """The round never was; it may open again."""
    _take_back(ledger, table, step, State.WITHDRAWN, reason)
    ledger.db.run("DELETE FROM rounds WHERE table_id = ? AND step = ?", table.id, step)


def _take_back(ledger: Ledger, table: Table, step: int, to: State, reason: str) -> int:
    """Every prompt of the round goes to state `to`; inserted groups are evicted, counted under `reason`."""
    for row in ledger.db.all("SELECT * FROM groups WHERE table_id = ? AND eval_step = ?", table.id, step):
        if row["state"] == State.OPEN:
            ledger.requeue(row)
        elif row["state"] in (State.STORED, State.CONSUMED, State.RETIRED):
            ledger.evict(row, reason)
    return ledger.db.run(
        "UPDATE groups SET attempt = attempt + (state = ?), state = ?, failures = 0, reason = '' "
        "WHERE table_id = ? AND eval_step = ?",
        State.GIVEN_UP, to, table.id, step,
    )  # fmt: skip


def _abandon(ledger: Ledger, table: Table, step: int) -> None:
    for row in ledger.db.all(
        "SELECT * FROM groups WHERE table_id = ? AND eval_step = ? AND state = ?", table.id, step, State.OPEN
    ):
        ledger.give_up(row, EVICT_LOST_LINEAGE)
    ledger.db.run(
        f"UPDATE groups SET state = ?, {NO_LEASE} WHERE table_id = ? AND eval_step = ? AND state = ?",
        State.WITHDRAWN, table.id, step, State.QUEUED,
    )  # fmt: skip
    finish_round_if_done(ledger, table, step)


def announce_rounds(ledger: Ledger, step: int, version: Version) -> tuple[str, ...]:
    """Give waiting rounds their version and open those that are due and not there; names of the tables."""
    waiting = ledger.db.all("SELECT table_id FROM rounds WHERE version_step IS NULL")
    ledger.db.run(
        "UPDATE rounds SET incarnation = ?, version_step = ?, opened_at = ? WHERE version_step IS NULL",
        version.incarnation, version.step, ledger.wall(),
    )  # fmt: skip
    names = tuple(ledger.table_by_id(row["table_id"]).name for row in waiting)
    return names + open_due_rounds(ledger, step, version)


# ------------------------------------------------------------------ results (reading connection)


def round_result(db: Database, table: str, step: int, run_id: str, now: float) -> RoundResult:
    """What the round at `step` gave so far.

    Raises:
        NotFound: no such round.
    """
    row = db.one("SELECT rounds.* FROM rounds JOIN tables ON id = table_id WHERE name = ? AND step = ?", table, step)
    if row is None:
        raise NotFound(f'table "{table}" has no eval round at step {step}', kind="round", name=f"{table}@{step}")
    groups = db.all(
        "SELECT state, rewards, truncated, response_tokens, json_array_length(sample_tokens) AS samples FROM groups "
        "WHERE table_id = ? AND eval_step = ?",
        row["table_id"],
        step,
    )
    kept = [g for g in groups if g["state"] in (State.STORED, State.CONSUMED, State.RETIRED)]
    rewards = [json.loads(g["rewards"]) for g in kept]
    samples = sum(g["samples"] for g in kept)
    scored = sum(len(r) for r in rewards)
    version = None if row["version_step"] is None else Version(run_id, row["incarnation"], row["version_step"])
    return RoundResult(
        done=row["done_at"] is not None,
        prompts=len(groups),
        inserted=len(kept),
        given_up=sum(1 for g in groups if g["state"] in (State.GIVEN_UP, State.WITHDRAWN)),
        scored=scored,
        unscored=samples - scored,
        mean_reward=sum(map(sum, rewards)) / scored if scored else 0.0,
        truncated_ratio=sum(g["truncated"] for g in kept) / samples if samples else 0.0,
        mean_response_tokens=sum(g["response_tokens"] for g in kept) / samples if samples else 0.0,
        pass_at_k=pass_at_k([(len(r), sum(1 for reward in r if reward == 1)) for r in rewards]),
        version=version,
        seconds=max(0.0, (row["done_at"] or now) - row["opened_at"]),
    )


def pass_at_k(groups: list[tuple[int, int]]) -> Mapping[int, float]:
    """Unbiased pass@k for k = 1, 2, 4, ...: the mean of 1 - C(n - c, k) / C(n, k) over groups with n >= k samples.

    Args:
        groups: (n scored samples, c of them with a reward of 1) of each prompt.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1.
    """
    found: dict[int, float] = {}
    k = 1
    while any(n >= k for n, _ in groups):
        shares = [1 - comb(n - c, k) / comb(n, k) for n, c in groups if n >= k]
        found[k] = sum(shares) / len(shares)
        k *= 2
    return found
