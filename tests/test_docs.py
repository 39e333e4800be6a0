"""What the pages say is so: the README's code runs, its paths exist, and docs/metrics.md names every metric."""

from __future__ import annotations

import ast
import json
import math
import re
import warnings
from pathlib import Path
from typing import get_args

import pytest

from chatgpt.types import EpisodeEnd

ROOT = Path(__file__).resolve().parents[1]

TRL_KEYS = """
objective/kl objective/kl_dist objective/logprobs objective/ref_logprobs objective/kl_coef objective/entropy
ppo/mean_non_score_reward ppo/mean_scores ppo/std_scores ppo/learning_rate ppo/loss/policy ppo/loss/value ppo/loss/total
ppo/policy/entropy ppo/policy/approxkl ppo/policy/policykl ppo/policy/clipfrac ppo/policy/advantages
ppo/policy/advantages_mean ppo/policy/ratio ppo/returns/mean ppo/returns/var ppo/val/vpred
ppo/val/error ppo/val/clipfrac ppo/val/mean ppo/val/var
ppo/val/var_explained tokens/queries_len_mean tokens/queries_len_std tokens/queries_dist tokens/responses_len_mean
tokens/responses_len_std tokens/responses_dist time/ppo/forward_pass time/ppo/compute_rewards
time/ppo/compute_advantages time/ppo/optimize_step time/ppo/calc_stats time/ppo/total
""".split()


RECORDS = {
    'losses.py': ('ppo',),
    'sft.py': ('sft',),
    'reward_model.py': ('rm',),
    'ilql.py': ('ilql',),
    'kto.py': ('kto',),
    'pairs.py': ('dpo', 'orpo', 'simpo'),
}
"""The files with losses, and before which word the metrics of each stand."""


INTERNAL = {'log_ratio'}
"""what a loss computes on the way and no trainer logs"""


def documented() -> set[str]:
    """Every `phase/quantity` in backticks on the page."""
    return set(re.findall(r'`([a-z_]+(?:/[a-z_0-9]+)+)`', (ROOT / 'docs' / 'metrics.md').read_text()))


def names_in_code() -> set[str]:
    """Every metric that the trainers write as a literal, and what their losses record by name."""
    names = set()
    for path in (ROOT / 'chatgpt' / 'trainer').rglob('*.py'):
        text = path.read_text()
        names |= set(re.findall(r"'((?:rollout|environment|ppo|sft|perf|rft)/[a-z_0-9]+)'", text))
        if "f'environment/end_{end}_share'" in text:
            names |= {f'environment/end_{end}_share' for end in get_args(EpisodeEnd)}
        for prefix in RECORDS.get(path.name, ()):
            names |= {f'{prefix}/{n}' for n in recorded(text) | set(re.findall(r"\{prefix\}/([a-z_]+)'", text))}
    return names | {
        f'rm/val_{n}' for n in recorded((ROOT / 'chatgpt' / 'trainer' / 'objectives' / 'reward_model.py').read_text())
    }


def recorded(source: str) -> set[str]:
    """The names under which a file gives a `Mean`, `Highest` or `Lowest`, and those that an objective's `derived`
    adds."""
    names: set[str] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            names |= {
                k.value
                for k, v in zip(node.keys, node.values, strict=True)
                if isinstance(k, ast.Constant) and is_metric(v)
            }
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript) and is_metric(node.value):
            names.add(ast.literal_eval(node.targets[0].slice))
        elif isinstance(node, ast.DictComp) and is_metric(node.value):  # over the items of a dict of the same function
            names |= looped_names(tree, ast.unparse(node.generators[0].iter))
        elif isinstance(node, ast.FunctionDef) and node.name == 'derived':
            returned = [r.value for r in ast.walk(node) if isinstance(r, ast.Return)]
            names |= {
                k.value for r in returned if isinstance(r, ast.Dict) for k in r.keys if isinstance(k, ast.Constant)
            }
    return names - INTERNAL


def is_metric(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ('Mean', 'Highest', 'Lowest')


def looped_names(tree: ast.AST, iterated: str) -> set[str]:
    """The keys of the dict literal that `name.items()` runs over."""
    found = [
        n for n in ast.walk(tree) if isinstance(n, ast.Assign) and f'{ast.unparse(n.targets[0])}.items()' == iterated
    ]
    assert found, f'{iterated}: where do its names come from?'
    return {ast.literal_eval(key) for node in found for key in node.value.keys}  # type: ignore[attr-defined]


def test_every_metric_has_its_formula():
    names = names_in_code()
    assert {
        'ppo/policy_loss',
        'ppo/ratio_min',
        'rollout/kl_mean',
        'perf/total_s',
        'sft/loss',
        'environment/success_share',
        'environment/end_timeout_share',
    } <= names  # the search finds them
    assert {
        'rm/accuracy',
        'rm/val_loss',
        'dpo/logp_chosen',
        'orpo/margin',
        'simpo/loss',
        'kto/kl',
        'kto/margin',
        'ilql/td_loss',
    } <= names
    assert not names - documented()


def test_the_page_names_no_metric_of_a_loss_that_the_code_does_not_record():
    prefixes = {p for found in RECORDS.values() for p in found} - {'ppo', 'sft'} | {'environment'}
    of_losses = {n for n in documented() if n.split('/')[0] in prefixes}
    every = ('grad_norm', 'grad_norm_max', 'lr', 'epoch')
    names = names_in_code()
    invented = {n for n in of_losses if n.replace('/val_', '/') not in names and n.split('/')[1] not in every}
    assert len(of_losses) > 30
    assert not invented


def test_all_forty_keys_of_trl_are_mapped():
    assert len(TRL_KEYS) == 40
    assert not set(TRL_KEYS) - documented()


def test_a_run_of_the_readme_works_as_printed_and_logs_only_what_is_documented(tmp_path, monkeypatch):
    """The quickstart, with a folder of a tiny model in place of the hub's name."""
    from chatgpt.testing import byte_tokenizer, tiny_causal_lm

    tiny_causal_lm('gpt2', vocab_size=259, pad_token_id=256, bos_token_id=257, eos_token_id=258).save_pretrained(
        tmp_path / 'model'
    )
    byte_tokenizer().save_pretrained(tmp_path / 'model')
    (block,) = re.findall(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.DOTALL)
    assert block.count("'gpt2'") == 3
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)  # a ratio that is not 1, for one
        exec(compile(block.replace("'gpt2'", "'model'"), 'README.md', 'exec'), {'__name__': 'readme'})
    lines = [json.loads(line) for line in Path('outputs/quickstart/metrics.jsonl').read_text().splitlines()]
    assert [line.pop('step') for line in lines] == [1, 2]
    for line in lines:
        assert not set(line) - documented()
        assert all(value is not None and math.isfinite(value) for value in line.values())
    from transformers import AutoModelForCausalLM

    assert AutoModelForCausalLM.from_pretrained('outputs/quickstart/actor').config.vocab_size == 259


@pytest.mark.parametrize(
    'page', ['README.md', 'CONTRIBUTING.md', *sorted(str(p.relative_to(ROOT)) for p in (ROOT / 'docs').rglob('*.md'))]
)
def test_links_of_a_page_lead_to_files(page):
    text = (ROOT / page).read_text()
    links = re.findall(r'\]\((?!https?:|#)([^)#]+)', text)
    missing = [link for link in links if not ((ROOT / page).parent / link).exists()]
    assert not missing


def test_every_path_in_the_tree_of_the_readme_exists():
    tree = (ROOT / 'README.md').read_text().split('## Where things are')[1].split('Where to start')[0]
    folder: list[str] = []
    seen = 0
    for indent, name in re.findall(r'^( {4,8}(?: {2})*)([\w.]+/?)(?: {2}|$)', tree, re.MULTILINE):
        depth = (len(indent) - 4) // 2
        path = ROOT.joinpath(*folder[:depth], name)
        assert path.exists(), f'{path} is in the README and not in the tree'
        folder[depth:] = [name]
        seen += 1
    assert seen >= 15
    assert (ROOT / 'chatgpt').is_dir()
