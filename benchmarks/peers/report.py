"""The page of `vs_peers.py`: the text around its table."""

PAGE = """# The same work in TRL and here

`{command}` on {cpu}, {cores} virtual cores of a shared machine under load (AVX512-BF16: {avx512_bf16}, AMX: {amx_bf16}), one thread per
process, torch 2.13.0 on both sides. Every case is one run in which an update here and an update there alternate (A B A B, {rounds} rounds
after one of warm-up); a ratio is new tokens per CPU-second of the whole update (collect, score, learn) here over the neighbouring one
there, so above 1 we are faster. "all rounds" divides the sums instead, which is steadier where lengths vary. Numbers:
`benchmarks/results/peers/`; what is in the time: [peers_profile.md](peers_profile.md).

{table}
What is the same: the saved weights (GPT-2, 4 layers x 256, vocabulary 512), 32 sequences of 16 prompt tokens and up to 48 new ones per
update, the networks (`trl_ppo`: policy, critic, reward model, reference; `trl_classic`: one trunk with a value head and a reference;
`trl_now`: the policy, and a reference with KL), the epochs, one optimizer step per epoch over all 32 sequences, AdamW (torch's fused one)
with the same numbers, sampling at temperature 1 without filters, no gradient checkpointing. GRPO and RLOO take 4 prompts x 8
completions and decode them to text for a reward function. With `eos` the weights are rigged so that the end token has one probability
everywhere and lengths are geometric with a mean of a third of the limit; the means of both sides stand in the last column.

What differs, and is each side's own: ours cuts the optimizer step into micro-batches by a token budget (512 padded tokens) out of
sequences sorted by length, takes finished sequences out of the decode, leaves padding out of its forwards, and runs no head on prompt
positions. TRL pads every batch to its longest response and decodes until the last one has ended.

What bf16 means:

- here, `precision='bf16'`: fp32 weights, forward and backward under autocast, responses drawn from a bf16 copy of the policy, and the
  old log-probs recomputed by one more forward pass, because decode and training forward differ in 16 bits. The default, `precision='auto'`,
  is fp32 on a CPU;
- `trl_ppo`, 'bf16': what `accelerate launch --mixed_precision bf16` sets, autocast around the trained pair; generation, reference and
  reward model stay in fp32. `PPOConfig(bf16=True)` reaches nothing in that version: its trainer makes an Accelerator of its own;
- `trl_classic`, 'bf16': `accelerator_kwargs={{'mixed_precision': 'bf16'}}`, autocast around both models' forward; generation in fp32;
- 'bf16 weights': the models loaded in bfloat16, so that everything, AdamW included, is in 16 bits (and small steps are lost);
- `trl_now`: `bf16=True`, their default: autocast over fp32 weights.

Versions: TRL 1.12.0 (`trl.experimental.ppo`) and 1.16.0 with transformers 5.23.0, TRL 0.11.4 with transformers 4.46.3.
"""

WITHOUT = """
## On a CPU without 16-bit instructions

`python benchmarks/vs_peers.py --without-16-bits --only bf16`, on {cpu} with `{variables}`, under which oneDNN has no
instructions for 16 bits, on both sides ({rounds} rounds; a stand-in for an older CPU, on a machine under load). torch then imitates products of
16-bit matrices, several times slower than fp32. Here learning rounds its inputs to bf16, multiplies in fp32 and rounds once; responses, scores and
values are in fp32 (docs/strategies.md). "All by torch": the same with all of these left to torch's imitation, in earlier runs. Numbers: `benchmarks/results/peers/without_16_bits/`. Cases that are
not here were not run.

{table}"""
