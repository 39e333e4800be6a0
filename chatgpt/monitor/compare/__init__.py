"""Comparison of pairs of responses by people in a browser; the judgements are in an SQLite file and become preferences.

`store` has pairs and judgements, `statistics` computes agreement and win rate, `app` has the pages, also that of
recorded sequences, and `serving` serves them to holders of a token.
"""

from chatgpt.monitor.compare.statistics import summarize
from chatgpt.monitor.compare.store import Store

__all__ = ['Store', 'summarize']
