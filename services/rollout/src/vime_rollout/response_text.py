"""The text of one response, decoded while it grows: each token a few times, however long the response becomes."""

from __future__ import annotations

from collections.abc import Sequence

from vime_rollout.engine import EngineEnd, FinishReason, Tokenizer

_INCOMPLETE = "\ufffd"


class ResponseText:
    """Text from the ids, whole characters only, without the terminating id, cut at a stop string.

    A tokenizer may write the first of the ids it decodes in another way than the same id inside a text. So new ids are
    decoded after some that came before, and the text of those is cut off.

    Args:
        tokenizer: decodes.
        resumed: response ids that came with the request; their text is not returned.
        stops: the request's stop strings.
    """

    def __init__(self, tokenizer: Tokenizer, resumed: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._held = max((len(stop) - 1 for stop in stops), default=0)
        self._before = list(resumed)
        self._before_text = tokenizer.decode(self._before).rstrip(_INCOMPLETE) if resumed else ""
        self._settled = ""
        self._read = 0
        self._given = 0

    def grow(self, token_ids: Sequence[int], end: EngineEnd | None) -> str:
        """What is new of the text, now that the response has these ids, of which `end` may be the end."""
        count = len(token_ids)
        if end is not None and end.finish_reason is FinishReason.STOP and end.matched_stop is None:
            count -= 1
        tail = self._decode(list(token_ids[self._read : count]))
        text = self._settled + tail
        if end is None:  # the last character may still be incomplete, and a stop string may have begun
            text = text.rstrip(_INCOMPLETE)
            text = text[: max(0, len(text) - self._held)]
        elif end.matched_stop:
            text = text.partition(end.matched_stop)[0]
        new = text[self._given :]
        self._given = max(self._given, len(text))
        return new

    def _decode(self, new: list[int]) -> str:
        """Text of the ids that are not settled; settles them if they end with a whole character."""
        text = self._tokenizer.decode([*self._before, *new])[len(self._before_text) :]
        if new and not text.endswith(_INCOMPLETE):
            self._read += len(new)
            self._settled += text
            self._before, self._before_text = new, self._tokenizer.decode(new)
            return ""
        return text
