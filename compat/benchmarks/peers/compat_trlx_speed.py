"""Worker of `compat_trlx.py speed`: one program for both sides, `trlx.train` on the work of `work.py`.

With TRLX_SOURCE in the environment `trlx` is trlX 0.7, else it is `chatgpt_compat.trlx`. An update lasts from one call
of the reward function to the next: learn from a phase of rollouts, draw the next.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

from work import ADAMW, KL_COEF, NEW_TOKENS, SEQUENCES, begin, prompt_ids, text_of, tokenizer, versions

case, line = begin()
if source := os.environ.get('TRLX_SOURCE'):
    from compat_trlx_peer import stand_ins

    stand_ins()
    sys.path.insert(0, source)
    import trlx
    from trlx.data.default_configs import TRLConfig, default_ppo_config
else:
    from chatgpt_compat import trlx
    from chatgpt_compat.trlx.config import TRLConfig, default_ppo_config

folder = tempfile.mkdtemp()
tokenizer().save_pretrained(folder)
model_path = case.model
if source:  # trlX reads pickled weights alone
    from transformers import AutoModelForCausalLM

    model_path = f'{folder}/model'
    AutoModelForCausalLM.from_pretrained(case.model).save_pretrained(model_path, safe_serialization=False)
config = default_ppo_config()
config.train.tracker, config.train.checkpoint_dir = None, f'{folder}/checkpoints'
config.train.batch_size, config.train.total_steps, config.train.epochs = SEQUENCES, 10**6, 10**6
config.train.seq_length, config.train.eval_interval, config.train.checkpoint_interval = 100, 10**9, 10**9
config.model.model_path, config.model.num_layers_unfrozen = model_path, 2
config.tokenizer.tokenizer_path = folder
config.optimizer.kwargs = {k: v for k, v in ADAMW.items() if k != 'fused'}
config.scheduler.kwargs = {'T_max': 1e12, 'eta_min': ADAMW['lr']}
config.method.num_rollouts = config.method.chunk_size = SEQUENCES
config.method.ppo_epochs, config.method.init_kl_coef = case.epochs, KL_COEF
config.method.gen_kwargs = {
    'max_new_tokens': NEW_TOKENS,
    'min_new_tokens': NEW_TOKENS,
    'top_k': 0,
    'top_p': 1.0,
    'do_sample': True,
}
calls = 0


def reward_fn(samples: Any, **_: Any) -> list[float]:
    global calls
    if len(samples) == SEQUENCES:
        if calls == 0:
            line.ready(**versions('accelerate'), trlx='0.7.0' if source else 'ours', networks=2)
        else:
            line.done(SEQUENCES * NEW_TOKENS, SEQUENCES)
        calls += 1
        if not line.wait():
            os._exit(0)
    return [0.0] * len(samples)


trlx.train(
    reward_fn=reward_fn,
    prompts=[text_of(ids) for ids in prompt_ids(SEQUENCES)],
    eval_prompts=[text_of(prompt_ids(1)[0])],
    config=TRLConfig.update(config.to_dict(), {}),
)
