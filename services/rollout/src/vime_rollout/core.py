"""The service without its wire: one engine and everything around it, put together."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vime_rollout.config import RolloutSettings
from vime_rollout.control import Control
from vime_rollout.engine import Engine
from vime_rollout.generation import Generation
from vime_rollout.tokenizing import TokenizerThread
from vime_rollout.traffic import Traffic
from vime_rollout.transfers import Connect, connect
from vime_rollout.updates import Updater
from vime_rollout.weights import WeightState
from vime_service.errors import InvalidArgument, PromptTooLong


@dataclass(frozen=True, slots=True)
class Rendered:
    """Ids of a prompt, and the digest of the template that made them (`text` without a template)."""

    prompt_token_ids: list[int]
    template_digest: str


class Core:
    """Everything that a servicer needs. Make it, `start` it, in the end `stop` it."""

    def __init__(self, config: RolloutSettings, engine: Engine, join: Connect = connect) -> None:
        self.config = config
        self.engine = engine
        self.boot_id = uuid.uuid4().hex
        self.weights = WeightState(config.updatable)
        self.traffic = Traffic(self.weights)
        self._tokenizing = TokenizerThread()
        self.generation = Generation(engine, self.traffic, self._tokenizing)
        self.updater = Updater(engine, self.weights, self.traffic, self.generation, config.updates, join)
        self.control = Control(engine, self.weights, self.traffic, self.updater)
        self.started = False

    async def start(self) -> None:
        """Load the model. Raises `EngineError` when that fails."""
        await self.engine.start()
        if self.config.serve_initial or not self.config.updatable:
            self.weights.serve_initial()
        self.started = True

    async def stop(self) -> None:
        """End transfers and the engine with all its processes."""
        await self.control.close()
        await self.updater.close()
        await self.engine.stop()
        self._tokenizing.close()

    async def render_text(self, text: str) -> Rendered:
        """Ids of plain text; `PromptTooLong` where the context cannot hold so many characters."""
        self._check_size(len(text))
        return Rendered(await self._tokenizing.run(self.engine.tokenizer.encode_text, text), "text")

    async def render_chat(self, messages: Sequence[Any], tools: Sequence[Any], options: dict[str, Any]) -> Rendered:
        """Ids of a conversation.

        Raises:
            InvalidArgument: the template cannot render it.
            PromptTooLong: the context cannot hold so many characters.
        """
        tokenizer = self.engine.tokenizer
        self._check_size(sum(len(message["content"]) for message in messages))
        try:
            ids = await self._tokenizing.run(tokenizer.encode_chat, messages, tools, options)
        except ValueError as error:
            raise InvalidArgument(str(error), field="chat") from error
        return Rendered(ids, tokenizer.chat_template_digest())

    async def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of ids."""
        return await self._tokenizing.run(self.engine.tokenizer.decode, token_ids, skip_special_tokens)

    def _check_size(self, characters: int) -> None:
        """Before it is tokenized: that takes seconds for what is refused anyway, and everybody waits for the thread."""
        context = self.engine.description.max_model_len
        most = context * self.engine.tokenizer.longest_token
        if characters > most:
            raise PromptTooLong(
                f"a text of {characters} characters, and the context's {context} tokens hold at most {most}",
                characters=characters,
                max_model_len=context,
            )
