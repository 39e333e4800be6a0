"""Generate text with a trained model: for one prompt, for a file of prompts, or in a chat in the terminal.

    chatgpt-rlhf generate outputs/run/actor "Once upon a time"
    chatgpt-rlhf generate outputs/run/actor prompts.jsonl --output answers.jsonl
    chatgpt-rlhf chat outputs/run/actor

In a chat, Ctrl-C stops an answer, /new starts a new chat and Ctrl-D ends the command. Chats and conversations in a file
use the tokenizer's chat template. A prompt in plain text is used as in training: as a turn of the user, or as it is;
--apply_chat_template and --no_apply_chat_template override this. A chat with a model that has no template, or was
trained on plain text, continues the text so far.

Temperature, top_k and top_p come from the model's generation_config.json, otherwise they are 0.7, 0 and 0.95; flags
override both, and the values in use are printed.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from chatgpt.launch.arguments import Parser, add_settings, add_strategy, strategy_of
from chatgpt.launch.config_values import number, whole_number
from chatgpt.names import ours

BATCH = 64


def parser(*, chats: bool | None = False) -> Parser:
    """Returns the parser. `chats`: True: takes no prompts; False: needs prompts; None: without prompts it is a chat."""
    out = Parser(description=__doc__, usage='%(prog)s MODEL [--name value ...]')
    if chats is False:
        out.usage = '%(prog)s MODEL PROMPT_OR_FILE [--name value ...]'
    out.add_argument(
        'words', nargs='*', metavar='MODEL', help='hub name or folder of the model, then the prompt or file'
    )
    model, prompts, responses, run = map(out.add_argument_group, ('the model', 'the prompts', 'responses', 'the run'))
    add_model(model)
    if not chats:
        prompts.add_argument(
            '--input', help='a prompt, or a file of prompts (csv, json, jsonl, parquet, or .txt with one per line)'
        )
        add_prompt_column(prompts)
        run.add_argument('--output', help='jsonl file for prompts and responses, replaced if there is one')
    add_template(prompts, 'prompts in text are turns of the user')
    add_sampling(responses, "the model's generation_config, else {}")
    if not chats:
        responses.add_argument(
            '--best_of',
            type=int,
            default=1,
            help='sample this many responses and keep the best by --reward_model (default: 1)',
        )
        responses.add_argument('--reward_model', help='folder of the reward model that --best_of uses')
    add_strategy(run)
    return out


def add_prompt_column(group: Any) -> None:
    group.add_argument('--prompt_column', metavar='NAME', help='column of prompts in a file (default: prompt)')


def add_template(group: Any, text: str) -> None:
    """Adds --apply_chat_template and --no_apply_chat_template."""
    group.add_argument(
        '--apply_chat_template',
        action='store_true',
        default=None,
        help=f"{text}, in the tokenizer's chat template (default: as the model was trained)",
    )
    group.add_argument(
        '--no_apply_chat_template',
        dest='apply_chat_template',
        action='store_false',
        help='use plain text as it is, without a chat template',
    )


SAMPLING = {'temperature': 0.7, 'top_k': 0, 'top_p': 0.95}
"""sampling parameters without flags and without a generation_config of the model"""


def add_sampling(group: Any, default: str = '{}') -> None:
    """Adds the flags of `sampling_of`. `default`: text of the default, {} becomes the value in `SAMPLING`."""
    shown = {name: f'(default: {default.format(value)})' for name, value in SAMPLING.items()}
    group.add_argument(
        '--max_new_tokens',
        type=int,
        help='maximum number of tokens of a response (default: 128, or what the context leaves)',
    )
    group.add_argument('--max_length', type=int, help='maximum number of tokens of prompt and response together')
    group.add_argument(
        '--min_new_tokens', type=int, default=0, help='minimum number of tokens of a response (default: 0)'
    )
    group.add_argument(
        '--temperature',
        type=number,
        help=f'below 1: likelier tokens are sampled more often; above 1: less often {shown["temperature"]}',
    )
    group.add_argument(
        '--top_k', type=whole_number, help=f'sample only from this many likeliest tokens; 0: from all {shown["top_k"]}'
    )
    group.add_argument(
        '--top_p',
        type=number,
        help=f'sample only from the likeliest tokens whose probabilities add up to this {shown["top_p"]}',
    )
    group.add_argument('--greedy', action='store_true', help='take the likeliest token each time instead of sampling')
    group.add_argument('--stop_string', action='append', help='text that ends a response; may be given several times')


def add_trust(group: Any) -> None:
    """Adds --trust_remote_code, without a value, since a word may follow."""
    group.add_argument(
        '--trust_remote_code',
        action='store_true',
        help='run Python code that comes with a model of the hub; only for models that you trust',
    )


def add_model(group: Any) -> None:
    """Adds the flags of `load_actor`."""
    from chatgpt.launch.runs import ModelSettings

    group.add_argument('--pretrain', help='the model, instead of the first word')
    group.add_argument(
        '--weights',
        help='file or folder of strategy.save_model, or folder of a PEFT adapter, to load on top of the model',
    )
    add_settings(group, ModelSettings, only=('tokenizer', 'model'))
    group.add_argument('--beta', type=number, help='weight of Q - V in models of ilql (default: 1)')
    add_trust(group)


def take_words(out: Parser, args: Any, second: str | None) -> Any:
    """Sets --pretrain and then `second` from the plain words."""
    for name in ('pretrain', second):
        if name is None or not args.words:
            continue
        if getattr(args, name) is None:
            setattr(args, name, args.words.pop(0))
    if args.words:
        out.error(f'{args.words[0]!r} is one word too many')
    if args.pretrain is None:
        out.error('give a model: its hub name or folder')
    return args


def to_our_flags(argv: Sequence[str], out: Parser) -> list[str]:
    """Replaces other programs' and earlier names of flags, with a warning: one has another meaning in training."""
    known = [name.lstrip('-') for action in out._actions for name in action.option_strings]
    words = []
    for word in argv:
        name, equals, value = word.removeprefix('--').partition('=')
        if word.startswith('--') and ours(name, known) != name:
            if os.environ.get('RANK', '0') == '0':
                print(f'warning: --{name} is called --{ours(name, known)} here', file=sys.stderr, flush=True)
            word = f'--{ours(name, known)}{equals}{value}'
        words.append(word)
    return words


def main(chats: bool | None = False) -> None:
    out = parser(chats=chats)
    args = take_words(out, out.parse_args(to_our_flags(sys.argv[1:], out)), None if chats else 'input')
    for name in ('input', 'output', 'reward_model') if chats else ():
        setattr(args, name, None)
    if chats:
        args.best_of = 1
    if chats is False and args.input is None:
        out.error('give a prompt, or a file of prompts; the command chat needs none')
    if args.input is not None and not args.input.strip():
        out.error('the prompt is empty: give some text; for a dialogue there is the command chat')
    from chatgpt.launch.inputs import quiet_transformers

    if (args.best_of > 1) != bool(args.reward_model):
        raise ValueError('--best_of above 1 and --reward_model belong together: give both or neither')
    if args.best_of > 1 and args.greedy:
        raise ValueError('--best_of draws several responses, and --greedy gives the same one each time: give one')
    if args.output and not args.input:
        raise ValueError('--output needs --input: a chat is not written down')
    check_sampling(args)
    quiet_transformers()
    tokenizer = tokenizer_of(args)
    prompts = read_prompts(args.input, tokenizer, args.prompt_column) if args.input else None
    with output_file(args) as output, strategy_of(args) as strategy:
        if prompts is None and strategy.processes.world_size > 1:
            raise ValueError('a chat is one process: start it with python, or give --input')
        actor = strategy.prepare(load_actor(args, strategy))
        bare = strategy.unwrap(actor)
        chosen, note = sampling_settings(args, bare)
        if strategy.is_rank_0:
            print(note, file=sys.stderr, flush=True)
        sampling, stops = sampling_of(args, bare, tokenizer, prompts, chosen)
        with strategy.full_model(actor) as policy:
            if prompts is None:
                chat(policy, tokenizer, sampling, stops, args)
            else:
                write(answer(args, strategy, policy, tokenizer, prompts, sampling, stops), output, strategy.is_rank_0)


chat_parser, chat_main = partial(parser, chats=True), partial(main, chats=True)


def check_sampling(args: Any) -> None:
    """Raises ValueError for invalid flags of `add_sampling`, before anything is loaded."""
    from chatgpt.rollout import SamplingParams

    if args.temperature == 0:
        raise ValueError('--temperature 0 is --greedy: give that instead')
    for name in SAMPLING if args.greedy else ():
        if getattr(args, name) is not None:
            raise ValueError(f'--greedy takes the likeliest token, so --{name} changes nothing: give one of them')
    SamplingParams(
        max_new_tokens=sys.maxsize if args.max_new_tokens is None else args.max_new_tokens,
        max_length=args.max_length,
        min_new_tokens=args.min_new_tokens,
        **flags_or_defaults(args),
    )


def flags_or_defaults(args: Any) -> dict[str, Any]:
    """Returns `SAMPLING`, updated with the given flags."""
    return {name: value if getattr(args, name) is None else getattr(args, name) for name, value in SAMPLING.items()}


def sampling_settings(args: Any, actor: Any) -> tuple[dict[str, Any], str]:
    """Returns the sampling parameters, from flags, the model's generation_config or `SAMPLING` in this order,
    and a line that shows them."""
    stored = getattr(getattr(actor, 'model', None), 'generation_config', None)
    own = stored.to_diff_dict() if stored is not None else {}  # values that differ from the defaults of transformers
    own = {name: own[name] for name in (*SAMPLING, 'do_sample') if own.get(name) is not None}
    given = {name: getattr(args, name) for name in SAMPLING if getattr(args, name) is not None}
    greedy = args.greedy or own.get('do_sample') is False and not given and args.best_of == 1
    if greedy:
        source = '--greedy' if args.greedy else "the model's generation_config"
        return {'do_sample': False}, f'responses are the likeliest tokens ({source})'
    base = {'temperature': 1.0, 'top_k': 0, 'top_p': 1.0} | own if any(name in own for name in SAMPLING) else SAMPLING
    chosen = {name: base[name] for name in SAMPLING} | given
    shown = ', '.join(f'{name} {chosen[name]:g}' for name in SAMPLING if name != 'top_k' or chosen[name])
    sources = ['flags'] if given else []
    if len(given) < len(SAMPLING):
        sources.append('defaults of this command' if base is SAMPLING else "the model's generation_config")
    return chosen, f'responses are sampled with {shown} ({", ".join(sources)})'


def sampling_of(args: Any, actor: Any, tokenizer: Any, prompts: Any, chosen: dict[str, Any]) -> Any:
    """Returns the sampling parameters and stop strings of the flags; `prompts` is None in a chat."""
    from chatgpt.rollout.sampling import sampling_for

    most = args.max_new_tokens
    if most is None and not args.max_length:
        most = default_new_tokens(actor.config, prompts)
    keywords = {
        'max_new_tokens': most,
        'max_length': args.max_length,
        'min_new_tokens': args.min_new_tokens,
        **chosen,
        'stop_strings': args.stop_string,
    }
    return sampling_for(actor, tokenizer, keywords)


def default_new_tokens(config: Any, prompts: Any, opening: int = 0) -> int:
    """Returns the default of max_new_tokens: 128, in an environment 256, or less if the longest prompt (in a chat half
    of the context) leaves less of the context.

    Args:
        opening: tokens before the first turn in an environment; 0 without one.
    """
    from chatgpt.launch.runs import EPISODE_TOKENS
    from chatgpt.nn.layouts import longest_side, remaining_positions

    most, limit = EPISODE_TOKENS if opening else 128, longest_side(config)
    if limit is None:
        return most
    longest = (limit + 1) // 2 if prompts is None else max([opening, *(len(p.ids) for p in prompts)])
    return max(1, min(most, remaining_positions(config, longest) or 0))


def tokenizer_of(args: Any) -> Any:
    """Returns the tokenizer of the flags, with --apply_chat_template noted."""
    from chatgpt.data.formats import choose_text, note_model
    from chatgpt.nn.loading import load_config, load_tokenizer

    tokenizer = load_tokenizer(args.tokenizer or args.pretrain, trust_remote_code=args.trust_remote_code)
    if args.tokenizer:
        note_model(tokenizer, load_config(args.pretrain, trust_remote_code=args.trust_remote_code))
    choose_text(tokenizer, args.apply_chat_template)
    return tokenizer


def load_actor(args: Any, strategy: Any) -> Any:
    """Returns the model of the flags; one with Q heads draws as ILQL decodes, with --beta."""
    from chatgpt.launch.inputs import check_writes
    from chatgpt.nn import ILQLModel
    from chatgpt.nn.kinds import MODELS
    from chatgpt.nn.loading import load_config
    from chatgpt.nn.peft_format import CONFIG_FILE, import_peft
    from chatgpt.nn.tensor_files import Q_HEADS_FILE, stored_file

    check_writes(load_config(args.pretrain, trust_remote_code=args.trust_remote_code), args.pretrain)
    beta = getattr(args, 'beta', None)
    actor: Any
    if stored_file(args.pretrain, Q_HEADS_FILE) is not None:
        actor = ILQLModel.from_pretrained(args.pretrain, trust_remote_code=args.trust_remote_code)
        actor.decoding_beta = 1.0 if beta is None else beta or None  # 0: the policy alone
    elif beta is not None:
        raise ValueError(f'--beta is of a model that ilql trained, and {args.pretrain} has no Q heads: leave it out')
    else:
        kind: Any = MODELS.find(args.model).actor
        actor = kind(pretrained=args.pretrain, trust_remote_code=args.trust_remote_code)
    if args.weights and Path(args.weights, CONFIG_FILE).is_file():
        import_peft(actor, args.weights)
    elif args.weights:
        strategy.load_model(actor, args.weights)
    return actor


def read_prompts(source: str, tokenizer: Any, column: str | None, *, data: bool = False) -> Any:
    """Returns the prompts of a file, or `source` itself as the only prompt; with `data` it names data in any case."""
    from chatgpt.data import load_prompts
    from chatgpt.data.reading import SUFFIXES, BadRecordError, suffix_of, without_remedy

    is_file = data or suffix_of(source) in SUFFIXES or os.path.isfile(source)
    if column and (not is_file or suffix_of(source) == '.txt'):
        raise ValueError(f'--prompt_column {column} is of a file of prompts with columns, and {source!r} is none')
    try:
        return load_prompts(source if is_file else [{'prompt': source}], tokenizer, column=column or 'prompt')
    except BadRecordError as error:
        raise without_remedy(error, has_column=True) from None


def answer(args: Any, strategy: Any, policy: Any, tokenizer: Any, prompts: Any, sampling: Any, stops: Any) -> Any:
    """Yields rows of prompt and response, batch by batch. Each rank generates its share; all ranks yield all rows."""
    from chatgpt.rollout import BestOfN
    from chatgpt.rollout.registry import engine_for
    from chatgpt.rollout.stop import write_texts

    scorer = None
    if args.reward_model:
        longest = max(len(prompt.ids) for prompt in prompts)
        scorer = reward_model_of(args, strategy, tokenizer, longest, sampling.room(longest))

    def score(samples: list[Any]) -> list[float]:
        return [0.0] * len(samples) if scorer is None else [float(s) for s in scorer.score(samples, strategy)]

    decode = partial(write_texts, tokenizer=tokenizer, stop_strings=stops)
    engine = engine_for(policy)
    engine.begin(policy)
    best = BestOfN(engine, score, sample_size=args.best_of)
    for start in range(0, len(prompts), BATCH):
        size = min(BATCH, len(prompts) - start)
        share = -(-size // strategy.world_size)
        mine = range(start + min(strategy.rank * share, size), start + min((strategy.rank + 1) * share, size))
        found = best(
            [prompts[i] for i in mine], sampling, seed=args.seed, first_index=mine.start * args.best_of, decode=decode
        )
        rows = []
        for i, (first,) in zip(mine, found, strict=True):
            prompt = prompts[i].messages or prompts[i].text or first.sample.prompt_text
            row = {'prompt': prompt, 'response': first.sample.response_text}
            rows.append(row | ({'score': first.score} if scorer is not None else {}))
        for part in strategy.all_gather_object(rows):
            yield from part
    engine.end()


def reward_model_of(args: Any, strategy: Any, tokenizer: Any, prompt_tokens: int, new_tokens: int) -> Any:
    """Returns the scorer of --reward_model; it scores texts if its tokenizer differs from the policy's. With one
    tokenizer, raises ValueError if prompts and responses of so many tokens do not fit in its context."""
    from chatgpt.data.formats import is_for_encoder_decoder
    from chatgpt.launch.beside import reward_model_inputs
    from chatgpt.nn import RewardModel
    from chatgpt.trainer.experience.scorers import RewardModelScorer

    remote = args.trust_remote_code
    own, context = reward_model_inputs(args.reward_model, tokenizer, trust_remote_code=remote)
    whole = max(prompt_tokens, new_tokens) if is_for_encoder_decoder(tokenizer) else prompt_tokens + new_tokens
    if own is None and context is not None and whole > context:
        raise ValueError(
            f'the reward model {args.reward_model} reads {context} tokens, and prompts of up to {prompt_tokens} with '
            f'responses of up to {new_tokens} do not fit: give shorter prompts, or a smaller --max_new_tokens'
        )
    model = strategy.prepare(RewardModel.from_pretrained(args.reward_model, trust_remote_code=remote))
    return RewardModelScorer(model, tokenizer=own, max_length=context)


def output_file(args: Any) -> Any:
    """Opens the file of --output before anything is generated; None without --output, and on ranks other than 0."""
    if not args.output or os.environ.get('RANK', '0') != '0':
        return nullcontext()
    path = Path(args.output)
    if path.exists() and os.path.exists(args.input or '') and path.samefile(args.input):
        raise ValueError(f'--output {path} is the file of --input: give another')
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, 'a')  # what is there is replaced when there is something to write
    except OSError as error:
        raise ValueError(f'cannot write --output {path}: {error.strerror}') from None


def write(rows: Any, output: Any, is_rank_0: bool) -> None:
    count = 0
    for row in rows:
        if output is not None and not count and os.path.isfile(output.name):  # no device or pipe
            output.truncate(0)
        count += 1
        if output is not None:
            output.write(json.dumps(row, ensure_ascii=False) + '\n')
            output.flush()
        elif is_rank_0:
            score = f'  [{row["score"]:+z.3f}]' if 'score' in row else ''
            prompt = row['prompt'] if isinstance(row['prompt'], str) else row['prompt'][-1]['content']
            print(f'> {prompt}{score}\n{row["response"]}\n', flush=True)
    if output is not None:
        print(f'{count} responses written to {output.name}')


# ---------------------------------------------------------------------- chat in the terminal


def chat(policy: Any, tokenizer: Any, sampling: Any, stops: Any, args: Any) -> None:
    """Runs a chat. With a chat template the prompt is the conversation in that template; without one, or if the model
    was trained on plain text, it is the text so far."""
    from chatgpt.data.formats import check_template, shown_format, text_choice

    templated = bool(tokenizer.chat_template) and text_choice(tokenizer) is not False
    turns, text, number = list[dict[str, str]](), '', 0
    if templated:
        check_template(tokenizer)
        print(f'conversations read {shown_format(tokenizer)}', flush=True)
    elif tokenizer.chat_template:
        print('what you write is given to the model as it is, without its chat template', flush=True)
    print(f'chatting with {args.pretrain}; Ctrl-C ends an answer, /new begins anew, Ctrl-D ends', flush=True)
    while True:
        try:
            message = input('> ')
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            continue
        if message.strip() == '/new':
            turns, text = [], ''
            continue
        if not message.strip():
            continue
        turns.append({'role': 'user', 'content': message})
        text = (
            tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            if templated
            else text + message
        )
        reply = stream_reply(policy, tokenizer, text, sampling, stops, args.seed, number, templated=templated)
        number += 1
        turns.append({'role': 'assistant', 'content': reply})
        text += reply


def stream_reply(
    policy: Any, tokenizer: Any, text: str, sampling: Any, stops: Any, seed: int, index: int, *, templated: bool
) -> str:
    """Prints a response token by token and returns its text, up to its end or Ctrl-C."""
    import torch

    from chatgpt.data.tokenize import cut_left, prompt_ids
    from chatgpt.nn.layouts import remaining_positions
    from chatgpt.rollout import stream_tokens

    ids = prompt_ids(text, tokenizer, templated=templated) or [tokenizer.bos_token_id]
    limits = (
        remaining_positions(policy.config, sampling.max_new_tokens or 1),
        sampling.max_length and sampling.max_length - 1,
    )
    if found := [limit for limit in limits if limit is not None]:
        num_positions = max(min(found), 1)
        ids = cut_left(ids, num_positions, tokenizer) if len(ids) > num_positions else ids  # drops the oldest tokens
    tokens: list[int] = []
    shown = whole = ''
    try:
        for token in stream_tokens(policy, torch.tensor(ids), sampling, seed=seed, index=index):
            tokens.append(token)
            whole = tokenizer.decode(tokens, skip_special_tokens=True)
            sure = whole if stops is None else stops.settled(whole, stops.start(tokens))
            # An incomplete character, or the start of a stop string, is not printed yet.
            if not whole.endswith('\ufffd') and len(sure) > len(shown):
                sys.stdout.write(sure[len(shown) :])
                sys.stdout.flush()
                shown = sure
    except KeyboardInterrupt:
        pass
    reply = whole if stops is None else stops.text_of(tokens)
    print(reply[len(shown) :], flush=True)
    return reply
