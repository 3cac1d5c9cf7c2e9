"""The embedded backend: one process, PyTorch, a Hugging Face causal LM on CPU or one GPU.

server.py      the engine contract over HTTP
sampler.py     the thread that owns decoding; its parts: slots.py (which request sits where, pure),
               kv.py (keys and values), draw.py (logits -> token), stopping.py (stop strings),
               requests.py (what is asked for, and how far it is)
policy.py      the trained model: pi_old, mini-batches, AdamW; its metrics: tally.py
checkpoint.py  what a resume needs, in a Hugging Face model folder; hub.py loads such folders
"""
