"""A training step written with the losses and `utils` only."""

import torch
from chatgpt.models.loss import GPTLMLoss, PolicyLoss, PPOPtxActorLoss, ValueLoss
from chatgpt.models.utils import compute_reward, log_probs_from_logits, normalize

torch.manual_seed(0)
logits = torch.randn(2, 5, 7, requires_grad=True)
ids = torch.tensor([[1, 2, 3, 4, 5], [6, 5, 4, 3, 2]])
mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
log_probs = log_probs_from_logits(logits[:, :-1, :], ids[:, 1:])
base = log_probs.detach() - 0.1
reward = compute_reward(torch.tensor([1.0, -1.0]), 0.2, log_probs.detach(), base, mask)
values = torch.tensor([0.3, 0.1], requires_grad=True)
advantages = normalize(reward - values.detach()).unsqueeze(-1)
policy_loss = PolicyLoss(0.2)(log_probs, log_probs.detach(), advantages, mask)
value_loss = ValueLoss(0.4)(values, values.detach(), reward, mask)
mixed = PPOPtxActorLoss(0.2, 0.5)(log_probs, log_probs.detach(), advantages, logits, ids, mask)
(policy_loss + value_loss + GPTLMLoss()(logits, ids)).backward()
print([round(x, 6) for x in (*reward.tolist(), policy_loss.item(), value_loss.item(), mixed.item())])
print(bool(logits.grad.abs().sum() > 0), values.grad.tolist())
