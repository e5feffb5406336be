"""A decoder transformer as GPT-2 has it, with a head of its own, one child per block."""

from math import sqrt

from torch import Tensor, nn
from torch.nn import functional as F

from offbeat.errors import ConfigurationError


def gpt(
    vocabulary: int,
    context: int,
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    dropout: float = 0.0,
) -> nn.Sequential:
    """``[embedding, block, ..., block, norm, head]``: tokens (rows, context) to logits over tokens.

    The head is not tied to the embedding. Weights start as GPT-2's: deviation 0.02, that of the
    layers which write into the residual stream divided by the root of their number, biases zero.

    Reference: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.

    >>> sum(p.numel() for p in gpt(65, context=32, layers=2, width=16, heads=2).parameters())
    9184
    """
    counts = {"vocabulary": vocabulary, "context": context, "width": width, "heads": heads}
    for name, count in {**counts, "layers": layers}.items():
        if not isinstance(count, int) or count < 1:
            raise ConfigurationError(f"gpt({name}={count!r}): give a whole number of at least 1.")
    if width % heads:
        raise ConfigurationError(
            f"gpt(width={width}, heads={heads}): every head takes an equal part of the width, so"
            f" the width is a multiple of the heads; the next one is {-(-width // heads) * heads}."
        )
    model = nn.Sequential(
        Embedding(vocabulary, context, width, dropout),
        *(Block(width, heads, dropout) for _ in range(layers)),
        nn.LayerNorm(width),
        nn.Linear(width, vocabulary, bias=False),
    )
    _start_like_gpt_2(model, layers)
    return model


class Embedding(nn.Module):
    """A vector per token plus one per place."""

    def __init__(self, vocabulary: int, context: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        length, context = tokens.size(1), self.place.num_embeddings
        if length > context:
            raise ConfigurationError(
                f"a row of {length} tokens, but this gpt has a context of {context}: give shorter"
                f" rows, or build it with context={length}."
            )
        x: Tensor = self.dropout(self.token(tokens) + self.place.weight[:length])
        return x


class Block(nn.Module):
    """Attention to earlier places, then two linear layers, each added to what came in."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.wide_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        # Nothing in place: a stage keeps x, and an update may come before x's backward.
        x = x + self.dropout(self.attention_out(self._attend(self.attention(self.norm1(x)))))
        hidden = F.gelu(self.wide(self.norm2(x)), approximate="tanh")
        y: Tensor = x + self.dropout(self.wide_out(hidden))
        return y

    def _attend(self, parts: Tensor) -> Tensor:
        """Mixes values by queries and keys, which lie side by side."""
        rows, length, _ = parts.shape
        query, key, value = parts.view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        return mixed.transpose(1, 2).reshape(rows, length, -1)


def _start_like_gpt_2(model: nn.Sequential, layers: int) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            into_stream = name.endswith("_out")
            nn.init.normal_(module.weight, std=0.02 / sqrt(2 * layers) if into_stream else 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
