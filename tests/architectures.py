"""Real architectures from tiny configurations: other people's models, as they come.

Dropout is zero, since a plain loop draws from another generator than keyed stages; all else is as
the authors wrote it. A batch is what the model's own arguments are, with a short last one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nets

Batches = list[tuple[Any, Tensor]]

TOKENS, WIDTH, LENGTH = 32, 16, 7
ROWS = (4, 4, 4, 4, 3)
"""Of the batches, the last of which is short."""


@dataclass(frozen=True)
class Architecture:
    """A model, its batches and its loss; ``cuts`` where counted costs are not to decide."""

    build: Callable[[], nn.Module]
    batches: Callable[[], Batches]
    loss: Callable[[Any, Any], Tensor]
    settings: dict[str, Any] = field(default_factory=lambda: {"stages": 3})

    def make(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            model = self.build()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model.train()


# ------------------------------------------------------------------ batches and losses


def words(count: int = TOKENS, **also: Callable[[int, torch.Generator], Tensor]) -> Batches:
    """Padded sentences with the next words as targets."""
    generator = torch.Generator().manual_seed(4)
    batches: Batches = []
    for rows in ROWS:
        ids = torch.randint(3, count, (rows, LENGTH + 1), generator=generator)
        mask = torch.ones(rows, LENGTH, dtype=torch.long)
        mask[0, -2:] = 0
        x = {"input_ids": ids[:, :-1], "attention_mask": mask}
        x |= {name: make(rows, generator) for name, make in also.items()}
        batches.append((x, ids[:, 1:]))
    return batches


def pairs() -> Batches:
    """Sentences of two languages."""
    return words(
        decoder_input_ids=lambda rows, g: torch.randint(3, TOKENS, (rows, LENGTH), generator=g)
    )


def images(size: int = 16, classes: int = 4, name: str | None = "pixel_values") -> Batches:
    generator = torch.Generator().manual_seed(6)
    batches: Batches = []
    for rows in ROWS:
        x = torch.randn(rows, 3, size, size, generator=generator)
        y = torch.randint(classes, (rows,), generator=generator)
        batches.append((x if name is None else {name: x}, y))
    return batches


def next_word(output: Any, y: Tensor) -> Tensor:
    return F.cross_entropy(output.logits.flatten(0, 1), y.flatten())


def label(output: Any, y: Tensor) -> Tensor:
    names = "logits", "image_embeds"
    if not isinstance(output, Tensor):
        output = next(output[name] for name in names if name in output)
    return F.cross_entropy(output, y)


# ------------------------------------------------------------------ transformers


def hugging(kind: str, config: str = "", **settings: Any) -> Callable[[], nn.Module]:
    """A class of transformers, with a configuration of few and small layers."""

    def build() -> nn.Module:
        import transformers

        chosen = getattr(transformers, config or kind.partition("For")[0] + "Config")
        model: nn.Module = getattr(transformers, kind)(chosen(**settings))
        return model

    return build


LLAMA: dict[str, Any] = {
    "vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "attention_dropout": 0.0,
}  # fmt: skip
BERT: dict[str, Any] = {
    "vocab_size": TOKENS, "hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 2, "max_position_embeddings": 32, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
GPT: dict[str, Any] = {
    "vocab_size": TOKENS, "n_positions": 32, "n_embd": WIDTH, "n_layer": 4, "n_head": 2,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
BART: dict[str, Any] = {
    "vocab_size": TOKENS, "d_model": WIDTH, "encoder_layers": 3, "decoder_layers": 3,
    "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "max_position_embeddings": 32, "dropout": 0.0, "attention_dropout": 0.0,
    "activation_dropout": 0.0, "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": TOKENS, "d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_layers": 3,
    "num_decoder_layers": 3, "num_heads": 2, "dropout_rate": 0.0, "tie_word_embeddings": False,
    "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip
VIT: dict[str, Any] = {
    "image_size": 16, "patch_size": 8, "num_channels": 3, "hidden_size": WIDTH,
    "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "num_labels": 4,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def decoder(kind: str, base: dict[str, Any] = LLAMA, **also: Any) -> Architecture:
    return Architecture(hugging(kind, **{**base, **also}), words, next_word)


def encoder(kind: str, base: dict[str, Any] = BERT, **also: Any) -> Architecture:
    return Architecture(hugging(kind, **{**base, **also}), words, next_word)


def translator(kind: str, base: dict[str, Any] = BART, **also: Any) -> Architecture:
    return Architecture(hugging(kind, **{**base, **also}), pairs, next_word)


def vision(kind: str, base: dict[str, Any] = VIT, stages: int = 3, **also: Any) -> Architecture:
    return Architecture(hugging(kind, **{**base, **also}), images, label, {"stages": stages})


RWKV: dict[str, Any] = {
    "vocab_size": TOKENS, "hidden_size": WIDTH, "attention_hidden_size": WIDTH,
    "num_hidden_layers": 4, "context_length": 16, "tie_word_embeddings": False, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
EVERY: dict[str, Architecture] = {
    "gpt2": decoder("GPT2LMHeadModel", GPT, config="GPT2Config"),
    "gpt2-tied": decoder("GPT2LMHeadModel", GPT, config="GPT2Config", tie_word_embeddings=True),
    "llama-tied": decoder("LlamaForCausalLM", tie_word_embeddings=True),
    "bert-tied": encoder("BertForMaskedLM", tie_word_embeddings=True),
    "t5-tied": translator("T5ForConditionalGeneration", T5, tie_word_embeddings=True),
    "bart-tied": translator("BartForConditionalGeneration", tie_word_embeddings=True),
    "llama": decoder("LlamaForCausalLM"),
    "qwen2": decoder("Qwen2ForCausalLM"),
    "qwen3": decoder("Qwen3ForCausalLM", head_dim=8),
    "mistral": decoder("MistralForCausalLM"),
    "mistral-window": decoder("MistralForCausalLM", sliding_window=4),
    "mixtral": decoder("MixtralForCausalLM", **EXPERTS),
    "mixtral-router": decoder("MixtralForCausalLM", **EXPERTS, output_router_logits=True),
    "qwen3-moe": decoder(
        "Qwen3MoeForCausalLM",
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        output_router_logits=True,
    ),
    "gemma": decoder("GemmaForCausalLM", head_dim=8),
    "gemma2": decoder("Gemma2ForCausalLM", head_dim=8, sliding_window=4),
    "gemma3": decoder(
        "Gemma3ForCausalLM",
        config="Gemma3TextConfig",
        head_dim=8,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    "gpt-oss": decoder("GptOssForCausalLM", head_dim=8, **EXPERTS, sliding_window=4),
    "phi": decoder("PhiForCausalLM", num_key_value_heads=2),
    "phi3": decoder("Phi3ForCausalLM", resid_pdrop=0.0),
    "stablelm": decoder("StableLmForCausalLM"),
    "starcoder2": decoder("Starcoder2ForCausalLM", residual_dropout=0.0, embedding_dropout=0.0),
    "olmo2": decoder("Olmo2ForCausalLM"),
    "cohere": decoder("CohereForCausalLM"),
    "granite": decoder("GraniteForCausalLM"),
    "deepseek-v3": decoder(
        "DeepseekV3ForCausalLM",
        num_key_value_heads=2,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        first_k_dense_replace=1,
    ),
    "opt": decoder("OPTForCausalLM", ffn_dim=32, dropout=0.0, word_embed_proj_dim=WIDTH),
    "gpt-neo": decoder(
        "GPTNeoForCausalLM",
        {
            **LLAMA,
            "num_layers": 4,
            "num_heads": 2,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 4,
            "embed_dropout": 0.0,
            "resid_dropout": 0.0,
        },
    ),
    "gpt-neox": decoder("GPTNeoXForCausalLM", hidden_dropout=0.0),
    "gptj": decoder("GPTJForCausalLM", GPT, rotary_dim=4),
    "codegen": decoder("CodeGenForCausalLM", {**GPT, "n_head": 4}, rotary_dim=4),
    "bloom": decoder("BloomForCausalLM", n_layer=4, n_head=2, hidden_dropout=0.0),
    "falcon": decoder("FalconForCausalLM", hidden_dropout=0.0),
    "mpt": decoder("MptForCausalLM", d_model=WIDTH, n_layers=4, n_heads=2, max_seq_len=32),
    "xglm": decoder(
        "XGLMForCausalLM",
        d_model=WIDTH,
        num_layers=4,
        attention_heads=2,
        ffn_dim=32,
        dropout=0.0,
        activation_dropout=0.0,
        layerdrop=0.0,
    ),
    "mamba": decoder(
        "MambaForCausalLM",
        {
            "vocab_size": TOKENS,
            "hidden_size": WIDTH,
            "num_hidden_layers": 4,
            "state_size": 4,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "mamba2": decoder(
        "Mamba2ForCausalLM",
        {
            "vocab_size": TOKENS,
            "hidden_size": WIDTH,
            "num_hidden_layers": 4,
            "state_size": 4,
            "num_heads": 4,
            "head_dim": 8,
            "n_groups": 1,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "rwkv": decoder("RwkvForCausalLM", RWKV),
    "rwkv-unscaled": decoder("RwkvForCausalLM", RWKV, rescale_every=0),
    "bert": encoder("BertForMaskedLM"),
    "roberta": encoder("RobertaForMaskedLM"),
    "distilbert": encoder(
        "DistilBertForMaskedLM",
        dim=WIDTH,
        n_layers=4,
        n_heads=2,
        hidden_dim=32,
        dropout=0.0,
        attention_dropout=0.0,
    ),
    "electra": encoder("ElectraForMaskedLM", embedding_size=WIDTH),
    "albert": encoder("AlbertForMaskedLM", embedding_size=8),
    "deberta": encoder(
        "DebertaForMaskedLM",
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        max_relative_positions=8,
    ),
    "deberta-v2": encoder(
        "DebertaV2ForMaskedLM",
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        max_relative_positions=8,
        position_buckets=4,
    ),
    "mpnet": encoder("MPNetForMaskedLM"),
    "xlnet": encoder(
        "XLNetLMHeadModel",
        {
            "vocab_size": TOKENS,
            "d_model": WIDTH,
            "n_layer": 4,
            "n_head": 2,
            "d_inner": 32,
            "dropout": 0.0,
            "tie_word_embeddings": False,
        },
        config="XLNetConfig",
    ),
    "modernbert": encoder(
        "ModernBertForMaskedLM",
        embedding_dropout=0.0,
        attention_dropout=0.0,
        mlp_dropout=0.0,
        local_attention=4,
        global_attn_every_n_layers=2,
        bos_token_id=1,
        eos_token_id=2,
        cls_token_id=1,
        sep_token_id=2,
    ),
    "funnel": encoder(
        "FunnelForMaskedLM",
        {
            "vocab_size": TOKENS,
            "d_model": WIDTH,
            "n_head": 2,
            "d_head": 8,
            "d_inner": 32,
            "block_sizes": [2, 2],
            "num_decoder_layers": 2,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "activation_dropout": 0.0,
            "tie_word_embeddings": False,
        },
    ),
    "t5": translator("T5ForConditionalGeneration", T5),
    "bart": translator("BartForConditionalGeneration"),
    "marian": translator("MarianMTModel", config="MarianConfig"),
    "pegasus": translator("PegasusForConditionalGeneration"),
    "whisper": Architecture(
        hugging(
            "WhisperForConditionalGeneration",
            **BART,
            num_mel_bins=8,
            max_source_positions=10,
            max_target_positions=32,
            encoder_layerdrop=0.0,
            decoder_layerdrop=0.0,
        ),
        lambda: [
            (
                {
                    "input_features": torch.randn(
                        r, 8, 20, generator=torch.Generator().manual_seed(r)
                    ),
                    "decoder_input_ids": x["input_ids"],
                },
                y,
            )
            for r, (x, y) in zip(ROWS, words(), strict=True)
        ],
        next_word,
    ),
    "whisper-decoder": decoder(
        "WhisperForCausalLM", BART, max_target_positions=32, decoder_layerdrop=0.0
    ),
    "vit": vision("ViTForImageClassification"),
    "deit": vision("DeiTForImageClassification"),
    "beit": vision("BeitForImageClassification", layer_scale_init_value=0.1, drop_path_rate=0.0),
    "dinov2": vision("Dinov2ForImageClassification", mlp_ratio=2),
    "swin": vision(
        "SwinForImageClassification",
        {
            "image_size": 16,
            "patch_size": 2,
            "embed_dim": 8,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 2,
            "num_labels": 4,
            "drop_path_rate": 0.0,
        },
        stages=2,
    ),
    "convnext": vision(
        "ConvNextForImageClassification",
        {
            "num_channels": 3,
            "hidden_sizes": [8, 16],
            "depths": [2, 2],
            "num_stages": 2,
            "patch_size": 2,
            "num_labels": 4,
        },
        stages=2,
    ),
    "hf-resnet": vision(
        "ResNetForImageClassification",
        {
            "embedding_size": 8,
            "hidden_sizes": [8, 16],
            "depths": [2, 2],
            "layer_type": "basic",
            "num_labels": 4,
        },
        stages=2,
    ),
    "segformer": vision(
        "SegformerForImageClassification",
        {
            "depths": [1, 1, 1],
            "num_encoder_blocks": 3,
            "sr_ratios": [2, 1, 1],
            "hidden_sizes": [8, 8, 16],
            "patch_sizes": [3, 3, 3],
            "strides": [2, 2, 2],
            "num_attention_heads": [1, 2, 2],
            "mlp_ratios": [2, 2, 2],
            "decoder_hidden_size": 16,
            "num_labels": 4,
            "drop_path_rate": 0.0,
            "classifier_dropout_prob": 0.0,
        },
    ),
    "clip-vision": vision(
        "CLIPVisionModelWithProjection", VIT, config="CLIPVisionConfig", projection_dim=4
    ),
    "clip": Architecture(
        hugging(
            "CLIPModel",
            "CLIPConfig",
            projection_dim=8,
            text_config={
                **{
                    k: v
                    for k, v in LLAMA.items()
                    if k not in ("num_key_value_heads", "tie_word_embeddings")
                },
                "num_hidden_layers": 3,
            },
            vision_config={**VIT, "num_hidden_layers": 3},
        ),
        lambda: [({**a, **b}, y) for (a, _), (b, y) in zip(words(), images(), strict=True)],
        lambda output, y: F.cross_entropy(
            output.logits_per_image, torch.arange(len(output.logits_per_image))
        ),
    ),
    "wav2vec2": Architecture(
        hugging(
            "Wav2Vec2ForCTC",
            **{**BERT, "num_feat_extract_layers": 2},
            conv_dim=[8, 8],
            conv_kernel=[4, 4],
            conv_stride=[4, 4],
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            feat_proj_dropout=0.0,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            final_dropout=0.0,
            layerdrop=0.0,
            apply_spec_augment=False,
        ),
        lambda: [
            (
                {"input_values": torch.randn(r, 160, generator=torch.Generator().manual_seed(r))},
                torch.randint(TOKENS, (r,), generator=torch.Generator().manual_seed(r)),
            )
            for r in ROWS
        ],
        lambda output, y: F.cross_entropy(output.logits.mean(1), y),
    ),
}
"""By name."""


# ------------------------------------------------------------------ by the book


def vectors() -> Batches:
    generator = torch.Generator().manual_seed(7)
    return [
        (torch.randn(rows, 6, generator=generator), torch.randint(4, (rows,), generator=generator))
        for rows in ROWS
    ]


def book(
    kind: Callable[[], nn.Module],
    batches: Callable[[], Batches],
    loss: Any = label,
    **settings: Any,
) -> Architecture:
    return Architecture(kind, batches, loss, settings or {"stages": 3})


def squares(output: Any, y: Tensor) -> Tensor:
    return F.mse_loss(output["sample"] if isinstance(output, dict) else output, y)


def noises(*names: str) -> Batches:
    g = torch.Generator().manual_seed(8)
    batches: Batches = []
    for rows in ROWS:
        values = {
            names[0]: torch.randn(rows, 3, 16, 16, generator=g),
            names[1]: torch.rand(rows, generator=g),
        }
        values |= {name: torch.randint(4, (rows,), generator=g) for name in names[2:]}
        batches.append((values, torch.randn(rows, 3, 16, 16, generator=g)))
    return batches


EVERY |= {
    "resnet": book(nets.ResNet, lambda: images(name=None)),
    "efficientnet": book(nets.EfficientNet, lambda: images(name=None)),
    "densenet": book(nets.DenseNet, lambda: images(name=None)),
    "u-net": book(nets.UNet, lambda: noises("sample", "timestep"), squares),
    "dit": book(nets.DiT, lambda: noises("x", "t", "y"), squares),
    "nn-transformer": book(
        nets.Seq2Seq,
        lambda: [
            ({"source": x["input_ids"], "target": x["decoder_input_ids"]}, y) for x, y in pairs()
        ],
        lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten()),
    ),
    "lstm": book(
        nets.LSTMs,
        lambda: [(x["input_ids"], y) for x, y in words()],
        lambda o, y: (
            F.cross_entropy(o[0].flatten(0, 1), y.flatten()) + sum(s.square().mean() for s in o[1])
        ),
    ),
    "exits": book(
        nets.Losses, vectors, lambda o, y: sum(F.cross_entropy(part, y) for part in o["logits"])
    ),
    "frozen-encoder": book(nets.FrozenEncoder, vectors, cuts=["layers.1", "layers.2"]),
    "handed-weight": book(nets.Hands, vectors),
    "shared-block": book(nets.Shared, vectors),
}
