"""A model small enough for unit tests: a random Llama of 0.8M parameters and a letter tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = "abcdefghijklm"
VOCABULARY = {"<pad>": 0, "<bos>": 1, "<eos>": 2, **{c: i + 3 for i, c in enumerate(LETTERS)}}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per letter a…m; a chat template that only joins the messages."""
    inner = Tokenizer(models.WordLevel(VOCABULARY, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def tiny_llama_config(**changes: object) -> LlamaConfig:
    values = dict(
        vocab_size=16,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    return LlamaConfig(**{**values, **changes})


def write_tiny_model(folder: Path, seed: int = 0, **changes: object) -> Path:
    """Save a random Llama and its tokenizer as a transformers directory."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_llama_config(**changes))
    model.to(torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
