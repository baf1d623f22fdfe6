"""Which stored groups make the next batch."""

from __future__ import annotations

import pytest

from vime_buffer.selectors import AdmissionOrder, Candidate, ReadyFirst, make_selector


def candidate(admission, *, stored=True, staleness=0, evictions=0):
    return Candidate(row=admission, admission=admission, stored=stored, staleness=staleness, evictions=evictions)


def taken(choice):
    return [c.admission for c in choice.take]


def test_admission_order_waits_for_the_slow_prompt():
    waiting = [candidate(1), candidate(2, stored=False), candidate(3), candidate(4)]
    assert taken(AdmissionOrder(0).choose(waiting, 2)) == []
    assert taken(AdmissionOrder(0).choose([candidate(n) for n in (1, 2, 3, 4)], 2)) == [1, 2]


def test_ready_first_takes_what_is_there():
    waiting = [candidate(1), candidate(2, stored=False), candidate(3), candidate(4)]
    assert taken(ReadyFirst(1, 2).choose(waiting, 2)) == [1, 3]


@pytest.mark.parametrize("selector", [AdmissionOrder(1), ReadyFirst(1, 2)])
def test_nothing_older_than_max_staleness_is_ever_taken(selector):
    choice = selector.choose([candidate(1, staleness=2), candidate(2, staleness=1), candidate(3)], 2)
    assert [c.admission for c in choice.evict] == [1]
    assert taken(choice) == []


def test_ready_first_waits_for_a_prompt_that_was_evicted_too_often():
    owed = candidate(5, stored=False, evictions=2)
    assert taken(ReadyFirst(1, 2).choose([candidate(1), candidate(2), owed], 2)) == []
    owed = candidate(5, evictions=2)
    assert taken(ReadyFirst(1, 2).choose([candidate(1), candidate(2), owed], 2)) == [5, 1]


def test_a_batch_is_whole_or_not_at_all():
    assert taken(ReadyFirst(1, 2).choose([candidate(1)], 2)) == []
    assert taken(AdmissionOrder(1).choose([candidate(1)], 2)) == []


def test_the_setting_names_the_selector():
    assert isinstance(make_selector("ready_first", 1, 2), ReadyFirst)
    assert isinstance(make_selector("admission_order", 1, 2), AdmissionOrder)
