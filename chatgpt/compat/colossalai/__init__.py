"""ColossalAI's `chatgpt` (2023, `applications/ChatGPT`): what its scripts import.

Most of its names are the library's own and need no table. The rest is here, under both layouts that it had: `chatgpt.nn`
(February 2023) and `chatgpt.models` (March 2023).
"""

from __future__ import annotations

SERVED: dict[str, str] = {
    'models.gpt.GPTActor': 'chatgpt.nn:GPTActor',
}

INSTEAD: dict[str, str] = {}
