"""ILQL from labelled reviews, evaluated by a sentiment classifier."""

import json
import sys
from typing import Dict, List

import trlx
from transformers import pipeline
from trlx.data.default_configs import TRLConfig, default_ilql_config

TEXTS = ['a fine film', 'so bad it hurts', 'i liked the end', 'dull and long', 'the best of all', 'no plot at all']
LABELS = [1, 0, 1, 0, 1, 0]


def main(hparams={}):
    config = TRLConfig.update(default_ilql_config().to_dict(), hparams['config'])
    sentiment_fn = pipeline('sentiment-analysis', hparams['classifier'], top_k=2, truncation=True, device=-1)

    def metric_fn(samples: List[str], **kwargs) -> Dict[str, List[float]]:
        rows = [{entry['label']: entry['score'] for entry in scores} for scores in sentiment_fn(samples)]
        return {'sentiments': [row['POSITIVE'] for row in rows]}

    return trlx.train(samples=TEXTS, rewards=LABELS, eval_prompts=['i know'] * 4, metric_fn=metric_fn, config=config)


if __name__ == '__main__':
    trainer = main(json.loads(sys.argv[1]))
