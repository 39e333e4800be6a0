"""The first API's ILQL: samples with ratings through an `OfflineOrchestrator`."""

import sys

from trlx.data.configs import TRLConfig
from trlx.pipeline.offline_pipeline import PromptPipeline
from trlx.utils.loading import get_model, get_orchestrator

if __name__ == '__main__':
    config = TRLConfig.load_yaml('ilql_config.yml')
    config.model.model_path = config.model.tokenizer_path = sys.argv[1]
    config.train.gen_size = 10
    model = get_model(config.model.model_type)(
        config, metric_fn=lambda samples: {'length': [len(s) for s in samples], 'one': 1.0}
    )
    orch = get_orchestrator(config.train.orchestrator)(model, split_token=':')
    orch.make_experience(['a: red', 'b: blue', 'c: green', 'd: grey'], [3.0, 1.0, 2.0, 0.5])
    model.add_eval_pipeline(PromptPipeline(['a:', 'b:'], model.tokenizer))
    model.learn()
