"""Generate responses to a file of prompts and score them with a reward.

    chatgpt-rlhf evaluate outputs/run/actor prompts.jsonl --reward_fn rewards.py:score
    chatgpt-rlhf evaluate outputs/run/actor prompts.jsonl --reward_model outputs/rm/reward_model --output scored.jsonl
    chatgpt-rlhf evaluate outputs/run/actor --environment games:countdown --episodes 200

Takes the likeliest tokens, or samples with --temperature; the model's generation_config is not used, so that scores of
different models are comparable. Prints a table of samples and a line of numbers as JSON: score_mean, score_std,
length_mean (in tokens) and ended (the share of responses that ended before the limit). In an environment the tasks are
those that no training uses, the score is the sum of its rewards, or that of --reward_fn or --reward_model instead, and
num_turns_mean, failed_share and success_share are printed too.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any, cast

from chatgpt.launch.arguments import Parser, add_settings, add_strategy, load_function, strategy_of
from chatgpt.launch.cli.generate import (
    add_model,
    add_prompt_column,
    add_template,
    default_new_tokens,
    load_actor,
    output_file,
    read_prompts,
    reward_model_of,
    take_words,
    to_our_flags,
    tokenizer_of,
)
from chatgpt.launch.config_values import number
from chatgpt.rules import Rule, check


def parser() -> Parser:
    from chatgpt.launch.runs import EpisodeSettings

    out = Parser(description=__doc__, usage='%(prog)s MODEL [PROMPTS] --reward_fn FILE:FUNCTION [--name value ...]')
    out.add_argument(
        'words', nargs='*', metavar='MODEL', help='hub name or folder of the model, then the file of prompts'
    )
    titles = ('the model', 'the reward', 'the environment', 'responses', 'the run')
    model, reward, environment, responses, run = map(out.add_argument_group, titles)
    add_model(model)
    reward.add_argument(
        '--reward_fn',
        help='reward function: module:function or file.py:function, called as fn(prompts, responses, **columns)',
    )
    reward.add_argument('--reward_model', metavar='FOLDER', help='folder of a reward model')
    taken = ('environment', 'environment_options', 'max_turns', 'max_turn_tokens', 'step_timeout_s')
    add_settings(environment, EpisodeSettings, only=taken)
    environment.add_argument('--episodes', type=int, help='number of episodes, each one task (default: 100)')
    responses.add_argument('--input', help='file of prompts, instead of the second word')
    add_prompt_column(responses)
    add_template(responses, 'prompts and observations in text are turns of the user')
    responses.add_argument(
        '--max_new_tokens',
        type=int,
        help='maximum number of tokens of a response (default: 128, with --environment 256; less where the context is '
        'shorter)',
    )
    responses.add_argument(
        '--temperature',
        type=number,
        help='sample at this temperature, from all tokens (default: take the likeliest token)',
    )
    responses.add_argument(
        '--stop_string', action='append', help='text that ends a response; may be given several times'
    )
    run.add_argument('--num_rows', type=int, default=4, help='number of samples to print (default: 4)')
    run.add_argument('--output', help='jsonl file for prompts, responses and scores, replaced if there is one')
    add_strategy(run)
    return out


def _is_set(args: Any, name: str) -> bool:
    from chatgpt.launch.runs import EpisodeSettings

    return bool(getattr(args, name) != getattr(EpisodeSettings, name, None))


RULES = [
    Rule(lambda s: not s.environment and s.input is None, 'give a file of prompts, or --environment NAME'),
    Rule(
        lambda s: not s.environment and bool(s.reward_fn) == bool(s.reward_model),
        'give --reward_fn FILE:FUNCTION or --reward_model FOLDER, which scores the responses',
    ),
    *(
        Rule(
            lambda s, name=name: not s.environment and _is_set(s, name),  # type: ignore[misc]
            f'--{name} is about an environment, and there is none: give --environment',
        )
        for name in ('environment_options', 'episodes', 'max_turn_tokens', 'max_turns', 'step_timeout_s')
    ),
    Rule(
        lambda s: s.prompt_column is not None and s.input is None,
        '--prompt_column {s.prompt_column} is of a file of prompts: give one, or leave it out',
    ),
    Rule(lambda s: s.num_rows < 0, '--num_rows {s.num_rows} must not be negative'),
    Rule(
        lambda s: s.reward_fn and s.reward_model,
        'give --reward_fn or --reward_model, not both; without either the environment scores',
    ),
    Rule(
        lambda s: s.input is not None and s.episodes is not None,
        '--episodes are of tasks without prompts: with a file of prompts there is one of each',
    ),
    *(
        Rule(
            lambda s, name=name: s.environment and getattr(s, name) != 1,  # type: ignore[misc]
            f'--environment does not go with --{name}: leave one of them out',
        )
        for name in ('tensor_parallel', 'sequence_parallel')
    ),
    Rule(lambda s: s.episodes is not None and s.episodes < 1, '--episodes {s.episodes} must be at least 1'),
    Rule(
        lambda s: s.max_new_tokens is not None and s.max_new_tokens < 1,
        '--max_new_tokens {s.max_new_tokens} must be at least 1',
    ),
    Rule(lambda s: s.temperature == 0, '--temperature 0 is what holds without it: leave it out'),
]


@dataclass
class Model:
    """The part of a trainer that `PromptEvaluation` uses."""

    strategy: Any
    tokenizer: Any
    actor: Any
    phase: int = 0
    run_dir: None = None

    def models(self) -> dict[str, Any]:
        return {'actor': self.actor}


def main() -> None:
    out = parser()
    args = take_words(out, out.parse_args(to_our_flags(sys.argv[1:], out)), 'input')
    check(args, RULES)
    from chatgpt.data.prompts import tasks_without_prompts
    from chatgpt.environments import EnvironmentSettings, find_environment
    from chatgpt.environments.transcript import choose_text_for
    from chatgpt.launch.inputs import longest_opening, quiet_transformers
    from chatgpt.nn.loading import load_config
    from chatgpt.rollout.episodes import check_writes_turns
    from chatgpt.trainer.callbacks.base import TrainerView
    from chatgpt.trainer.experience.environment_scorer import EnvironmentScorer
    from chatgpt.trainer.experience.scorers import as_scorer, check_columns
    from chatgpt.trainer.prompt_evaluation import PromptEvaluation

    quiet_transformers()
    tokenizer = tokenizer_of(args)
    environment, settings, opening = None, None, 0
    if args.environment is not None:
        environment = find_environment(args.environment, args.environment_options)
        choose_text_for(environment, tokenizer)
    if args.input is not None:
        prompts = read_prompts(args.input, tokenizer, args.prompt_column, data=True)
    else:
        prompts = tasks_without_prompts(args.episodes or 100)
    if args.environment is not None:
        check_writes_turns(load_config(args.pretrain, trust_remote_code=args.trust_remote_code))
        settings = EnvironmentSettings(
            max_turns=args.max_turns,
            max_turn_tokens=args.max_turn_tokens,
            step_timeout_s=args.step_timeout_s,
            apply_chat_template=args.apply_chat_template,
        )
        opening = longest_opening(environment, settings, tokenizer, prompts, args.seed)
    function = load_function(args.reward_fn) if args.reward_fn is not None else None
    check_columns(as_scorer(function), prompts)
    if args.environment is not None and (args.reward_fn or args.reward_model):
        print(f"scored by {args.reward_fn or args.reward_model} in place of the environment's rewards", file=sys.stderr)
    with output_file(args) as output, strategy_of(args) as strategy:
        actor = strategy.prepare(load_actor(args, strategy))
        most = args.max_new_tokens or default_new_tokens(strategy.unwrap(actor).config, prompts, opening)
        reward = function or EnvironmentScorer()
        if args.reward_model is not None:  # its tokenizer may differ from the policy's
            longest = max([opening, *(len(prompts[i].ids) for i in range(len(prompts or ())))])
            reward = reward_model_of(args, strategy, tokenizer, longest, most)
        sampling = {} if args.temperature is None else {'do_sample': True, 'temperature': args.temperature}
        evaluation = PromptEvaluation(
            prompts,
            tokenizer,
            reward,
            num_rows=args.num_rows,
            seed=args.seed,
            environment=environment,
            environment_settings=settings,
            max_new_tokens=most,
            stop_strings=args.stop_string,
            **sampling,
        )
        numbers = evaluation(cast(TrainerView, Model(strategy, tokenizer, actor)))
    if strategy.is_rank_0:
        print(json.dumps({name: round(value, 6) for name, value in numbers.items()}))
        if output is not None:
            rows = evaluation.last
            if environment is None:  # conversations as they were given, as `generate` writes them
                shown = [{'prompt': p.messages} if p.messages else {} for p in prompts]
                rows = [
                    {k: v for k, v in {**r, **s}.items() if k != 'last_turn'} for r, s in zip(rows, shown, strict=True)
                ]
            with open(args.output, 'w') as file:
                file.writelines(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)
            print(f'{len(evaluation.last)} responses written to {args.output}')
