"""mini-swe-agent as it is, in both of its modes, through a gateway: how many samples a rollout gives."""
