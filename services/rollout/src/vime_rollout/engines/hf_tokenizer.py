"""A Hugging Face tokenizer: text and conversations to ids, with exactly one BOS where the tokenizer adds one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import xxhash

_FLAGS = frozenset({"add_generation_prompt", "continue_final_message"})
# What a template reads and no caller sets: the call itself, what Transformers adds, and the template.
_OURS = frozenset({"messages", "tools", "chat_template", "raise_exception", "strftime_now"})


class HfTokenizer:
    """See `vime_rollout.engine.Tokenizer`."""

    def __init__(self, tokenizer: Any) -> None:
        """Take a loaded `PreTrainedTokenizer(Fast)`."""
        self._tokenizer = tokenizer
        self._bos: int | None = tokenizer.bos_token_id
        probe = tokenizer("a", add_special_tokens=True)["input_ids"]
        self._adds_bos = self._bos is not None and bool(probe) and probe[0] == self._bos

    @cached_property
    def longest_token(self) -> int:
        """See `Tokenizer.longest_token`."""
        return max(map(len, self._tokenizer.get_vocab()))

    def encode_text(self, text: str) -> list[int]:
        """See `Tokenizer.encode_text`."""
        return self._one_bos(list(self._tokenizer(text, add_special_tokens=False)["input_ids"]))

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> list[int]:
        """See `Tokenizer.encode_chat`."""
        if not self._template():
            raise ValueError("the tokenizer has no chat template")
        unknown = sorted(options.keys() - self._arguments)
        if unknown:
            known = ", ".join(sorted(self._arguments))
            raise ValueError(f"the chat template has no argument {unknown[0][:64]!r}, it has: {known}")
        wrong = [name for name in _FLAGS & options.keys() if not isinstance(options[name], bool)]
        if wrong:
            raise ValueError(f"{wrong[0]} is {repr(options[wrong[0]])[:64]}, it must be true or false")
        arguments = {"add_generation_prompt": True, **options, "tokenize": False}
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tools=tools or None, **arguments)
        except Exception as error:  # a template is a program that came with the model: it raises what it likes
            raise ValueError(f"the chat template cannot render these messages: {error}") from error
        return self.encode_text(text)

    @cached_property
    def _arguments(self) -> frozenset[str]:
        """What a caller may pass: data that the template reads, never what decides which template is rendered."""
        from jinja2 import TemplateError, meta
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """Transformers' own tag: around what the model says."""

            tags = {"generation"}  # noqa: RUF012  as Jinja declares it

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        parser = ImmutableSandboxedEnvironment(extensions=[Generation, loopcontrols])
        try:
            read = meta.find_undeclared_variables(parser.parse(self._template()))
        except TemplateError as error:
            raise ValueError(f"the chat template is none: {error}") from error
        return frozenset(read - _OURS - parser.globals.keys() - self._tokenizer.special_tokens_map.keys()) | _FLAGS

    def chat_template_digest(self) -> str:
        """See `Tokenizer.chat_template_digest`."""
        return str(xxhash.xxh3_128_hexdigest(self._template().encode()))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """See `Tokenizer.decode`."""
        text = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def _template(self) -> str:
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default", "")
        return template or ""

    def _one_bos(self, ids: list[int]) -> list[int]:
        """A template may or may not write BOS, a tokenizer may or may not add it: one comes out."""
        if not self._adds_bos:
            return ids
        assert self._bos is not None
        start = 0
        while start < len(ids) and ids[start] == self._bos:
            start += 1
        return [self._bos, *ids[start:]]
