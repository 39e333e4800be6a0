"""TRL's classic PPO on encoder-decoders, with `AutoModelForSeq2SeqLMWithValueHead` and responses that begin with the
start token, in a loop as in TRL's examples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from chatgpt.testing import encoder_decoder_tokenizer, tiny_causal_lm
from chatgpt_compat.trl import (
    AutoModelForSeq2SeqLMWithValueHead,
    DPOConfig,
    DPOTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
    ppo_train,
)

TEXTS = ['this film was', 'i did not like', 'what a dull', 'the best of']


@pytest.mark.parametrize(('family', 'start'), [('t5', 0), ('bart', 2)])
def test_the_classic_loop(family: str, start: int, tmp_path: Path) -> None:
    tiny_causal_lm(family).save_pretrained(tmp_path / 'base')
    model = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(tmp_path / 'base')
    tokenizer = encoder_decoder_tokenizer(family)
    config = PPOConfig(batch_size=4, mini_batch_size=2, ppo_epochs=2, learning_rate=1e-3, seed=0)
    trainer: Any = PPOTrainer(config, model, None, tokenizer)
    assert trainer.is_encoder_decoder and trainer.config.is_encoder_decoder
    queries = [torch.tensor(tokenizer(text)['input_ids']) for text in TEXTS]
    options = {'do_sample': True, 'top_k': 0, 'max_new_tokens': 6, 'eos_token_id': 2}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for number in range(2):
        responses = trainer.generate(queries, return_prompt=False, **options)
        assert all(response[0] == start and len(response) <= 7 for response in responses)
        assert trainer.generate(queries[0], **options).shape[0] == 1
        texts = [tokenizer.decode(response, skip_special_tokens=True) for response in responses]
        scores = [torch.tensor(float(text.count('a'))) for text in texts]
        stats = trainer.step(queries, responses, scores)
        experiences = trainer.inner.last_experiences
        assert [e.num_actions for e in experiences] == [len(response) - 1 for response in responses]
        if number == 0:
            assert abs(stats['objective/kl']) < 1e-5
    assert any(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    ids, model = torch.tensor([[start, 6, 7]]), model.eval()  # its head has dropout
    logits, _, values = model(input_ids=queries[0][None], decoder_input_ids=ids)
    assert logits.shape == (1, 3, 64) and values.shape == (1, 3)
    model.save_pretrained(tmp_path / 'saved')
    again = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(tmp_path / 'saved').eval()
    torch.testing.assert_close(again(input_ids=queries[0][None], decoder_input_ids=ids)[2], values)
    plain = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / 'saved')
    torch.testing.assert_close(plain(input_ids=queries[0][None], decoder_input_ids=ids).logits, logits.float())


def test_max_length_counts_the_start_token(tmp_path: Path) -> None:
    tokenizer = encoder_decoder_tokenizer('t5')
    config = PPOConfig(batch_size=1, mini_batch_size=1, seed=0)
    model = AutoModelForSeq2SeqLMWithValueHead(tiny_causal_lm('t5'))
    trainer: Any = PPOTrainer(config, model, None, tokenizer)
    query = torch.tensor(tokenizer('what a long prompt this is')['input_ids'])
    (response,) = trainer.generate([query], max_length=5, min_new_tokens=4, do_sample=True, top_k=0)
    assert len(response) == 5


def later_ppo(folder: Path, response_length: int) -> ppo_train.PPOTrainer:
    """Returns a trainer on prompts of up to 8 ids."""
    return ppo_train.PPOTrainer(
        args=PPOConfig(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            total_episodes=2,
            response_length=response_length,
            num_sample_generations=0,
            report_to='none',
        ),
        processing_class=encoder_decoder_tokenizer('bart'),
        model=tiny_causal_lm('bart', positions=10),
        reward_model=lambda prompts, responses: [0.0 for _ in prompts],
        train_dataset=[{'input_ids': [1, *range(5, 11), 2]}, {'input_ids': [1, 6, 2]}],
    )


def test_prompt_and_response_of_the_later_trainer_have_the_positions_each(tmp_path: Path) -> None:
    trainer = later_ppo(tmp_path / 'run', 9)
    trainer.train()
    assert [e.num_actions <= 9 for e in trainer.inner.last_experiences] == [True, True]
    with pytest.raises(ValueError, match="passes the policy's context of 10"):
        later_ppo(tmp_path / 'other', 10)


def test_the_later_trainers_read_prompt_and_response_as_two_texts(tmp_path: Path) -> None:
    def common() -> dict[str, Any]:
        return {'model': tiny_causal_lm('t5'), 'processing_class': encoder_decoder_tokenizer('t5')}

    tokenizer = encoder_decoder_tokenizer('t5')
    prompt, yes, no = (tokenizer(text)['input_ids'] for text in ('ab', 'c', 'd'))
    assert prompt[-1] == yes[-1] == 2

    options: dict[str, Any] = {'output_dir': str(tmp_path / 'sft'), 'report_to': 'none'}
    row: dict[str, Any] = {'prompt': 'ab', 'completion': 'c'}
    (record,) = SFTTrainer(args=SFTConfig(**options), train_dataset=[row], **common()).inner.train_data
    assert (record.prompt_ids.tolist(), record.response_ids.tolist()) == (prompt, yes)
    for other, more, said in (
        ({'text': 'ab'}, {}, 'a text without a prompt'),
        ({'input_ids': [5, 6]}, {}, 'no known shape in the columns'),
        (row, {'completion_only_loss': False}, 'cannot be honoured for an encoder'),
    ):
        with pytest.raises(ValueError, match=said):
            SFTTrainer(args=SFTConfig(**options, **more), train_dataset=[other], **common())

    rows = [{'prompt': 'ab', 'chosen': 'c', 'rejected': 'd'}]
    options['output_dir'] = str(tmp_path / 'dpo')
    (pair,) = DPOTrainer(args=DPOConfig(**options), train_dataset=rows, **common()).inner.train_data
    assert (pair.chosen.prompt_ids.tolist(), pair.rejected.response_ids.tolist()) == (prompt, no)

    folder = tmp_path / 'base'
    tiny_causal_lm('t5').save_pretrained(folder)
    reward = RewardTrainer(
        model=str(folder),
        args=RewardConfig(**options | {'output_dir': str(tmp_path / 'reward')}),
        processing_class=encoder_decoder_tokenizer('t5'),
        train_dataset=rows,
    )
    (record,) = reward.inner.train_data
    assert (record.prompt_ids.tolist(), [r.tolist() for r in record.responses]) == (prompt, [yes, no])

    arguments = PPOConfig(**options | {'output_dir': str(tmp_path / 'ppo')}, total_episodes=2, response_length=4)
    zero = lambda prompts, responses: [0.0 for _ in prompts]  # noqa: E731
    ppo = ppo_train.PPOTrainer(args=arguments, reward_model=zero, train_dataset=[{'prompt': 'ab'}], **common())
    assert ppo.prompts[0].ids.tolist() == prompt


def test_records_are_cut_to_the_positions_after_the_start_token(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match='are longer than 9 tokens and were cut'):
        trainer = SFTTrainer(
            model=tiny_causal_lm('bart', positions=10),
            args=SFTConfig(output_dir=str(tmp_path), report_to='none'),
            processing_class=encoder_decoder_tokenizer('bart'),
            train_dataset=[{'prompt': 'a' * 20, 'completion': 'b' * 20}],
        )
    (record,) = trainer.inner.train_data
    assert (len(record.prompt_ids), len(record.response_ids)) == (9, 9)
    trainer.train()


def test_the_later_ppo_trainer_reads_no_weights_before_data_and_sizes_are_right(tmp_path: Path) -> None:
    tiny_causal_lm('t5').save_pretrained(tmp_path / 'base')
    (tmp_path / 'base' / 'model.safetensors').write_bytes(b'')  # not readable

    def trainer(row: dict[str, Any], **sizes: int) -> None:
        ppo_train.PPOTrainer(
            args=PPOConfig(output_dir=str(tmp_path / 'run'), report_to='none', total_episodes=2, **sizes),
            processing_class=encoder_decoder_tokenizer('t5'),
            model=str(tmp_path / 'base'),
            reward_model=lambda prompts, responses: [0.0 for _ in prompts],
            train_dataset=[row],
        )

    with pytest.raises(ValueError, match='row 1: prompt is an int'):
        trainer({'prompt': 5})
    with pytest.raises(ValueError, match='must be a multiple of num_mini_batches=7'):
        trainer({'prompt': 'ab'}, per_device_train_batch_size=2, num_mini_batches=7)
    with pytest.raises(ValueError, match='a damaged safetensors file'):  # the only error left
        trainer({'prompt': 'ab'})
