"""Prompts with ratings from a database, as `dataset=(samples, ratings)`."""

import json
import sqlite3
import sys

import trlx
from trlx.data.default_configs import TRLConfig, default_ilql_config

if __name__ == '__main__':
    hparams = json.loads(sys.argv[1])
    connection = sqlite3.connect(':memory:')
    connection.execute('CREATE TABLE ratings (prompt TEXT, rating INTEGER)')
    rows = [('a red dress', 7), ('a grey stone', 2), ('the sea at night', 9), ('a chair', 4)]
    connection.executemany('INSERT INTO ratings VALUES (?, ?)', rows)
    prompts, ratings = map(list, zip(*connection.execute('SELECT prompt, rating FROM ratings')))
    trainer = trlx.train(
        dataset=(prompts, ratings),
        eval_prompts=['a red'] * 2,
        config=TRLConfig.update(default_ilql_config(), hparams['config']),
    )
