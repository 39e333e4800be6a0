"""People compare answers, two at a time, in a browser; what they say is in an SQLite file and becomes preferences.

`store` keeps pairs and judgements, `statistics` says how far people agree and who wins, `app` has the pages, also those
that read the recorded sequences of runs, and `serving` runs them and lets in who has the token.
"""

from chatgpt.monitor.compare.statistics import summarize
from chatgpt.monitor.compare.store import Store

__all__ = ['Store', 'summarize']
