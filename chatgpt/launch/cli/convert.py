"""Convert a data file from whatever known shape it has to another one.

chatgpt-rlhf convert alpaca.json messages.jsonl --to messages
chatgpt-rlhf convert Anthropic/hh-rlhf pairs.jsonl --to preference --split test --max_examples 1000
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from chatgpt.data.convert import OUTPUT_SUFFIXES, TARGETS, to_records, write_records
from chatgpt.data.reading import BadRecords
from chatgpt.launch.arguments import Parser


def convert(examples: list[Any], shape: str, bad: BadRecords) -> Iterator[dict[str, Any]]:
    for example in examples:
        try:
            yield from to_records(example, shape)
        except ValueError as reason:
            bad.report(example.where, str(reason))


def parser() -> Parser:
    out = Parser(description=__doc__)
    out.add_argument('source', help='file, folder or hub name to read')
    out.add_argument('target', help=f'file to write, by its ending: {", ".join(OUTPUT_SUFFIXES)}')
    out.add_argument(
        '--to', required=True, choices=TARGETS, metavar='SHAPE', help=f'shape to write: {", ".join(TARGETS)}'
    )
    out.add_argument(
        '--columns',
        nargs='*',
        default=[],
        metavar='KNOWN=NAME',
        help='columns with other names than the shape expects, such as prompt=question',
    )
    out.add_argument('--split', default='train', help='of a hub data set, or of a folder with files of this name')
    out.add_argument('--subset', help='config of a hub data set')
    out.add_argument('--max_examples', type=int, help='number of records to convert (default: all)')
    out.add_argument(
        '--text_separator', default='\n\n', help='separator of the texts in a .txt file (default: blank lines)'
    )
    out.add_argument(
        '--skip_bad_records',
        action='store_true',
        help='skip and count records that cannot be read or converted, instead of stopping',
    )
    out.add_argument('--overwrite', action='store_true', help='replace an existing target')
    return out


def main(argv: list[str] | None = None) -> None:
    args = parser().parse_args(argv)
    from chatgpt.data.loading import load_examples

    bad = BadRecords(args.skip_bad_records)
    for pair in args.columns:
        if '=' not in pair:
            raise ValueError(f'--columns {pair}: give known_name=name_in_the_file, for example prompt=question_text')
    if args.max_examples is not None and args.max_examples < 1:
        raise ValueError(f'--max_examples {args.max_examples} must be at least 1')
    examples = load_examples(
        args.source,
        columns=dict(pair.split('=', 1) for pair in args.columns),
        bad=bad,
        split=args.split,
        subset=args.subset,
        max_examples=args.max_examples,
        streaming=args.max_examples is not None,
        text_separator=args.text_separator,
    )
    count = write_records(convert(examples, args.to, bad), args.target, overwrite=args.overwrite)
    print(f'{args.target}: {count} records written, {bad.num_skipped} skipped')
    for reason in bad.reasons:
        print(f'  skipped: {reason}')
