"""Arguments of TRL 0.12 to 1.12: each has its effect, or is named in an error or a warning."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_hub import WRITE, serving, use
from transformers import AutoTokenizer, DataCollatorWithPadding, HfArgumentParser

from chatgpt.launch import demo_world
from chatgpt.nn import GPTActor
from chatgpt.testing.fakes import tiny_causal_lm
from chatgpt_compat.peft import lora_arguments
from chatgpt_compat.trl import arguments, pairs, ppo_train, scripts, sft
from chatgpt_compat.trl.arguments import check_given
from chatgpt_compat.trl.config import UNSUPPORTED, PPOConfig
from chatgpt_compat.trl.offline import plan_of
from chatgpt_compat.trl.scripts import ModelConfig, ScriptArguments, TrlParser, get_peft_config, get_quantization_config

TABLES = {
    'PPOConfig': (PPOConfig, UNSUPPORTED['second']),
    'DPOConfig': (pairs.DPOConfig, pairs.DPOTrainer.UNSUPPORTED),
    'SFTConfig': (sft.SFTConfig, sft.SFTTrainer.UNSUPPORTED),
    'RewardConfig': (pairs.RewardConfig, pairs.RewardTrainer.UNSUPPORTED),
}
ODD = 'something else'
"""a value that is not the default of any argument"""


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small policy with its tokenizer."""
    path = tmp_path_factory.mktemp('model')
    torch.manual_seed(0)
    GPTActor(config=demo_world.demo_config()).save_pretrained(path, tokenizer=demo_world.demo_tokenizer())
    return path


@pytest.mark.parametrize('name', TABLES)
def test_unsupported_arguments_are_named(name):
    config_class, table = TABLES[name]
    fields = {f.name for f in dataclasses.fields(config_class)}
    kinds = set()
    for argument in sorted(fields & set(table)):
        config = config_class()
        setattr(config, argument, ODD)
        kinds.add(table[argument].kind)
        if table[argument].kind == 'refused':
            with pytest.raises(ValueError, match=f'{name}: {argument}='):
                check_given(config, table)
        else:
            with pytest.warns(UserWarning, match=f'{name}: {argument}='):
                check_given(config, table)
    assert {'warned', 'refused'} <= kinds


def test_an_argument_given_at_its_default_is_given():
    with pytest.warns(UserWarning, match='DPOConfig: ddp_timeout=1800 has no effect here'):
        check_given(pairs.DPOConfig('out', ddp_timeout=1800), pairs.DPOTrainer.UNSUPPORTED)
    (parsed,) = HfArgumentParser(pairs.DPOConfig).parse_args_into_dataclasses(['--output_dir', 'out'])
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        check_given(parsed, pairs.DPOTrainer.UNSUPPORTED)  # a command-line parser passes every field
        check_given(
            pairs.DPOConfig(f_divergence_type='reverse_kl', sync_ref_model=False, eval_delay=0),
            pairs.DPOTrainer.UNSUPPORTED,
        )


@pytest.mark.parametrize('name', TABLES)
def test_a_command_line_is_read_into_each_config(name, tmp_path):
    parser = HfArgumentParser((ScriptArguments, TABLES[name][0], ModelConfig))
    script, config, model = parser.parse_args_into_dataclasses(
        ['--dataset_name', 'd', '--output_dir', str(tmp_path), '--learning_rate', '0.5', '--lora_r', '3', '--bf16']
    )
    assert (script.dataset_name, config.learning_rate, config.bf16, model.lora_r) == ('d', 0.5, True, 3)


@pytest.mark.parametrize(
    ('given', 'text'),
    [
        ({'optim': 'adafactor'}, "optim='adafactor' is not served here"),
        ({'lr_scheduler_type': 'polynomial'}, "lr_scheduler_type='polynomial'"),
        ({'save_strategy': 'best'}, "save_strategy='best'"),
        ({'bf16': True, 'fp16': True}, 'bf16=True and fp16=True'),
    ],
)
def test_unsupported_values(given, text):
    with pytest.raises(ValueError, match=text):
        arguments.check_choices(pairs.DPOConfig(**given))


def test_warnings_point_at_the_line_of_the_script(folder, tmp_path):
    args = sft.SFTConfig(
        output_dir=str(tmp_path), report_to='neptune', optim='adamw_8bit', model_init_kwargs={'dtype': 'bfloat16'}
    )
    with pytest.warns(UserWarning, match='report_to') as told:
        sft.SFTTrainer(str(folder), args, train_dataset=[{'text': 'one day a cat'}] * 2)
    assert [w.filename for w in told] == [__file__] * 3


def test_the_losses_are_the_same_list_everywhere(folder):
    with pytest.raises(ValueError, match="loss_type='apo_zero' is not served here; use one of sigmoid, hinge, robust$"):
        pairs.DPOTrainer(str(folder), args=pairs.DPOConfig(loss_type='apo_zero'), train_dataset=PAIRS)
    for name in ('use_weighting', 'loss_weights', 'ld_alpha'):
        assert 'sigmoid, hinge, robust' in pairs.DPOTrainer.UNSUPPORTED[name].note


def test_an_unknown_argument_names_the_nearest():
    with pytest.raises(ValueError, match='DPOConfig.betta=.*beta'):
        pairs.DPOConfig(betta=0.1)


def test_schedules_and_weight_decay():
    args = sft.SFTConfig(lr_scheduler_type='cosine', warmup_ratio=0.15)
    assert arguments.schedule(args, 10) == {'lr_schedule': 'cosine', 'warmup_steps': 2}
    args = sft.SFTConfig(lr_scheduler_type='constant_with_warmup', warmup_steps=3)
    assert arguments.schedule(args, 10) == {'lr_schedule': 'constant', 'warmup_steps': 3}
    assert (arguments.every(None, 10, 100), arguments.every(0.05, 10, 100), arguments.every(7, 10, 100)) == (10, 5, 7)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    made = arguments.make_optimizer(sft.SFTConfig(weight_decay=0.1, optim='sgd'), None, model)
    assert [(len(g['params']), g['weight_decay']) for g in made.param_groups] == [(1, 0.1), (3, 0.0)]


def test_steps_of_a_run_over_a_list():
    args = pairs.DPOConfig(
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=1.5,
        logging_steps=4,
        eval_strategy='epoch',
        save_steps=6,
    )
    plan = plan_of(args, num_records=21, world_size=1)  # 6 batches of 4 in an epoch
    assert (plan.batch_size, plan.per_epoch, plan.total) == (4, 6, 9)
    assert (plan.log_every, plan.eval_every, plan.save_every, plan.log_interval) == (4, 6, 6, 2)


@pytest.mark.parametrize(
    ('given', 'sizes'),
    [
        ({'per_device_train_batch_size': 4, 'gradient_accumulation_steps': 3, 'num_mini_batches': 2}, (24, 12, 5)),
        ({'batch_size': 6, 'mini_batch_size': 3, 'output_dir': 'x'}, (12, 6, 9)),
        ({'per_device_train_batch_size': 2, 'num_train_epochs': 2.0, 'total_episodes': None}, (4, 4, 10)),
    ],
)
def test_batch_sizes_of_ppo(given, sizes):
    config = PPOConfig(**{'total_episodes': 100} | given)
    config.resolve('second')
    assert tuple(ppo_train.sizes_of(config, num_prompts=20, world_size=2)) == sizes


def test_which_token_ends_a_response():
    words = SimpleNamespace(eos_token_id=7)
    assert ppo_train.stop_id_of(PPOConfig(output_dir='x'), words) is None
    assert ppo_train.stop_id_of(PPOConfig(stop_token='eos'), words) == 7
    assert ppo_train.stop_id_of(PPOConfig(stop_token_id=0), words) == 0
    for given, text in (
        ({'stop_token': 'eos', 'stop_token_id': 0}, 'give one of them'),
        ({'stop_token': 'end'}, "stop_token='end' is not known"),
    ):
        with pytest.raises(ValueError, match=text):
            ppo_train.stop_id_of(PPOConfig(**given), words)


@pytest.mark.parametrize(
    ('given', 'text'),
    [
        ({'data_collator': lambda rows: rows}, 'data_collator cannot be honoured'),
        ({'optimizers': (None, object())}, 'optimizers cannot be honoured here: policy and value model'),
        ({'reward_model': None}, 'reward_model is needed'),
        ({'ref_model': 'policy'}, 'ref_model is the model itself'),
        ({'config': PPOConfig(output_dir='y')}, 'args and config are two names'),
        ({'args': PPOConfig(output_dir='x', kl_estimator='k2')}, "kl_estimator='k2'"),
        ({'args': PPOConfig(output_dir='x', missing_eos_penalty=-1.0)}, 'missing_eos_penalty=-1.0 must be positive'),
        ({'reward_model': torch.nn.Linear(1, 1)}, 'reward_model is a Linear'),
        ({'args': PPOConfig(output_dir='x', response_length=99)}, "passes the policy's context of 64"),
    ],
)
def test_unsupported_calls_of_ppo(folder, tmp_path, given, text):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    call: dict[str, Any] = {
        'args': PPOConfig(output_dir=str(tmp_path), per_device_train_batch_size=2, total_episodes=2),
        'processing_class': AutoTokenizer.from_pretrained(folder),
        'model': model,
        'reward_model': lambda prompts, responses: [0.0 for _ in prompts],
        'train_dataset': [{'input_ids': [4, 5]}] * 2,
    } | given
    if given.get('ref_model') == 'policy':
        call['ref_model'] = model
    if 'args' in given:
        given['args'].output_dir = str(tmp_path)
    with pytest.raises(ValueError, match=text):
        ppo_train.PPOTrainer(**call)


def test_models_with_a_value_head_are_taken_apart(folder, tmp_path):
    from chatgpt_compat.trl import AutoModelForCausalLMWithValueHead

    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    head = model.v_head.summary.weight.detach().clone()
    with pytest.warns(UserWarning, match='value_model shares weights with the policy'):
        trainer = ppo_train.PPOTrainer(
            args=PPOConfig(
                output_dir=str(tmp_path), per_device_train_batch_size=2, total_episodes=2, response_length=3
            ),
            processing_class=AutoTokenizer.from_pretrained(folder),
            model=model,
            value_model=model,
            reward_model=lambda prompts, responses: [0.0 for _ in prompts],
            train_dataset=[{'input_ids': [4, 5]}] * 2,
            data_collator=DataCollatorWithPadding(AutoTokenizer.from_pretrained(folder)),
        )
    assert trainer.policy_model is model.pretrained_model
    assert torch.equal(trainer.inner.critic.value_head.weight, head)
    own = {id(p) for p in trainer.policy_model.parameters()}
    assert not own & {id(p) for p in trainer.inner.critic.parameters()}


def test_prompts_leave_padding_out_and_keep_columns(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [{'input_ids': [0, 4, 5], 'attention_mask': [0, 1, 1], 'topic': 'cats'}]
    (prompt,) = ppo_train.prompts_of(rows, tokenizer)
    assert prompt.ids.tolist() == [4, 5] and prompt.columns == {'topic': 'cats'}
    assert prompt.text == tokenizer.decode([4, 5])


def test_the_loss_of_dpo():
    def loss(**given: Any) -> dict[str, Any]:
        return pairs.loss_of(pairs.DPOConfig(**given))

    assert loss() == {'loss_type': 'sigmoid'}
    assert loss(label_smoothing=0.2) == {'loss_type': 'cdpo', 'label_smoothing': 0.2}
    assert loss(loss_type=['robust'], label_smoothing=0.2) == {'loss_type': 'robust', 'label_smoothing': 0.2}
    for given in ({'loss_type': 'ipo'}, {'loss_type': 'exo_pair'}, {'loss_type': ['sigmoid', 'sft']}):
        with pytest.raises(ValueError, match='loss_type='):
            loss(**given)


@pytest.mark.parametrize('trainer', [pairs.DPOTrainer, sft.SFTTrainer, pairs.RewardTrainer])
def test_a_collator_is_refused_by_name(trainer):
    with pytest.raises(ValueError, match=f'{trainer.__name__}: data_collator cannot be honoured here'):
        trainer(model='x', train_dataset=[], data_collator=lambda rows: rows)


def test_an_inner_step_that_a_script_overrides_is_named():
    with pytest.warns(UserWarning, match='Mine overrides compute_loss, which nothing calls here'):

        class Mine(sft.SFTTrainer):
            def compute_loss(self, model, inputs, return_outputs=False):
                return 0.0

    with warnings.catch_warnings():
        warnings.simplefilter('error')

        class Fine(sft.SFTTrainer):
            def log(self, logs, *more):
                super().log(logs, *more)


def test_older_arguments_of_a_constructor(folder, tmp_path):
    rows = demo_world.demo_preferences(4)
    with pytest.warns(UserWarning, match='max_prompt_length=8'):
        trainer = pairs.DPOTrainer(
            str(folder),
            args=pairs.DPOConfig(output_dir=str(tmp_path), save_strategy='no'),
            train_dataset=rows,
            beta=0.7,
            max_prompt_length=8,
        )
    assert trainer.inner.config.beta == 0.7
    with pytest.raises(ValueError, match="DPOTrainer has no argument 'betta'"):
        pairs.DPOTrainer(str(folder), train_dataset=rows, betta=0.7)


def test_arguments_of_transformers_own_class(folder, tmp_path):
    transformers = pytest.importorskip('transformers')
    pytest.importorskip('accelerate', reason="transformers' TrainingArguments need accelerate")
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), learning_rate=0.25, max_steps=1, save_strategy='no', use_cpu=True, report_to=[]
    )
    with pytest.warns(UserWarning, match='use_cpu=True'):
        trainer = sft.SFTTrainer(str(folder), args, train_dataset=[{'text': 'one day a cat'}] * 2)
    assert type(trainer.args) is sft.SFTConfig and trainer.args.learning_rate == 0.25
    assert trainer.train().global_step == 1


def test_which_tokens_count_in_sft(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)

    def counted(row: dict[str, Any], **given: Any) -> list[int]:
        (record,) = sft.sequences_of([row], tokenizer, sft.SFTConfig(**given), 16)
        return record.response_ids[record.response_mask].tolist()

    assert counted({'input_ids': [4, 5, 6]}) == [5, 6]
    assert counted({'input_ids': [4, 5, 6, 7], 'labels': [-100, -100, 6, 7]}) == [6, 7]
    assert counted({'input_ids': [4, 5, 6, 7], 'completion_mask': [0, 0, 0, 1]}) == [7]
    cat, went, end = (tokenizer(w)['input_ids'] for w in ('one day a cat', 'went', tokenizer.eos_token))
    pair = {'prompt': 'one day a cat', 'completion': ' went'}
    assert counted(pair) == [*went, *end]
    assert counted(pair, completion_only_loss=False) == [*cat[1:], *went, *end]
    assert counted({'text': 'one day a cat went', 'id': 3}) == [*cat[1:], *went, *end]


def test_kinds_of_formatting_functions(folder):
    tokenizer, row = AutoTokenizer.from_pretrained(folder), {'a': 'a cat', 'b': 'went'}

    def text(formatting_func: Any) -> str:
        (record,) = sft.sequences_of([row], tokenizer, sft.SFTConfig(), 16, formatting_func)
        return tokenizer.decode(torch.cat([record.prompt_ids, record.response_ids]), skip_special_tokens=True)

    assert text(lambda row: f'{row["a"]} {row["b"]}') == text(
        lambda columns: [f'{a} {b}' for a, b in zip(columns['a'], columns['b'], strict=True)]
    )
    with pytest.raises(KeyError, match='missing'):
        text(lambda row: row['missing'])
    with pytest.raises(ValueError, match='it must give a text'):
        text(lambda row: 3)


PAIRS = [{'prompt': 'one day', 'chosen': ' a cat', 'rejected': ' went'}] * 2
ONE_STEP = {'max_steps': 1, 'save_strategy': 'no'}


@pytest.mark.parametrize('trainer', ['DPOTrainer', 'SFTTrainer', 'RewardTrainer'])
def test_options_of_loading_from_a_command_line(trainer, folder, tmp_path):
    """There they are a text in JSON."""
    module = sft if trainer == 'SFTTrainer' else pairs
    config_class = getattr(module, trainer.replace('Trainer', 'Config'))

    def make(options: str) -> Any:
        (args,) = HfArgumentParser(config_class).parse_args_into_dataclasses(
            ['--output_dir', str(tmp_path), '--model_init_kwargs', options]
        )
        rows = [{'text': 'one day a cat'}] * 2 if trainer == 'SFTTrainer' else PAIRS
        return getattr(module, trainer)(str(folder), args=args, train_dataset=rows)

    assert make('{"attn_implementation": "eager"}').model.config._attn_implementation == 'eager'
    with pytest.raises(ValueError, match="model_init_kwargs='{oh}' is not JSON"):
        make('{oh}')
    with pytest.raises(ValueError, match='it must hold names with values'):
        make('[3]')


def test_options_of_loading_beside_a_loaded_model_are_named(folder, tmp_path):
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    options = {'attn_implementation': 'eager'}
    args = {'output_dir': str(tmp_path), 'model_init_kwargs': options, **ONE_STEP}
    load = AutoModelForCausalLM.from_pretrained
    rows = [{'text': 'one day a cat'}] * 2
    with pytest.warns(UserWarning, match='SFTConfig: model_init_kwargs=.* the model is loaded already'):
        sft.SFTTrainer(load(folder), sft.SFTConfig(**args), train_dataset=rows)
    with pytest.warns(UserWarning, match='RewardConfig: model_init_kwargs=') as told:
        pairs.RewardTrainer(
            AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1),
            pairs.RewardConfig(**args),
            train_dataset=PAIRS,
            processing_class=AutoTokenizer.from_pretrained(folder),
        )
    assert [w.filename for w in told] == [__file__]
    args = args | {'model_init_kwargs': None, 'ref_model_init_kwargs': options}
    for reference in (None, load(folder)):
        with pytest.warns(UserWarning, match='DPOConfig: ref_model_init_kwargs=.* a copy or given') as told:
            pairs.DPOTrainer(str(folder), reference, pairs.DPOConfig(**args), train_dataset=PAIRS)
        assert [w.filename for w in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        trainer = pairs.DPOTrainer(str(folder), str(folder), pairs.DPOConfig(**args), train_dataset=PAIRS)
    assert trainer.ref_model.config._attn_implementation == 'eager'


def test_a_model_in_16_bits_is_trained_in_32(folder, tmp_path, with_16_bits):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    args = {'output_dir': str(tmp_path), 'max_steps': 1, 'save_strategy': 'no'}
    rows = [{'text': 'one day a cat'}] * 2
    with pytest.warns(UserWarning, match='its weights are torch.bfloat16'):
        trainer = sft.SFTTrainer(model, sft.SFTConfig(**args), train_dataset=rows)
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter('error', UserWarning)
        trainer = sft.SFTTrainer(model, sft.SFTConfig(bf16=True, **args), train_dataset=rows)
    assert trainer.accelerator.mixed_precision == 'bf16'


def uploading(folder, output, **args):
    return sft.SFTTrainer(
        str(folder),
        sft.SFTConfig(output_dir=str(output), max_steps=1, save_strategy='no', push_to_hub=True, **args),
        train_dataset=[{'text': 'one day a cat'}] * 2,
    )


def test_the_model_is_uploaded_where_the_arguments_say(folder, tmp_path, monkeypatch):
    with serving() as hub:
        use(hub.address, monkeypatch, tmp_path, token=None)
        with pytest.raises(ValueError, match='you are not logged in to the hub'):
            uploading(folder, tmp_path / 'tales')
        with pytest.raises(ValueError, match="'you' is not the account of this token"):
            uploading(folder, tmp_path / 'tales', hub_model_id='you/tales', hub_token=WRITE)
        trainer = uploading(folder, tmp_path / 'tales', hub_token=WRITE, hub_private_repo=True)
        assert hub.repos == {}
        trainer.train()
        trainer.save_model()
        assert hub.repos['me/tales']['private'] and 'model.safetensors' in hub.files('me/tales')
        assert not {'metrics.jsonl', 'run.json', 'checkpoints'} & set(hub.files('me/tales'))
        assert trainer.push_to_hub(dataset_name='someone/words') == f'{hub.address}/me/tales'
        assert hub.repos['me/tales']['messages'] == ['Model save', 'End of training']
        other = uploading(folder, tmp_path / 'more', hub_model_id='team/x', hub_revision='draft', hub_token=WRITE)
        other.push_to_hub(commit_message='once')
        assert hub.files('team/x') == {} and 'model.safetensors' in hub.files('team/x', 'draft')
    files = {p.name for p in (tmp_path / 'tales').iterdir()}
    assert {'model.safetensors', 'README.md', 'metrics.jsonl'} <= files
    assert not any(name.startswith('upload-') for name in files)


def test_an_adapter_is_uploaded_as_one(folder, tmp_path, monkeypatch):
    peft = pytest.importorskip('peft')
    with serving() as hub:
        use(hub.address, monkeypatch, tmp_path)
        trainer = sft.SFTTrainer(
            str(folder),
            sft.SFTConfig(output_dir=str(tmp_path / 'tales'), max_steps=1, save_strategy='no'),
            train_dataset=[{'text': 'one day a cat'}] * 2,
            peft_config=peft.LoraConfig(r=2, target_modules=['c_attn'], task_type='CAUSAL_LM'),
        )
        trainer.train()
        trainer.push_to_hub()
        files = hub.files('me/tales')
    assert 'adapter_model.safetensors' in files and 'model.safetensors' not in files


def test_a_config_file_under_a_command_line(tmp_path, monkeypatch):
    monkeypatch.delenv('FROM_THE_FILE', raising=False)
    monkeypatch.setenv('FROM_THE_FILE', 'before')
    path = tmp_path / 'c.yaml'
    path.write_text('dataset_name: d\nlearning_rate: 0.5\nbeta: 0.25\nenv:\n  FROM_THE_FILE: 3\n')
    parser = TrlParser((ScriptArguments, pairs.DPOConfig))
    script, config = parser.parse_args_and_config(['--config', str(path), '--beta', '0.75', '--output_dir', 'x'])
    assert (script.dataset_name, config.learning_rate, config.beta) == ('d', 0.5, 0.75)
    import os

    assert os.environ['FROM_THE_FILE'] == '3'
    path.write_text('unknown_thing: 1\n')
    with pytest.raises(ValueError, match='--unknown_thing 1'):
        TrlParser((ScriptArguments,)).parse_args_and_config(['--config', str(path)])
    *_, rest = TrlParser((ScriptArguments,)).parse_args_and_config(['--config', str(path)], True)
    assert rest == ['--unknown_thing', '1']


def test_a_model_config_becomes_adapters():
    assert get_peft_config(ModelConfig()) is None and get_quantization_config(ModelConfig()) is None
    assert ModelConfig(dtype='bfloat16').torch_dtype == ModelConfig(torch_dtype='bfloat16').dtype == 'bfloat16'
    with pytest.raises(ValueError, match='load_in_4bit=True cannot be honoured'):
        get_quantization_config(ModelConfig(load_in_4bit=True))
    with pytest.raises(ValueError, match='use_dora'):
        get_peft_config(ModelConfig(use_peft=True, use_dora=True))
    pytest.importorskip('peft')
    config = get_peft_config(ModelConfig(use_peft=True, lora_r=4, lora_alpha=8, lora_target_modules=['c_attn']))
    model = SimpleNamespace(config=SimpleNamespace(model_type='gpt2'))
    assert lora_arguments(config, model) == {
        'lora_rank': 4,
        'lora_train_bias': 'none',
        'lora_options': {'alpha': 8.0, 'dropout': 0.05, 'targets': 'c_attn'},
    }


@pytest.mark.parametrize(
    ('given', 'text'),
    [
        ({'peft_type': 'IA3'}, 'IA3 is not served'),
        ({'use_dora': True}, 'use_dora=True'),
        ({'modules_to_save': ['lm_head']}, 'modules_to_save='),
    ],
)
def test_adapters_that_are_no_plain_lora(given, text):
    with pytest.raises(ValueError, match=f'peft_config: {text}'):
        lora_arguments({'r': 4, 'target_modules': ['c_attn']} | given, None)


def test_rank_stabilised_lora_scales_by_the_root():
    found = lora_arguments({'r': 16, 'lora_alpha': 8, 'use_rslora': True, 'target_modules': 'all-linear'}, None)
    assert found['lora_options'] == {'alpha': 32.0, 'dropout': 0.0, 'targets': None}  # 32 / 16 = 8 / √16


class Plain:
    """A tokenizer with a template that renders `role: content` and a line break."""

    chat_template = 'there is one'

    def apply_chat_template(self, turns, tokenize=True, add_generation_prompt=False, continue_final_message=False):
        text = ''.join(f'{t["role"]}: {t["content"]}\n' for t in turns)
        return text[:-1] if continue_final_message else text + ('assistant: ' if add_generation_prompt else '')


def test_rows_of_turns_become_text():
    asked, good, bad = ([{'role': r, 'content': c}] for r, c in (('user', 'q'), ('assistant', 'a'), ('assistant', 'b')))
    assert scripts.apply_chat_template({'messages': asked + good}, Plain()) == {'text': 'user: q\nassistant: a\n'}
    row = {'prompt': asked, 'chosen': good, 'rejected': bad}
    expected = {'prompt': 'user: q\nassistant: ', 'chosen': 'a\n', 'rejected': 'b\n'}
    assert scripts.maybe_apply_chat_template(row, Plain()) == expected
    text = {'prompt': 'q', 'chosen': 'a', 'rejected': 'b'}
    assert scripts.maybe_apply_chat_template(text, Plain()) is text
    assert scripts.is_conversational(row) and not scripts.is_conversational(text)
    whole = {'chosen': asked + good, 'rejected': asked + bad}
    assert scripts.maybe_extract_prompt(whole) == row | {}
    assert scripts.extract_prompt({'chosen': 'the sky is blue', 'rejected': 'the sky is green'}) == {
        'prompt': 'the sky is',
        'chosen': ' blue',
        'rejected': ' green',
    }


def test_pairs_become_labelled_rows():
    datasets = pytest.importorskip('datasets')
    pairs = datasets.Dataset.from_dict({'prompt': ['p', 'q'], 'chosen': ['a', 'b'], 'rejected': ['c', 'd']})
    found = scripts.maybe_unpair_preference_dataset(pairs)
    assert found['completion'][:] == ['a', 'b', 'c', 'd'] and found['label'][:] == [True, True, False, False]
    assert found['prompt'][:] == ['p', 'q', 'p', 'q']
    assert scripts.maybe_unpair_preference_dataset(found) is found


def test_the_simple_template(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = scripts.SIMPLE_CHAT_TEMPLATE
    turns = [{'role': 'user', 'content': 'one'}, {'role': 'assistant', 'content': 'two'}]
    assert tokenizer.apply_chat_template(turns, tokenize=False) == 'User: one\n\nAssistant: two\n\n'
    assert tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True) == (
        'User: one\n\nAssistant:'
    )
    with pytest.raises(ValueError, match='the tokenizer has a chat template'):
        scripts.setup_chat_format(None, tokenizer)


def test_a_peft_model_is_merged_for_dpo() -> None:
    """A PEFT model is merged before a new adapter and as the reference, as in TRL."""
    from peft import LoraConfig, get_peft_model

    base = tiny_causal_lm('gpt2')
    assert pairs.merged(base) is base
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        plain = base(ids).logits
        model = get_peft_model(base, LoraConfig(r=2, init_lora_weights=False)).eval()
        with_adapter = model(ids).logits
        found = pairs.merged(model)
        torch.testing.assert_close(found(ids).logits, with_adapter, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(plain, with_adapter)
    assert not any('lora' in name for name, _ in found.named_parameters())


def test_targets_that_a_model_lacks_are_left_out() -> None:
    """PEFT takes a list of which some match; of a list of which none does the error names the layers."""
    model = tiny_causal_lm('gpt2')
    with pytest.warns(UserWarning, match='target_modules never_there match no layer'):
        found = lora_arguments({'r': 2, 'target_modules': ['c_attn', 'never_there']}, model)
    assert found['lora_options']['targets'] == ['c_attn']
    assert lora_arguments({'target_modules': ['never_there']}, model)['lora_options']['targets'] == ['never_there']
