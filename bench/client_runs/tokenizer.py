"""A tokenizer of the words `w0`, `w1`, ... that nobody has to download, and text for it."""

import random
from typing import Any


def word_tokenizer(vocabulary: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{place}": place for place in range(3, vocabulary)}}
    plain = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=plain, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def random_words(vocabulary: int, length: int) -> str:
    return " ".join(f"w{random.randrange(3, vocabulary)}" for _ in range(length))
