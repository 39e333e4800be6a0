"""Names and arguments that transformers 5, peft and torch dropped are available only while a program runs."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from chatgpt.testing.fakes import char_tokenizer, tiny_config
from chatgpt_compat import dropped
from chatgpt_compat.runner import run


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny causal LM with its tokenizer."""
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp('model')
    GPT2LMHeadModel(tiny_config('gpt2')).save_pretrained(out)
    char_tokenizer().save_pretrained(out)
    return out


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Returns a function that runs a program's text and returns exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def runs(text: str) -> tuple[int, str, str]:
        (tmp_path / 'script.py').write_text(text)
        code = run('script.py', [])
        return (code, *capsys.readouterr())

    return runs


def test_every_row_resolves_and_is_missing_in_the_newest_packages():
    for name, row in dropped.NAMES.items():
        assert row.get() is not None, name
    for name in dropped.ARGUMENTS:
        assert callable(dropped._resolve(name)), name


def test_names_are_available_only_while_a_program_runs(program, folder):
    code, out, err = program(
        f"""
from transformers import AdamW, AutoTokenizer, BloomTokenizerFast
import peft.utils.config
from peft import prepare_model_for_int8_training
from peft.utils.config import TaskType
from transformers.modeling_utils import no_init_weights
from transformers.models.bloom.tokenization_bloom_fast import BloomTokenizerFast as Same
from transformers.models.gpt2.tokenization_gpt2_fast import GPT2TokenizerFast
import torch
tokenizer = BloomTokenizerFast.from_pretrained({str(folder)!r})
print(tokenizer('ab')['input_ids'] == AutoTokenizer.from_pretrained({str(folder)!r})('ab')['input_ids'])
print(TaskType.CAUSAL_LM, issubclass(AdamW, torch.optim.AdamW))
"""
    )
    assert code == 0, err
    assert out.split() == ['True', 'TaskType.CAUSAL_LM', 'True']
    said = err[err.index('dropped names that it used') :]
    assert 'transformers.BloomTokenizerFast' in said and 'transformers.PreTrainedTokenizerFast' in said
    assert 'peft.prepare_model_for_int8_training' in said and 'transformers 5' in said
    assert not hasattr(transformers, 'BloomTokenizerFast') and not hasattr(transformers, 'AdamW')
    assert hasattr(transformers, 'GPT2LMHeadModel')
    assert 'peft.utils.config' not in sys.modules
    with pytest.raises(ImportError):
        importlib.import_module('peft.utils.config')
    assert not hasattr(transformers.PreTrainedTokenizerBase, 'encode_plus')


def test_a_program_without_dropped_names_gets_no_report(program):
    code, _, err = program('import transformers\nassert not hasattr(transformers, "NeverThere")\n')
    assert code == 0 and 'dropped names' not in err


def test_an_unknown_name_is_an_import_error(program):
    code, _, err = program('from transformers import NoSuchTokenizerFast\n')
    assert code == 1 and 'NoSuchTokenizerFast' in err


def test_return_all_scores_gives_every_label_in_the_order_of_labels(program, tmp_path):
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(GPT2Config(**{**tiny_config('gpt2').to_dict(), 'num_labels': 3}))
    model.config.pad_token_id = 0
    with torch.no_grad():
        model.score.weight.mul_(100)
    model.save_pretrained(tmp_path / 'classifier')
    char_tokenizer().save_pretrained(tmp_path / 'classifier')
    code, out, err = program(
        """
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline
pipe = pipeline('sentiment-analysis', model='classifier', device=-1)
model = AutoModelForSequenceClassification.from_pretrained('classifier').eval()
tokenizer = AutoTokenizer.from_pretrained('classifier')
for text in ('abc', 'good', 'xyz zz', 'a', 'hello world'):
    want = model(**tokenizer(text, return_tensors='pt')).logits[0].tolist()
    (got,) = pipe([text], return_all_scores=True, function_to_apply='none', batch_size=16)
    assert [row['label'] for row in got] == ['LABEL_0', 'LABEL_1', 'LABEL_2'], got
    assert max(abs(row['score'] - x) for row, x in zip(got, want)) < 1e-4, (got, want)
    (one,) = pipe(text, return_all_scores=True)
    assert len(one) == 3
    assert set(pipe(text)[0]) == {'label', 'score'}
"""
    )
    assert code == 0, err
    assert 'return_all_scores=' in err


def test_encode_plus_and_ids_of_a_chat_template(program, folder):
    code, _, err = program(
        f"""
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained({str(folder)!r})
assert tokenizer.encode_plus('ab')['input_ids'] == tokenizer('ab')['input_ids']
assert tokenizer.batch_encode_plus(['ab', 'c'])['input_ids'] == tokenizer(['ab', 'c'])['input_ids']
tokenizer.chat_template = "{{% for m in messages %}}{{{{ m['content'] }}}}{{% endfor %}}"
chat = [{{'role': 'user', 'content': 'ab'}}]
assert tokenizer.apply_chat_template(chat, tokenize=False) == 'ab'
assert tokenizer.apply_chat_template(chat) == tokenizer('ab')['input_ids'], tokenizer.apply_chat_template(chat)
assert set(tokenizer.apply_chat_template(chat, return_dict=True)) >= {{'input_ids'}}
"""
    )
    assert code == 0, err
    assert 'encode_plus' in err and 'apply_chat_template' in err


def test_arguments_of_loading_and_training(program, folder):
    code, _, err = program(
        f"""
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
name = {str(folder)!r}
model = AutoModelForCausalLM.from_pretrained(name, load_in_8bit=True, device_map={{'': 0}}, use_auth_token=True)
tokenizer = AutoTokenizer.from_pretrained({str(folder)!r}, use_auth_token=True)
arguments = TrainingArguments('out', evaluation_strategy='steps', optim='adamw_hf', max_steps=1, report_to='none',
    eval_steps=1, overwrite_output_dir=True, per_device_train_batch_size=2, remove_unused_columns=False)
assert arguments.eval_strategy == arguments.evaluation_strategy == 'steps'
assert arguments.overwrite_output_dir and arguments.logging_dir is None and not arguments.group_by_length
rows = Dataset.from_dict({{'input_ids': [[3, 4], [5, 6]]}})
calls = []
class Mine(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        calls.append(return_outputs)
        out = model(input_ids=inputs['input_ids'], labels=inputs['input_ids'])
        return (out.loss, out) if return_outputs else out.loss
def collate(rows):
    return {{'input_ids': torch.tensor([row['input_ids'] for row in rows])}}
trainer = Mine(model=model, args=arguments, train_dataset=rows, eval_dataset=rows, tokenizer=tokenizer,
    data_collator=collate)
trainer.train()
assert calls
"""
    )
    assert code == 0, err
    for said in ('evaluation_strategy=', 'load_in_8bit=', 'Trainer(tokenizer=)', 'compute_loss', 'adamw_hf'):
        assert said in err, said


def test_adamw_of_transformers_has_its_defaults(program):
    code, out, err = program(
        """
import torch
from transformers import AdamW
given = AdamW([torch.nn.Parameter(torch.ones(1))], lr=1e-4, correct_bias=True, no_deprecation_warning=True)
print(*(given.defaults[name] for name in ('lr', 'betas', 'eps', 'weight_decay')))
try:
    AdamW([torch.nn.Parameter(torch.ones(1))], correct_bias=False)
except ValueError as error:
    print(error)
"""
    )
    assert code == 0, err
    assert out == (
        '0.0001 (0.9, 0.999) 1e-06 0.0\n'
        'AdamW: correct_bias=False cannot be honoured: torch.optim.AdamW corrects; leave it out\n'
    )


def test_dropped_flags_of_a_command_line(program):
    code, out, err = program(
        """
from dataclasses import dataclass
from transformers import HfArgumentParser, TrainingArguments
@dataclass
class Mine:
    past_index: int = 3
flags = '--output_dir o --overwrite_output_dir --evaluation_strategy epoch --warmup_ratio 0.1 --logging_dir l'
flags += ' --save_safetensors False --past_index 4'
training, mine = HfArgumentParser((TrainingArguments, Mine)).parse_args_into_dataclasses(flags.split())
print(training.overwrite_output_dir, training.eval_strategy, training.warmup_steps, training.warmup_ratio)
print(training.logging_dir, training.save_safetensors, training.fp16_backend, mine.past_index)
"""
    )
    assert code == 0, err
    assert out == 'True IntervalStrategy.EPOCH 0.1 0.1\nl False auto 4\n'
    assert 'overwrite_output_dir' in err and 'evaluation_strategy' in err
    assert not hasattr(transformers.TrainingArguments, 'overwrite_output_dir')


def test_a_tool_of_a_folder(program, tmp_path):
    (tmp_path / 'tool').mkdir()
    (tmp_path / 'tool' / 'tool_config.json').write_text('{"tool_class": "add.Adder"}')
    (tmp_path / 'tool' / 'add.py').write_text(
        'from transformers import Tool\nclass Adder(Tool):\n    name = "add"\n'
        '    def __call__(self, x): return x + "!"\n'
    )
    code, out, err = program("from transformers import load_tool\nprint(load_tool('tool')('a'))\n")
    assert (code, out) == (0, 'a!\n'), err
    code, _, err = program("from transformers import load_tool\nload_tool('someone/tool')\n")
    assert code == 1 and 'download the tool first' in err


@pytest.mark.skipif(torch.cuda.is_available(), reason='is about machines without a GPU')
def test_bf16_of_training_arguments_without_a_gpu(program):
    code, _, err = program(
        'from transformers import TrainingArguments\n'
        "assert TrainingArguments('out', bf16=True, report_to='none').use_cpu\n"
    )
    assert code == 0, err
    assert not transformers.TrainingArguments('out', report_to='none').use_cpu


def test_arguments_of_scripts_up_to_0_8(program):
    code, out, err = program(
        """
from trl.commands.cli_utils import DpoScriptArguments, SFTScriptArguments, TrlParser
from transformers import TrainingArguments
args, _ = TrlParser((DpoScriptArguments, TrainingArguments)).parse_args_and_config(['--output_dir=o', '--beta=0.2'])
print(args.beta, args.max_length, args.max_target_length, args.sanity_check, args.generate_during_eval)
print(SFTScriptArguments().max_seq_length)
"""
    )
    assert (code, out) == (0, '0.2 512 128 False False\n512\n'), err


def test_arguments_of_scripts_of_0_9_to_0_11(program):
    """There the trainer's config has what the arguments of the script had before."""
    code, out, err = program(
        """
from trl import DPOConfig, ModelConfig, SFTConfig
from trl.commands.cli_utils import DPOScriptArguments, SFTScriptArguments, TrlParser
for script, config in ((SFTScriptArguments, SFTConfig), (DPOScriptArguments, DPOConfig)):
    given = ['--output_dir=o', '--max_length=77', '--dataset_name=d']
    args, training, _ = TrlParser((script, config, ModelConfig)).parse_args_and_config(given)
    print(args.dataset_name, training.max_length, hasattr(args, 'max_length'))
"""
    )
    assert (code, out) == (0, 'd 77 False\nd 77 False\n'), err


def test_data_sets_of_a_mixture(program, tmp_path):
    for name in ('a', 'b'):
        (tmp_path / f'{name}.jsonl').write_text(f'{{"text": "{name}", "other": 1}}\n')
    code, out, err = program(
        """
from trl import DatasetMixtureConfig, get_dataset
parts = [{'path': 'json', 'data_files': f'{name}.jsonl', 'columns': ['text']} for name in 'ab']
print(get_dataset(DatasetMixtureConfig(parts))['train'].to_list())
try:
    get_dataset(DatasetMixtureConfig())
except ValueError as error:
    print(error)
"""
    )
    assert code == 0, err
    assert out.splitlines()[-2:] == [
        "[{'text': 'a'}, {'text': 'b'}]",
        'get_dataset: the mixture has no data sets; give datasets in the config file',
    ]
