"""How observations become ids. A transcript only grows: ids are appended, and nothing is rendered or tokenized again,
so the ids that were sampled are the ids that are trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from chatgpt.dataset.formats import begin_ids
from chatgpt.dataset.tokenize import encode
from chatgpt.environments.base import Observation


class TranscriptFormat(Protocol):
    """From observations to ids."""

    def first(self, prompt_ids: Sequence[int], observation: Observation) -> list[int]:
        """The ids before the first turn. `prompt_ids`: of the data row's prompt; empty where there is no data."""
        ...

    def after(
        self, turn_ids: Sequence[int], ended: Literal['eos', 'stop', 'length'], observation: Observation
    ) -> list[int]:
        """The ids to append after a turn and before the next."""
        ...


class PlainText:
    """Observations are text, encoded as it is, each by itself.

    Raises:
        ValueError: on messages, which need a chat template.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def first(self, prompt_ids: Sequence[int], observation: Observation) -> list[int]:
        start = list(prompt_ids) or begin_ids(self.tokenizer)
        return start + self._encoded(observation)

    def after(
        self, turn_ids: Sequence[int], ended: Literal['eos', 'stop', 'length'], observation: Observation
    ) -> list[int]:
        return self._encoded(observation)

    def _encoded(self, observation: Observation) -> list[int]:
        if not isinstance(observation, str):
            raise ValueError('the environment speaks in messages, which need a tokenizer with a chat template')
        return encode(observation, self.tokenizer)
