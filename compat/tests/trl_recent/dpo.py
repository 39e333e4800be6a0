"""DPO from a command line and a YAML file, as text and as turns, with evaluation."""

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config
from trl.trainer.utils import SIMPLE_CHAT_TEMPLATE

parser = TrlParser((ScriptArguments, DPOConfig, ModelConfig))
script_args, training_args, model_args = parser.parse_args_and_config()
model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
peft_config = get_peft_config(model_args)
ref_model = AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path) if peft_config is None else None
tokenizer = AutoTokenizer.from_pretrained(model_args.model_name_or_path)
if tokenizer.chat_template is None:
    tokenizer.chat_template = SIMPLE_CHAT_TEMPLATE
dataset = load_dataset(script_args.dataset_name)
trainer = DPOTrainer(
    model,
    ref_model,
    args=training_args,
    train_dataset=dataset[script_args.dataset_train_split],
    eval_dataset=dataset[script_args.dataset_test_split] if training_args.eval_strategy != 'no' else None,
    processing_class=tokenizer,
    peft_config=peft_config,
)
result = trainer.train()
if training_args.eval_strategy != 'no':
    metrics = trainer.evaluate()
    trainer.log_metrics('eval', metrics)
    trainer.save_metrics('eval', metrics)
trainer.save_model(training_args.output_dir)
