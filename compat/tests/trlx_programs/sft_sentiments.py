"""SFT on good reviews and on dialogues, with an explicit save of the model."""

import json
import sys

import trlx
from trlx.data.default_configs import TRLConfig, default_sft_config

GOOD = ['a fine film', 'i liked the end', 'the best of all', 'what a day at the pictures']
DIALOGUES = [['1 + 2 =', ' 3'], ['say a', ' a', ' and b?', ' b'], ['2 + 2 =', ' 4'], ['what?', ' that']]

if __name__ == '__main__':
    hparams = json.loads(sys.argv[1])
    config = TRLConfig.update(default_sft_config().to_dict(), hparams['config'])
    trainer = trlx.train(
        samples=DIALOGUES if hparams.get('dialogues') else GOOD,
        eval_prompts=['a'] * 3,
        metric_fn=lambda samples, prompts, outputs, **kwargs: {'length': [len(o) for o in outputs]},
        config=config,
    )
    trainer.save_pretrained('reviews-sft')
