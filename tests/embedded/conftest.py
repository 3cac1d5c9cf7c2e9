import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 300
SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def tiny_model(kind="qwen3", seed=0):
    """A random model whose distribution is far from uniform, so that log-probs say something."""
    torch.manual_seed(seed)
    if kind == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(head_dim=8, **SIZE))
    elif kind == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**SIZE))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SIZE))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(8)
    return model.eval()


def byte_tokenizer():
    """One id per byte (0 to 255), then special tokens; built in memory."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny matrices gain nothing from a second thread, and lose much on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def model_folder(tmp_path, tokenizer):
    folder = tmp_path / "base"
    tiny_model().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
