"""The first lines of trlX's README: training with only a reward, generation, and saving."""

import json
import sys

import trlx
from transformers import AutoTokenizer
from trlx.data.default_configs import default_ppo_config

hparams = json.loads(sys.argv[1])
config = default_ppo_config()
config.train.total_steps, config.train.epochs, config.train.batch_size = 2, 2, 4
config.train.tracker, config.train.seq_length, config.train.minibatch_size = None, 32, 2
config.tokenizer.tokenizer_path = hparams['folder']
config.model.num_layers_unfrozen = 1
config.method.num_rollouts = config.method.chunk_size = 4
config.method.ppo_epochs = 1
config.method.gen_kwargs['max_new_tokens'] = 6

trlx.logging.set_verbosity(trlx.logging.WARNING)
trainer = trlx.train(
    hparams['folder'], reward_fn=lambda samples, **kwargs: [s.count('cats') for s in samples], config=config
)
tokenizer = AutoTokenizer.from_pretrained(hparams['folder'])
answer = trainer.generate(**tokenizer('who rules?', return_tensors='pt'), do_sample=True)
own = trainer.model.generate(**tokenizer('who rules?', return_tensors='pt'), max_new_tokens=3, do_sample=False)
trainer.save_pretrained('output')
