"""Models: actor, critic and reward model over Hugging Face transformers, by family or from a given module."""

from typing import TYPE_CHECKING

from chatgpt import on_demand

if TYPE_CHECKING:
    from chatgpt.nn.actor import Actor as Actor
    from chatgpt.nn.actor import PolicyOutput as PolicyOutput
    from chatgpt.nn.critic import Critic as Critic
    from chatgpt.nn.families import BLOOMRM as BLOOMRM
    from chatgpt.nn.families import GPTRM as GPTRM
    from chatgpt.nn.families import OPTRM as OPTRM
    from chatgpt.nn.families import AutoActor as AutoActor
    from chatgpt.nn.families import AutoCritic as AutoCritic
    from chatgpt.nn.families import AutoRM as AutoRM
    from chatgpt.nn.families import BLOOMActor as BLOOMActor
    from chatgpt.nn.families import BLOOMCritic as BLOOMCritic
    from chatgpt.nn.families import DebertaCritic as DebertaCritic
    from chatgpt.nn.families import DebertaRM as DebertaRM
    from chatgpt.nn.families import GPTActor as GPTActor
    from chatgpt.nn.families import GPTCritic as GPTCritic
    from chatgpt.nn.families import LlamaActor as LlamaActor
    from chatgpt.nn.families import LlamaCritic as LlamaCritic
    from chatgpt.nn.families import LlamaRM as LlamaRM
    from chatgpt.nn.families import OPTActor as OPTActor
    from chatgpt.nn.families import OPTCritic as OPTCritic
    from chatgpt.nn.heads import CategoricalHead as CategoricalHead
    from chatgpt.nn.heads import critic_head as critic_head
    from chatgpt.nn.heads import mlp_head as mlp_head
    from chatgpt.nn.heads import reward_head as reward_head
    from chatgpt.nn.hydra import freeze_below as freeze_below
    from chatgpt.nn.ilql import ILQLModel as ILQLModel
    from chatgpt.nn.layouts import start_token as start_token
    from chatgpt.nn.loading import LOAD_OPTIONS as LOAD_OPTIONS
    from chatgpt.nn.loading import add_lora as add_lora
    from chatgpt.nn.loading import load_base_model as load_base_model
    from chatgpt.nn.loading import load_causal_lm as load_causal_lm
    from chatgpt.nn.loading import load_config as load_config
    from chatgpt.nn.loading import load_tokenizer as load_tokenizer
    from chatgpt.nn.lora import has_lora as has_lora
    from chatgpt.nn.peft_format import adapter_base as adapter_base
    from chatgpt.nn.peft_format import export_peft as export_peft
    from chatgpt.nn.peft_format import import_peft as import_peft
    from chatgpt.nn.reward_model import RewardModel as RewardModel
    from chatgpt.nn.trunk import cache_keyword as cache_keyword
    from chatgpt.nn.trunk import dropout_off as dropout_off
    from chatgpt.nn.trunk import hidden_size as hidden_size
    from chatgpt.nn.trunk import is_encoder_decoder as is_encoder_decoder
    from chatgpt.nn.trunk import position_limit as position_limit
    from chatgpt.nn.weights import WeightsSource as WeightsSource
    from chatgpt.nn.weights import initial_tensors as initial_tensors

__getattr__, __dir__ = on_demand(__name__)
