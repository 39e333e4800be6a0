"""PPO on random prompts with OPT models of new weights, from 125 million to 13 billion parameters, with LoRA.

    python benchmarks/benchmark_opt_lora_dummy.py --model 350m --lora_rank 16 --json 350m.json
    torchrun --nproc-per-node=8 benchmarks/benchmark_opt_lora_dummy.py --model 6.7b --lora_rank 16 --strategy fsdp_cpu

Prints what benchmark_gpt_dummy.py prints. With a rank above 0, actor and critic train adapters, and the actor with its
adapter off is the reference; rank 0 trains everything, with a copy as reference.
"""

from __future__ import annotations

from dummy import script

from chatgpt.launch.arguments import run_main

main = script('opt', __doc__, hidden=('num_layers_unfrozen', 'critic', 'reward'))

if __name__ == '__main__':
    run_main(main)
