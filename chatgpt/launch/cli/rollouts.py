"""Show the recorded sequences of runs in a browser, by phase, prompt, score and text, tokens coloured by a number.

    chatgpt-rlhf rollouts outputs/ppo
    chatgpt-rlhf rollouts outputs/ppo outputs/grpo --port 8800

A run records its sequences in rollouts/ of its folder. The page is served on this machine until Ctrl-C. Runs that have
not ended can be shown too.
"""

from __future__ import annotations

from chatgpt.launch.arguments import Parser
from chatgpt.monitor.compare.app import rollouts_app
from chatgpt.monitor.compare.serving import ROLLOUTS_PORT, add_server, need_server, serve


def parser() -> Parser:
    out = Parser(description=__doc__, usage='%(prog)s RUN [RUN ...]')
    out.add_argument('runs', nargs='+', metavar='RUN', help='run folder, with rollouts/')
    add_server(out, ROLLOUTS_PORT)
    return out


def main() -> None:
    args = parser().parse_args()
    need_server(args.host, args.port)
    serve(rollouts_app(args.runs), host=args.host, port=args.port)
