"""Resuming a stream: no token lost, none doubled, and the version spans stay true."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime_router.fences import Version
from vime_router.progress import BrokenOrder, Span, StreamProgress

OLD, NEW = Version("run", 1, 4), Version("run", 1, 5)


def test_a_single_sample_can_be_resumed_from_what_arrived() -> None:
    progress = StreamProgress(1, start=3)
    progress.take(0, 3, [7, 8], [Span(3, OLD)], ended=False)
    assert progress.can_resume
    assert progress.received == [7, 8]


def test_a_token_of_unknown_weights_or_a_second_sample_forbids_to_resume() -> None:
    unknown = StreamProgress(1)
    unknown.take(0, 0, [7], [], ended=False)
    assert not unknown.can_resume
    assert not StreamProgress(2).can_resume


@pytest.mark.parametrize(
    ("first", "message"), [(1, "begins at token 1, expected 2"), (3, "begins at token 3, expected 2")]
)
def test_doubled_and_lost_tokens_are_noticed(first: int, message: str) -> None:
    progress = StreamProgress(1)
    progress.take(0, 0, [7, 8], [Span(0, OLD)], ended=False)
    with pytest.raises(BrokenOrder, match=message):
        progress.take(0, first, [9], [Span(first, OLD)], ended=False)


def test_pieces_after_the_end_and_of_samples_nobody_asked_for_are_noticed() -> None:
    progress = StreamProgress(1)
    progress.take(0, 0, [7], [Span(0, OLD)], ended=True)
    assert progress.complete
    with pytest.raises(BrokenOrder, match="after its end"):
        progress.take(0, 1, [8], [Span(1, OLD)], ended=False)
    with pytest.raises(BrokenOrder, match="sample 1, but the call asked for 1"):
        progress.take(1, 0, [8], [Span(0, OLD)], ended=False)


@pytest.mark.parametrize("first", [0, 2])
def test_the_prefix_stays_with_its_sampler_whether_or_not_the_new_engine_names_itself_for_it(first: int) -> None:
    progress = StreamProgress(1)
    progress.take(0, 0, [7, 8], [Span(0, OLD)], ended=False)
    progress.take(0, 2, [9], [Span(2, NEW)], ended=True)
    assert progress.spans_with([Span(first, NEW)], since=2) == [Span(0, OLD), Span(2, NEW)]


def test_an_engine_that_had_nothing_left_to_generate_adds_no_span() -> None:
    progress = StreamProgress(1)
    progress.take(0, 0, [7, 8], [Span(0, OLD)], ended=False)
    progress.take(0, 2, [], [Span(2, NEW)], ended=True)
    assert progress.spans_with([Span(0, NEW)], since=2) == [Span(0, OLD)]


@given(
    pieces=st.lists(st.tuples(st.integers(1, 4), st.sampled_from([OLD, NEW])), min_size=1, max_size=12),
    cut=st.integers(0, 12),
    names_itself=st.booleans(),
)
def test_merged_spans_name_the_version_of_every_token(
    pieces: list[tuple[int, Version]], cut: int, names_itself: bool
) -> None:
    progress, truth = StreamProgress(1), []
    cut = min(cut, len(pieces) - 1)
    since, last = 0, []
    for index, (count, version) in enumerate(pieces):
        if index == cut:
            since = len(truth)
            last = [Span(0 if names_itself else since, version)]
        if index > cut and version != pieces[index - 1][1]:
            last.append(Span(len(truth), version))
        progress.take(0, len(truth), [1] * count, [Span(len(truth), version)], ended=index == len(pieces) - 1)
        truth += [version] * count
    spans = progress.spans_with(last, since)
    ends = [span.first_token for span in spans[1:]] + [len(truth)]
    assert [
        v for span, end in zip(spans, ends, strict=True) for v in [span.version] * (end - span.first_token)
    ] == truth
    assert all(before.version != after.version for before, after in itertools.pairwise(spans))


def test_a_piece_in_which_new_weights_took_over_names_both() -> None:
    progress = StreamProgress(1)
    progress.take(0, 0, [1, 2, 3, 4], [Span(0, OLD), Span(2, NEW)], ended=False)
    progress.take(0, 4, [5], [Span(0, OLD), Span(2, NEW)], ended=False)  # spans that began in an earlier piece
    assert progress.can_resume
    progress.take(0, 5, [6], [Span(5, NEW)], ended=True)
    assert progress.spans_with([Span(5, NEW)], since=5) == [Span(0, OLD), Span(2, NEW)]


def test_a_piece_whose_first_tokens_nobody_claims_forbids_to_resume() -> None:
    progress = StreamProgress(1)
    progress.take(0, 0, [1, 2], [Span(1, OLD)], ended=False)
    assert not progress.can_resume
