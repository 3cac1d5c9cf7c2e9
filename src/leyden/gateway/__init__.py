"""The gateway: where harnesses call the model and every sampled token is recorded."""
