"""Language models that can be divided along every dimension of a mesh: their names and sizes, without torch.

A model of a user cannot be divided among tensor-parallel GPUs without knowing its layers. These are known:
`lowtide.zoo.decoder_parts` builds any part of them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSize:
    """A decoder of equal blocks.

    `key_heads` are shared by several of the `heads`; `hidden` is the width inside of a feed-forward layer;
    `length` is the default number of tokens in a sequence. `is_gated`: RMSNorm, rotary positions and a gated
    feed-forward layer without biases, as in Llama. Otherwise LayerNorm, learned positions, GELU and biases,
    as in GPT-2.
    """

    name: str
    width: int
    blocks: int
    heads: int
    key_heads: int
    hidden: int
    words: int
    length: int
    is_gated: bool

    @property
    def parameters_of_block(self) -> int:
        keys = 2 * self.width * self.width * self.key_heads // self.heads
        if self.is_gated:
            return 2 * self.width**2 + keys + 3 * self.width * self.hidden + 2 * self.width
        biases = 3 * self.width + self.width + self.hidden + self.width
        return 2 * self.width**2 + keys + 2 * self.width * self.hidden + biases + 4 * self.width

    @property
    def parameters(self) -> int:
        ends = 2 * self.words * self.width
        norm = self.width if self.is_gated else 2 * self.width + self.length * self.width
        return self.blocks * self.parameters_of_block + ends + norm


def _gpt(name: str, width: int, blocks: int, heads: int, *, words: int = 50304) -> DecoderSize:
    return DecoderSize(
        name=name,
        width=width,
        blocks=blocks,
        heads=heads,
        key_heads=heads,
        hidden=4 * width,
        words=words,
        length=2048,
        is_gated=False,
    )


def _llama(
    name: str, width: int, blocks: int, heads: int, hidden: int, *, key_heads: int = 8, words: int = 128256
) -> DecoderSize:
    return DecoderSize(
        name=name,
        width=width,
        blocks=blocks,
        heads=heads,
        key_heads=key_heads,
        hidden=hidden,
        words=words,
        length=8192,
        is_gated=True,
    )


DECODERS = {
    size.name: size
    for size in (
        _gpt("gpt-125m", 768, 12, 12),
        _gpt("gpt-350m", 1024, 24, 16),
        _gpt("gpt-1.3b", 2048, 24, 32),
        _gpt("gpt-7b", 4096, 32, 32),
        _gpt("gpt-13b", 5120, 40, 40),
        _gpt("gpt-30b", 7168, 48, 56),
        _gpt("gpt-70b", 8192, 86, 64),
        _llama("llama3-8b", 4096, 32, 32, 14336),
        _llama("llama3-70b", 8192, 80, 64, 28672),
        _llama("llama3-405b", 16384, 126, 128, 53248),
    )
}
