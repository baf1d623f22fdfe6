"""The text of one response, decoded while it grows: each token a few times, however long the response becomes."""

from __future__ import annotations

from collections.abc import Sequence

from vime_rollout.engine import EngineEnd, FinishReason, Tokenizer

_INCOMPLETE = "\ufffd"


class ResponseText:
    """Text from the ids, whole characters only, without the terminating id, cut at a stop string.

    How much of the text is out is a function of the ids so far: whoever goes on with the ids that came with a piece
    begins where that piece's text ended. What was held back then (half a character, what may be the beginning of a stop
    string) is returned by the call that resumes.

    A tokenizer may write the first of the ids it decodes in another way than the same id inside a text. So new ids are
    decoded after some that came before, and the text of those is cut off.

    Args:
        tokenizer: decodes.
        resumed: response ids that came with the request; of their text only what was held back is returned.
        stops: the request's stop strings.
        skip_special_tokens: leave special tokens out.
        keep_stop: cut after the stop string, not before it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        resumed: Sequence[int],
        stops: Sequence[str],
        skip_special_tokens: bool = False,
        keep_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._stops = stops
        self._skip_special_tokens = skip_special_tokens
        self._keep_stop = keep_stop
        self._before: list[int] = []
        self._before_text = ""
        self._settled = ""
        self._resumed = list(resumed)
        """Those of them that are not settled."""
        self._read = 0
        self._given = 0
        if resumed:
            tail = self._decode([])
            self._given = len(self._sure(self._settled + tail))

    def grow(self, token_ids: Sequence[int], end: EngineEnd | None) -> str:
        """What is new of the text, now that the response has these new ids, of which `end` may be the end."""
        count = len(token_ids)
        if end is not None and end.finish_reason is FinishReason.STOP and end.matched_stop is None:
            count -= 1
        tail = self._decode(list(token_ids[self._read : count]))
        text = self._settled + tail
        if end is None or end.finish_reason is FinishReason.ABORT:  # either may go on
            text = self._sure(text)
        elif end.matched_stop:
            before, stop, _ = text.partition(end.matched_stop)
            text = before + stop if self._keep_stop else before
        new = text[self._given :]
        self._given = max(self._given, len(text))
        return new

    def _sure(self, text: str) -> str:
        """Without what further ids may change: the last character may be incomplete, a stop string may have begun."""
        text = text.rstrip(_INCOMPLETE)
        begun = (n for stop in self._stops for n in range(len(stop) - 1, 0, -1) if text.endswith(stop[:n]))
        return text[: len(text) - max(begun, default=0)]

    def _decode(self, new: list[int]) -> str:
        """Text of the ids that are not settled; settles them if they end with a whole character."""
        ids = [*self._resumed, *new]
        text = self._text_of([*self._before, *ids])[len(self._before_text) :]
        if ids and not text.endswith(_INCOMPLETE):
            self._read += len(new)
            self._resumed = []
            self._settled += text
            self._before, self._before_text = ids, self._text_of(ids)
            return ""
        return text

    def _text_of(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special_tokens)
