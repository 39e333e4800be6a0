"""PPO on random prompts with GPT-2 models of new weights, from 124 million to 175 billion parameters.

    python benchmarks/benchmark_gpt_dummy.py --model s --json s.json
    torchrun --nproc-per-node=8 benchmarks/benchmark_gpt_dummy.py --model xl --strategy colossalai_zero2

Prints throughput, TFLOPS per device and their share of the device's own matrix product, seconds of each part of a
phase, and peak memory; the FLOP formulas are in arithmetic_done.py. Actor, critic, initial model and reward
model have the same size.
"""

from __future__ import annotations

from dummy import script

from chatgpt.launch.arguments import run_main

main = script('gpt', __doc__, hidden=('num_layers_unfrozen', 'critic', 'reward', 'lora_rank', 'cuda_mem_frac'))

if __name__ == '__main__':
    run_main(main)
