"""Let people compare pairs of answers in a browser and turn their judgements into preferences.

    chatgpt-rlhf compare --model outputs/sft/actor --model outputs/ppo/actor --prompts prompts.jsonl --db judged.sqlite
    chatgpt-rlhf compare --db judged.sqlite
    chatgpt-rlhf compare --db judged.sqlite --export preferences.jsonl

The first command generates the answers and serves the page until Ctrl-C; the second serves the pairs of the file again;
the third writes preferences that `reward-model` and `dpo` train on. Both answers of a pair are sampled with the same
settings; the generation_config of the models is not used. --answers takes existing answers instead: two files as
`generate --output` writes them, or one with prompt, response1 and response2.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chatgpt.launch.arguments import Parser, add_strategy, strategy_of, world_size_from_env
from chatgpt.launch.cli import generate
from chatgpt.monitor.compare.app import compare_app
from chatgpt.monitor.compare.serving import add_server, need_server, serve
from chatgpt.monitor.compare.statistics import lines, summarize
from chatgpt.monitor.compare.store import Store
from chatgpt.monitor.run_folder.record import write_text_atomically

SETTINGS = ('max_new_tokens', 'max_length', 'min_new_tokens', 'temperature', 'top_k', 'top_p', 'greedy', 'stop_string')


def parser() -> Parser:
    out = Parser(description=__doc__, usage='%(prog)s --model MODEL [--model MODEL] --prompts FILE --db FILE.sqlite')
    titles = ('the file', 'what is compared', 'responses', 'the run and the page')
    db, inputs, responses, run = map(out.add_argument_group, titles)
    db.add_argument(
        '--db', required=True, metavar='FILE', help='SQLite file of the judgements; created if it does not exist'
    )
    db.add_argument('--export', metavar='FILE', help='write the judgements as preferences to this jsonl file and stop')
    inputs.add_argument(
        '--model',
        action='append',
        default=[],
        help='hub name or folder; given twice: compare two models; once: two samples of one model',
    )
    inputs.add_argument(
        '--prompts', metavar='FILE', help='file of prompts: csv, json, jsonl, parquet, or .txt with one per line'
    )
    generate.add_prompt_column(inputs)
    inputs.add_argument(
        '--answers',
        action='append',
        default=[],
        metavar='FILE',
        help='file of answers that exist already, instead of --model and --prompts',
    )
    generate.add_template(inputs, 'prompts in text are turns of the user')
    generate.add_trust(inputs)
    inputs.add_argument(
        '--reward_model', help='folder of a reward model; the pairs it is least sure about are shown first'
    )
    inputs.add_argument(
        '--annotators_per_pair', type=int, metavar='K', help='number of people who judge each pair (default: 1)'
    )
    generate.add_sampling(responses)
    add_strategy(run)
    add_server(run)
    return out


def main() -> None:
    args = parser().parse_args()
    if args.export:
        return export(args)
    need_server(args.host, args.port)
    with prepared(args) as store:
        serve(compare_app(store), host=args.host, port=args.port)
        print('\n'.join(['', *lines(summarize(store)), f'kept in {args.db}; export it with --export FILE.jsonl']))


def export(args: Any) -> None:
    """Writes the preferences of --db."""
    if Path(args.export).exists() and Path(args.db).exists() and Path(args.export).samefile(args.db):
        raise ValueError(f'--export {args.export} is the file of --db, which holds the judgements: give another')
    with Store(args.db, create=False) as store:
        rows, num_left = store.preferences()
        if not rows:
            raise ValueError(f'{args.db} has no pair on which people prefer one answer: {num_left} were judged')
        text = ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in rows)
        try:
            if Path(args.export).is_symlink() or (Path(args.export).exists() and not Path(args.export).is_file()):
                Path(args.export).write_text(text, encoding='utf-8')  # such as /dev/stdout, which stays what it is
            else:
                write_text_atomically(Path(args.export), text)
        except OSError as error:
            raise ValueError(f'cannot write --export {args.export}: {error.strerror}') from None
        note = [f'{args.export}: {len(rows)} preferences; {num_left} judged pairs without a majority or an answer left']
        print('\n'.join([*note, *lines(summarize(store))]))


def prepared(args: Any) -> Store:
    """Returns the store of --db with all its responses; generates missing ones.

    Raises:
        ValueError: for flags that exclude each other, or a --db with other settings; names the difference.
    """
    if world_size_from_env() > 1:
        raise ValueError('compare is one process: start it with python, not with a launcher')
    from chatgpt.data.reading import BadRecordError, without_remedy

    _check(args)
    try:
        records, settings, made = _read(args)
    except BadRecordError as error:
        raise without_remedy(error) from None
    store = Store(args.db)
    try:
        if settings and not store.has_answers:
            store.begin(records, list(map(_shown, records)), **settings)
        elif settings:
            _check_same(args.db, store.settings, settings)
        if args.annotators_per_pair:
            store.update_settings(annotators_per_pair=args.annotators_per_pair)
        for number, side in enumerate('ab'):
            if not store.num_pairs or store.answers(side) is None:
                if not (made or args.model):
                    raise ValueError(f'{args.db} lacks answers: give --model and --prompts again, as before')
                store.set_answers(side, made[number] if made else _generate(args, number, store.records()))
        if args.reward_model and args.reward_model != store.settings.get('reward_model'):
            store.set_margins(margins(args, store))
            store.update_settings(reward_model=args.reward_model)
        if not store.num_asked:
            raise ValueError(f'the answers in {args.db} are equal for every prompt: compare others, in another --db')
    except BaseException:
        store.close()
        raise
    return store


def _check(args: Any) -> None:
    if len(args.model) > 2 or len(args.answers) > 2:
        raise ValueError('two answers are compared: give --model, or --answers, once or twice')
    if args.answers and (args.model or args.prompts):
        raise ValueError('--answers has prompts and answers: leave --model and --prompts out')
    if args.prompt_column and not args.prompts:
        raise ValueError(f'--prompt_column {args.prompt_column} is of the file of --prompts: give one, or leave it out')
    if bool(args.model) != bool(args.prompts):
        raise ValueError('--model and --prompts belong together: give both or neither')
    if args.annotators_per_pair is not None and args.annotators_per_pair < 1:
        raise ValueError(f'--annotators_per_pair {args.annotators_per_pair} must be at least 1')
    if not Path(args.db).exists() and not (args.model or args.answers):
        raise ValueError(f'there is no {args.db} yet: give --model and --prompts, or --answers, to make it')
    if len(args.model) == 1 and args.greedy:
        raise ValueError('--greedy gives one and the same answer twice: give a second --model, or leave it out')
    generate.check_sampling(args)
    for model in args.model if args.apply_chat_template else ():  # raises ValueError for one without a template
        generate.tokenizer_of(argparse.Namespace(**vars(args) | {'pretrain': model, 'tokenizer': None}))
    vars(args).update(generate.flags_or_defaults(args))  # the same for both models


def _read(args: Any) -> tuple[list[dict[str, Any]], dict[str, Any], list[list[str]]]:
    """Returns prompts as records, the settings that a store cannot change, and existing responses."""
    made: list[list[str]] = []
    if args.answers:
        records, made = read_answers(args.answers, args.apply_chat_template)
        names = args.answers if len(args.answers) == 2 else ['response1', 'response2']
        bound: dict[str, Any] = {'answers': _digest(list(zip(*made, strict=True)))}
    elif args.model:
        records = read_prompts(args.prompts, args.apply_chat_template, args.prompt_column)
        names = args.model if len(args.model) == 2 else ['the first sample', 'the second sample']
        bound = {'models': args.model} | {name: getattr(args, name) for name in SETTINGS}
    else:
        return [], {}, []
    names = list(names) if names[0] != names[1] else [f'{names[0]} (1)', f'{names[1]} (2)']
    return records, {'names': names, 'prompts': _digest(records), 'seed': args.seed, **bound}, made


def _digest(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return f'{len(value)} with sha256 {hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]}'


def _check_same(db: str, there: dict[str, Any], given: dict[str, Any]) -> None:
    for name in sorted((given.keys() | {'models', 'answers'} & there.keys()) - {'names'}):
        if there.get(name) != given.get(name):
            raise ValueError(
                f'{db} was made with {name} {there.get(name)}, and now it is {given.get(name)}: give another --db, or '
                '--db alone to go on with what is there'
            )


def read_prompts(path: str, apply_chat_template: bool | None = None, column: str | None = None) -> list[dict[str, Any]]:
    """Returns the prompts of a file as records for `chatgpt.data`. Raises ValueError with file and line."""
    from chatgpt.data.examples import BadRecord, as_kind
    from chatgpt.data.prompts import prompt_example
    from chatgpt.data.reading import read_records, suffix_of
    from chatgpt.data.shapes import to_example

    def read(row: Any) -> Any:
        if name:
            return prompt_example(row, name).prompt
        try:
            return as_kind(to_example(row.data, row.where), 'prompt').prompt
        except BadRecord:  # columns beside the prompt may be of any kind
            return prompt_example(row, 'prompt').prompt

    plain = suffix_of(path) == '.txt'
    if plain and not Path(path).is_file():
        raise ValueError(f'--prompts {path}: there is no such file')
    if plain and column:
        raise ValueError(f'--prompt_column {column} is of a file of prompts with columns, and {path!r} is none')
    name = 'text' if plain else column
    records = []
    for row in read_records(path, text_separator='\n'):
        try:
            records.append(_record(read(row), apply_chat_template))
        except BadRecord as reason:
            raise ValueError(f'{row.where}: {reason}') from None
    return records


def read_answers(
    paths: Sequence[str], apply_chat_template: bool | None = None
) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Returns prompts as records, and the responses of both sides. Raises ValueError if the prompts differ."""
    from chatgpt.data.examples import BadRecord
    from chatgpt.data.reading import read_records
    from chatgpt.data.shapes import prompt_of

    columns = ('response1', 'response2') if len(paths) == 1 else ('response',)
    prompts: list[list[dict[str, Any]]] = []
    made: list[list[str]] = []
    for path in paths:
        rows, records = list(read_records(path)), []
        for row in rows:
            if missing := [name for name in columns if not isinstance(row.data.get(name), str)]:
                raise ValueError(f'{row.where}: {missing[0]} is missing, or no text')
            try:
                records.append(_record(prompt_of(row.data)[0], apply_chat_template))
            except BadRecord as reason:
                raise ValueError(f'{row.where}: {reason}') from None
        prompts.append(records)
        made += [[row.data[name] for row in rows] for name in columns]
    if prompts[0] != prompts[-1]:
        raise ValueError(f'{" and ".join(paths)} have different prompts, or in another order')
    return prompts[0], made


def _record(prompt: Any, apply_chat_template: bool | None) -> dict[str, Any]:
    """Returns a prompt as a record; with `apply_chat_template` text becomes a turn of the user."""
    from chatgpt.data.examples import Instruction
    from chatgpt.data.formats import prompt_turns

    if isinstance(prompt, Instruction):
        return {'instruction': prompt.instruction, 'input': prompt.input}
    if isinstance(prompt, str) and not apply_chat_template:
        return {'prompt': prompt}
    return {'prompt': [turn._asdict() for turn in prompt_turns(prompt)]}


def _shown(record: dict[str, Any]) -> str:
    """Returns the text of a prompt, as the page shows it."""
    prompt = record.get('prompt', record.get('instruction', ''))
    if isinstance(prompt, str):
        return '\n\n'.join(filter(None, [prompt, record.get('input', '')]))
    if len(prompt) == 1:
        return prompt[0]['content']
    return '\n\n'.join(f'{turn["role"]}: {turn["content"]}' for turn in prompt)


def _generate(args: Any, side: int, records: list[dict[str, Any]]) -> list[str]:
    """Generates the responses of a side; the second side samples with --seed + 1."""
    from chatgpt.data import load_prompts
    from chatgpt.launch.inputs import quiet_transformers

    quiet_transformers()
    model = args.model[min(side, len(args.model) - 1)]
    print(f'{model} answers {len(records)} prompts', flush=True)
    of_model = {'pretrain': model, 'tokenizer': None, 'model': 'auto', 'weights': None, 'best_of': 1}
    options = argparse.Namespace(**vars(args) | of_model)
    options.seed, options.reward_model = args.seed + side, None
    tokenizer = generate.tokenizer_of(options)
    prompts = load_prompts(records, tokenizer)
    keywords = {'do_sample': False} if args.greedy else {name: getattr(args, name) for name in generate.SAMPLING}
    with strategy_of(args) as strategy:
        actor = strategy.prepare(generate.load_actor(options, strategy))
        sampling, stops = generate.sampling_of(args, strategy.unwrap(actor), tokenizer, prompts, keywords)
        with strategy.full_model(actor) as policy:
            rows = generate.answer(options, strategy, policy, tokenizer, prompts, sampling, stops)
            return [row['response'] for row in rows]


def margins(args: Any, store: Store) -> list[float | None]:
    """Returns s_a − s_b of each pair by --reward_model, tokenized as in its training; None for an empty response."""
    from chatgpt.data import load_preferences
    from chatgpt.launch.inputs import quiet_transformers
    from chatgpt.nn import RewardModel
    from chatgpt.nn.layouts import longest_side
    from chatgpt.nn.loading import load_config, load_tokenizer
    from chatgpt.trainer.experience.scorers import RewardModelScorer
    from chatgpt.types import Sequence as Tokens

    quiet_transformers()
    remote = args.trust_remote_code
    answers = [store.answers(side) or [] for side in 'ab']
    tokenizer = load_tokenizer(args.reward_model, trust_remote_code=remote)
    limit = longest_side(load_config(args.reward_model, trust_remote_code=remote))
    pairs = list(zip(store.records(), *answers, strict=True))
    readable = [all(text.strip() for text in pair[1:]) for pair in pairs]
    rows = [record | {'chosen': a, 'rejected': b} for (record, a, b), ok in zip(pairs, readable, strict=True) if ok]
    with strategy_of(args) as strategy:
        model = strategy.prepare(RewardModel.from_pretrained(args.reward_model, trust_remote_code=remote))
        found, _ = load_preferences(rows, tokenizer, max_length=limit) if rows else ([], [])
        tokens: list[Any] = [
            Tokens(prompt_ids=pair.prompt_ids, response_ids=ids, response_mask=mask)
            for pair in found
            for ids, mask in zip(pair.responses, pair.response_masks, strict=True)
        ]
        scores = [float(s) for s in RewardModelScorer(model, max_tokens_per_batch=8192).score(tokens, strategy)]
    differences = iter([a - b for a, b in zip(scores[::2], scores[1::2], strict=True)])
    return [next(differences) if ok else None for ok in readable]
