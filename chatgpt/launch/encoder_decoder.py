"""What a run of an encoder-decoder (T5, BART) cannot do, said before any work.

Left out: everything that works as it does for a decoder, which is the rest.
"""

from __future__ import annotations

from typing import Any

from chatgpt.launch.runs import PPORun, Run, SFTRun
from chatgpt.rollout.episodes import check_writes_turns


def check_run_apart(run: Run, config: Any) -> None:
    """Raises ValueError for a setting that the encoder-decoder of a run cannot follow. Nothing for a decoder."""
    if not getattr(config, 'is_encoder_decoder', False):
        return
    what = f'{run.pretrain or "the model"} is an encoder-decoder ({config.model_type})'
    if run.on_trunk:
        raise ValueError(f'{what}, which shares no trunk: leave shared_trunk and quantize out')
    if isinstance(run, SFTRun) and run.pack_examples:
        raise ValueError(f'{what}, whose examples have a prompt each, and pack_examples joins texts: leave it out')
    if not isinstance(run, PPORun):
        return
    if run.environment is not None:
        check_writes_turns(config)
    for name, given, why in (
        ('rollout_workers', run.rollout_workers, 'which generates in the training process'),
        ('reproducible', run.reproducible, 'and exact draws are of the local engine, which it does not have'),
        ('nlpo_top_p', run.nlpo_top_p, 'and NLPO draws with the local engine, which it does not have'),
    ):
        if given:
            raise ValueError(f'{what}, {why}: leave {name} out')
    if run.engine in ('local', 'vllm'):
        raise ValueError(f'{what}, which model.generate alone generates with: give engine hf, or leave it out')
