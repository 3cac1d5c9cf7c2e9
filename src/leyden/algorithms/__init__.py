"""From rewards and samples to a loss: pure functions of numpy and PyTorch.

advantages.py    rewards of one group -> advantages of its rollouts
batch.py         groups -> weighted samples -> mini-batches (one optimizer step each) -> micro-batches
weights.py       trained tokens per rollout -> weight of each of its tokens
padding.py       samples of a micro-batch -> padded ids and flat per-token vectors
losses.py        per-token losses from log-probs
corrections.py   weight of a token that another policy sampled
objective.py     the loss of a micro-batch and the sums that its metrics are made of
"""
