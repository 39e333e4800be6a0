"""How good a model's responses are, by a reward: what it says to a file of prompts, scored.

    chatgpt-rlhf evaluate outputs/run/actor prompts.jsonl --reward_fn rewards.py:score
    chatgpt-rlhf evaluate outputs/run/actor prompts.jsonl --reward_model outputs/rm/reward_model --output scored.jsonl

Responses are the likeliest ones, or drawn with --temperature. Prints a table of samples, and a line of numbers as JSON:
score_mean, score_std, length_mean (in tokens), ended (the share of responses that came to their end).
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any, cast

from chatgpt.cli.generate import add_model, in_our_words, load_actor, output_file, read_prompts, room, take_words
from chatgpt.launch.arguments import (
    Parser,
    add_strategy,
    check_reward_function,
    load_function,
    strategy_of,
)
from chatgpt.launch.config_values import number


def parser() -> Parser:
    out = Parser(description=__doc__, usage='%(prog)s MODEL PROMPTS --reward_fn FILE:FUNCTION [--name value ...]')
    out.add_argument('words', nargs='*', metavar='MODEL', help='hub name or folder of the model; then the prompts')
    model, reward, drawing, run = map(out.add_argument_group, ('the model', 'the reward', 'responses', 'the run'))
    add_model(model)
    reward.add_argument('--reward_fn', help='module:function or file.py:function, fn(prompts, responses, **columns)')
    reward.add_argument('--reward_model', help='folder of a reward model')
    drawing.add_argument('--input', help='the file of prompts, in place of the second word')
    drawing.add_argument('--apply_chat_template', action='store_true', help='prompts in text are turns of the user')
    drawing.add_argument('--max_new_tokens', type=int, help='(default: 128, or what the context leaves)')
    drawing.add_argument('--temperature', type=number, help='draw with it (default: the likeliest tokens)')
    drawing.add_argument('--stop_string', action='append', help='end a response where this text appears')
    run.add_argument('--num_rows', type=int, default=4, help='samples to show (default: 4)')
    run.add_argument('--output', help='write prompts, responses and scores as jsonl')
    add_strategy(run)
    return out


def parse_args() -> Any:
    out = parser()
    args = take_words(out, out.parse_args(in_our_words(sys.argv[1:], out)), 'input')
    if args.input is None:
        out.error('give a file of prompts')
    if (args.reward_fn is None) == (args.reward_model is None):
        out.error('give --reward_fn FILE:FUNCTION or --reward_model FOLDER, which scores the responses')
    return args


@dataclass
class Model:
    """What `PromptEvaluation` looks at of a trainer."""

    strategy: Any
    tokenizer: Any
    actor: Any
    phase: int = 0
    run_dir: None = None

    def models(self) -> dict[str, Any]:
        return {'actor': self.actor}


def main() -> None:
    args = parse_args()
    from chatgpt.launch.inputs import quiet_transformers
    from chatgpt.nn.loading import load_tokenizer
    from chatgpt.trainer.callbacks.base import TrainerView
    from chatgpt.trainer.prompt_evaluation import PromptEvaluation

    if args.temperature == 0:
        raise ValueError('--temperature 0 is what holds without it: leave it out')
    quiet_transformers()
    tokenizer = load_tokenizer(args.tokenizer or args.pretrain, trust_remote_code=args.trust_remote_code)
    prompts = read_prompts(args.input, tokenizer, args.apply_chat_template or None)
    with output_file(args) as output, strategy_of(args) as strategy:
        reward = reward_of(args, strategy, tokenizer)
        actor = strategy.prepare(load_actor(args, strategy))
        drawing = {} if args.temperature is None else {'do_sample': True, 'temperature': args.temperature}
        evaluation = PromptEvaluation(
            prompts,
            tokenizer,
            reward,
            num_rows=args.num_rows,
            seed=args.seed,
            max_new_tokens=args.max_new_tokens or room(strategy.unwrap(actor).config, prompts),
            stop_strings=args.stop_string,
            **drawing,
        )
        numbers = evaluation(cast(TrainerView, Model(strategy, tokenizer, actor)))
    if strategy.is_rank_0:
        print(json.dumps({name: round(value, 6) for name, value in numbers.items()}))
        if output is not None:
            with open(args.output, 'w') as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + '\n' for row in evaluation.last)
            print(f'{len(evaluation.last)} responses written to {args.output}')


def reward_of(args: Any, strategy: Any, tokenizer: Any) -> Any:
    """The reward function, or the reward model, which may read other tokens than the policy."""
    from chatgpt.experience.scorers import RewardModelScorer
    from chatgpt.launch.inputs import reward_model_inputs
    from chatgpt.nn import RewardModel

    if args.reward_fn is not None:
        function = load_function(args.reward_fn)
        check_reward_function(function, args.reward_fn)
        return function
    remote = args.trust_remote_code
    own, context = reward_model_inputs(args.reward_model, tokenizer, trust_remote_code=remote)
    model = strategy.prepare(RewardModel.from_pretrained(args.reward_model, trust_remote_code=remote))
    return model if own is None else RewardModelScorer(model, tokenizer=own, max_length=context)
