"""The maths, as pure functions of torch tensors. Imports torch and nothing of ours.

    masking.py      masked sum, mean, variance, whitening; sums per sequence
    logprobs.py     log-probs of given tokens, entropy; through a head in chunks of bounded memory
    kl.py           KL estimators, fixed and adaptive coefficient
    advantages.py   token rewards, GAE, Monte-Carlo, GRPO, RLOO, REINFORCE++
    losses.py       clipped policy and value, next-token, pairwise; aggregation and statistics
    preference.py   DPO family, KTO, ORPO, SimPO
    ilql.py         offline RL: TD, expectile, CQL, AWAC

Letters: N tokens that are actions, all sequences of a batch concatenated; B sequences; A actions of one sequence; V
vocabulary; D width.
"""
