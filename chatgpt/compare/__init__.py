"""People compare answers, two at a time, in a browser; what they say is in an SQLite file and becomes preferences.

`Store` keeps pairs and judgements, `statistics` says how far people agree and who wins, `app` has the pages, `guard`
lets in who has the token, and `server` runs them. The page that reads the rollouts of whole runs is here too, for it is
served in the same way. Left out: making the answers (`chatgpt.cli.compare`).
"""

from chatgpt.compare.app import compare_app
from chatgpt.compare.guard import Guard
from chatgpt.compare.rollouts import rollouts_app
from chatgpt.compare.server import Serving, serve
from chatgpt.compare.statistics import cohen_kappa, krippendorff_alpha, summarize, wilson
from chatgpt.compare.store import AskedPair, NotAsked, Store

__all__ = [
    'AskedPair',
    'Guard',
    'NotAsked',
    'Serving',
    'Store',
    'cohen_kappa',
    'compare_app',
    'krippendorff_alpha',
    'rollouts_app',
    'serve',
    'summarize',
    'wilson',
]
