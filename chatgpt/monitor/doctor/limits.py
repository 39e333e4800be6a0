"""The thresholds of the doctor, with their units and reasons."""

LIMITS: dict[str, float] = {
    'min_phases': 10,  # a trend needs more phases than the eight that two medians of three and five take
    'min_updates': 20,  # Adam moves no weight further than about lr in a step; fewer steps show nothing
    'still_kl': 0.0001,  # nats per token: a run that learns has 0.01 to 0.1 after ten phases (docs/results/stories.md)
    'still_ratio': 0.01,  # a twentieth of the usual clip range of 0.2: no token came near the clip
    'still_loss': 0.02,  # share of the loss: the spread of a mean over a few hundred records
    'low_lr': 5,  # times below the rule for this size: the rule is no better than a factor of three
    'chance': 0.05,  # above an accuracy of 0.5, in the mean of eight phases: two standard errors of 400 pairs
    'chance_late': 0.02,  # above 0.5, with a rate that fits: two standard errors of 2,500 pairs
    'late': 0.9,  # of the run: a weak signal shows late
    # nats, and more than the answer's own log-prob under the reference: it is seven times less likely, or the square of
    # what it was; runs on SmolLM2 that got better lose 0.4 at most
    'chosen_fall': 2.0,
    # nats: the typical token is e times likelier than under the initial model; published runs end below 0.5
    'kl_per_token': 1.0,
    # nats per token within four phases: a response of one token that was 1 % likely and is now certain has 4.6; a model
    # that has lost its language has 8 and more
    'kl_at_once': 5.0,
    # standard deviations of the first phase's scores that the mean has lost within four phases, together with more than
    # `kl_per_token`: in a healthy run the mean moves by a tenth of that
    'score_lost': 0.5,
    'kl_growth': 1.3,  # times in five phases: it has not settled
    'kl_notable': 0.1,  # nats per token: below that no target is worth an error
    'kl_over_target': 3,  # times the target; the adaptive coefficient holds a run within a factor of two of it
    'kl_error': 0.2,  # where the adaptive coefficient clips its error (Ziegler et al. 2019, section 2.2)
    'kl_error_phases': 20,  # phases in a row on one side of the target without coming nearer
    'clip_high': 0.4,  # share of tokens; healthy runs have 0.02 to 0.3
    'clip_zero_ratio': 0.02,  # a tenth of the usual clip range: the clip has nothing to do
    # fp32: on SmolLM2 rounding moves the worst token of a batch by up to 1.2e-4
    'ratio_error': 0.001,
    'ratio_kl': 0.0001,  # fp32: the mean over tokens, of either sign
    # bf16 and fp16: log-probs of decode and scoring differ by .33 at most on a small model; e^.33 − 1 = .39
    'ratio_error_half': 0.5,
    'ratio_kl_half': 0.05,  # bf16 and fp16: they differ by .02 on average
    'entropy_share': 0.1,  # of the entropy at the start: nine tenths of what was sampled is no longer sampled
    # standard deviations of the score at the start: a smaller gain does not justify the loss of entropy
    'entropy_gain': 0.5,
    'value_term': 1.0,  # value_coef · value loss; the mean |advantage| of the policy term is 0.8 when whitened
    'variance_phases': 20,  # phases: a new critic needs some
    'variance_median': 10,  # phases whose median must be above 0
    # share: advantages have a tenth more variance than those of a constant; nearer to 0 is another finding
    'variance_worse': -0.1,
    'worse_phases': 10,  # phases in a row after the actor's first step, which an untrained critic needs as well
    # share: less than a fifth of the variance of returns is gone from the advantages; a warm-up ends when explained
    # variance is good (VAPO, arXiv 2504.05118, section 4.1)
    'warm_variance': 0.2,
    'warm_rise': 0.3,  # of explained variance: more than it differs from phase to phase in a settled run
    'warm_phases': 20,  # phases after the actor's first step: a later rise has other reasons than the warm-up
    'saturated_std': 0.05,  # of the standard deviation at the start
    'equal_phases': 3,  # phases in a row: one may be chance
    'equal_responses': 100,  # a policy that is right in 3 % of its responses has one among them, 19 times in 20
    # robust standard deviations (1.4826 · median absolute deviation, now or at the start): no normal distribution has
    # that
    'outlier_size': 10,
    'outlier_weight': 2,  # times the robust standard deviation: outliers make up most of the ordinary one
    'rescore': 0.01,  # of the standard deviation of scores, in fp32: rounding gives about 1e-6
    'rescore_half': 0.2,  # in bf16 and fp16, which keep two to three digits
    'eval_fall': 0.2,  # of what the evaluation had gained at its best
    'eval_score_gain': 0.2,  # standard deviations of the score, since the evaluation was at its best
    'repetition_rise': 0.1,  # of all runs of four tokens, above the start
    'repetition_rise_across': 0.3,  # of all different runs of four tokens, above the start
    'length_factor': 2.5,  # times longer or shorter than at the start
    'cut_share': 0.5,  # of responses: half of the scores are of unfinished texts
    'cut_share_start': 0.25,  # of responses at the start: the model does end its responses
    'long_limit': 128,  # tokens: below that a run may be meant to sample pieces of longer texts
    # tokens: a shorter limit, or shorter responses, belong to the task: a number, a word, a path in a small graph
    'short_limit': 16,
    'at_once_len': 1.5,  # tokens: the end token, and sometimes one more
    'equal_groups': 0.5,  # of groups: half of the generating is thrown away
    # of the range of scores so far: what is left are a few failures, which give a group and a critic little to learn
    # from
    'solved': 0.8,
    'spike': 10,  # times the median of the twenty phases before
    # times: one is enough; on a solved task, where gradients are near 0, one failure stands out a hundredfold
    'spike_once': 1000,
    'spikes': 3,  # phases of the last twenty: one unusual text may occur in two
    'few_prompts': 16,  # different prompts; the smallest benchmark has 20, which are all that its task has
    'prompt_passes': 4,  # times that each was used: a trial of a phase or two is no finding
    'duplicates': 0.5,  # of prompts occur earlier in the data: chance does not do that to a set of any size
    'cut_prompts': 0.1,  # of prompts without their beginning, where instructions are
    'schedule_lr': 0.01,  # of the highest learning rate: such steps are lost in rounding
    'schedule_left': 0.1,  # of the run still to come; a cosine is below that rate for the last 6 %
    'slow_rank': 1.5,  # times the median of the other ranks, in four phases of five, always the same rank
    'other_share': 0.5,  # of the time of a phase outside of collecting, scoring and learning
    'score_share': 0.5,  # of the time of a phase in a reward function
    'phase_s': 1.0,  # seconds: in shorter phases writing a log line counts
    'eval_loss_rise': 1.02,  # times its lowest, in two evaluations in a row
}
