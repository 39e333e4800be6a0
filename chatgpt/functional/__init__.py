"""Formulas, as pure functions of torch tensors. Imports torch and nothing of ours.

    masking.py      masked sum, mean, variance, whitening; sums per sequence
    logprobs.py     log-probs of given tokens, entropy; through a head in chunks of bounded memory
    ppo.py          token rewards, GAE, clipped policy and value loss, aggregation, KL estimators and coefficients
    advantages.py   advantages of other methods: turns, Monte-Carlo, GRPO, RLOO, GDPO, REINFORCE++
    losses.py       losses of other methods: GSPO, CISPO, importance weights, next-token, pairwise
    values.py       a critic's classification loss over bins (HL-Gauss) and its value
    preference.py   DPO family, KTO, ORPO, SimPO
    ilql.py         offline RL: TD, expectile, CQL, AWAC

Letters: N tokens that are actions, all sequences of a batch concatenated; B sequences; A actions of one sequence; V
vocabulary; D width.
"""
