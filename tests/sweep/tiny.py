"""Tiny models of transformers, and batches for them, made from the configuration class and the signature of `forward` alone."""

from __future__ import annotations

import inspect
import random
from typing import Any

import torch
import transformers

__all__ = ["CannotBuildError", "Tiny", "tiny"]

WORDS, LENGTH, LONGEST, LABELS, SIDE = 67, 12, 40, 3, 32
_TWO_LAYERS = (
    "num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers",
    "num_blocks",
)  # fmt: skip
_HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads", "num_key_value_heads",
    "encoder_num_attention_heads", "decoder_num_attention_heads",
)  # fmt: skip
_WIDTH = ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "encoder_hidden_size", "decoder_hidden_size", "embedding_size")
_INNER = ("intermediate_size", "d_ff", "n_inner", "ffn_dim", "hidden_dim", "encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size")
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions", "max_sequence_length")
_OTHER = {
    "d_kv": 8, "head_dim": 8, "num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2, "num_experts_per_tok": 1, "image_size": SIDE,
    "patch_size": 8, "num_labels": LABELS, "type_vocab_size": 2, "max_2d_position_embeddings": 64, "input_size": SIDE, "sliding_window": 8,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "state_size": 4, "num_mel_bins": 8, "max_source_positions": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "unk_token_id": 3, "mask_token_id": 3, "sep_token_id": 2, "cls_token_id": 1, "forced_eos_token_id": 2,
    "coordinate_size": 2, "shape_size": 4,
}  # fmt: skip
_SPECIAL = 4  # ids below are special


class CannotBuildError(Exception):
    """The class cannot be made tiny, or trained, by these means."""


class Tiny:
    """One model, how to make a clean batch for it, and what its limits are."""

    def __init__(self, model: Any, names: list[str]) -> None:
        self.model, self.names, self.config = model, names, model.config
        self.text = getattr(self.config, "get_text_config", lambda: self.config)()

    @property
    def rows(self) -> int | None:
        """Rows of the table that `input_ids` goes into."""
        try:
            weight = getattr(self.model.get_input_embeddings(), "weight", None)
        except (AttributeError, NotImplementedError):
            return None
        return int(weight.shape[0]) if weight is not None and weight.dim() == 2 else None

    @property
    def longest(self) -> int | None:
        return next((value for name in _POSITIONS if isinstance(value := getattr(self.text, name, None), int)), None)

    @property
    def kind(self) -> str:
        name = type(self.model).__name__
        kinds = (
            "SequenceClassification",
            "TokenClassification",
            "QuestionAnswering",
            "MultipleChoice",
            "ImageClassification",
            "NextSentence",
        )
        return next((kind for kind in kinds if kind in name), "words" if "labels" in self.names else "none")

    def batch(self, rows: int, length: int) -> dict[str, torch.Tensor]:
        made: dict[str, torch.Tensor] = {}
        if "input_ids" in self.names:
            made["input_ids"] = torch.randint(_SPECIAL, min(self.rows or WORDS, WORDS), (rows, length))
            made["attention_mask"] = torch.ones(rows, length, dtype=torch.long)
            if self.kind != "MultipleChoice" and random.random() < 0.5 and length > 3:
                made["input_ids"][0, -2:], made["attention_mask"][0, -2:] = 0, 0
            if self.kind == "SequenceClassification" and self.config.is_encoder_decoder:
                made["input_ids"][:, 1] = self.config.eos_token_id  # what it classifies by
        for name, make in (("token_type_ids", self._segments), ("bbox", self._boxes), ("pixel_values", self._pixels)):
            if name in self.names and (value := make(rows, length)) is not None:
                made[name] = value
        if "input_features" in self.names:
            made["input_features"] = torch.randn(rows, getattr(self.config, "num_mel_bins", 8), 100)
        elif "input_values" in self.names and "input_ids" not in self.names:
            made["input_values"] = torch.randn(rows, 4000)
        made |= self._targets(rows, length)
        if self.kind == "MultipleChoice":
            made |= {name: made[name].unsqueeze(1).expand(rows, 2, *made[name].shape[1:]).clone() for name in made if name != "labels"}
        return {name: value for name, value in made.items() if name in self.names}

    def _segments(self, rows: int, length: int) -> torch.Tensor | None:
        segments = getattr(self.text, "type_vocab_size", 0)
        return torch.randint(0, segments, (rows, length)) if segments else None

    def _boxes(self, rows: int, length: int) -> torch.Tensor:
        return torch.randint(0, 30, (rows, length, 4)).sort(-1).values[..., [0, 1, 2, 3]]

    def _pixels(self, rows: int, _length: int) -> torch.Tensor:
        vision = getattr(self.config, "vision_config", self.config)
        side = getattr(vision, "image_size", SIDE)
        high, wide = side if isinstance(side, (list, tuple)) else (side, side)
        return torch.randn(rows, getattr(vision, "num_channels", 3), high, wide)

    def _targets(self, rows: int, length: int) -> dict[str, torch.Tensor]:
        kind = self.kind
        if kind == "QuestionAnswering":
            return {name: torch.randint(0, length, (rows,)) for name in ("start_positions", "end_positions")}
        if kind in ("SequenceClassification", "ImageClassification"):
            return {"labels": torch.randint(0, self.classes, (rows,))}
        if kind in ("MultipleChoice", "NextSentence"):
            return {"labels": torch.randint(0, 2, (rows,))}
        if kind == "TokenClassification":
            return {"labels": torch.randint(0, self.classes, (rows, length))}
        labels = torch.randint(_SPECIAL, min(self.rows or WORDS, WORDS), (rows, length))
        labels[:, ::4] = -100
        return {"labels": labels} if kind == "words" else {}

    @property
    def classes(self) -> int:
        kind = self.kind
        if kind in ("MultipleChoice", "NextSentence"):
            return 2
        if kind == "QuestionAnswering":
            return LONGEST
        return int(getattr(self.config, "num_labels", LABELS)) if kind != "words" else int(getattr(self.text, "vocab_size", WORDS) or WORDS)

    def step(self, model: Any, batch: dict[str, torch.Tensor]) -> None:
        out = model(**batch)
        loss = out.get("loss") if hasattr(out, "get") else None
        if loss is None:
            values = out.values() if hasattr(out, "values") else out
            loss = sum(value.float().sum() for value in values if isinstance(value, torch.Tensor) and value.requires_grad)
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.sum().backward()


def tiny(name: str) -> Tiny:
    """Raises CannotBuildError, with the reason in a few words."""
    cls = getattr(transformers, name, None)
    config_class = getattr(cls, "config_class", None)
    if cls is None or config_class is None:
        raise CannotBuildError("no configuration class of its own")
    try:
        config = _small(config_class)
    except Exception as error:
        raise CannotBuildError(f"its configuration cannot be made small ({type(error).__name__})") from error
    if "QuestionAnswering" in name:
        config.num_labels = 2  # where the answer begins, and where it ends
    if _size_of(config) > 512:
        raise CannotBuildError("its configuration stays large")
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in cls(config).parameters())
        if size > 4_000_000:
            raise CannotBuildError("it stays large")
        model = cls(config)
    except CannotBuildError:
        raise
    except Exception as error:
        raise CannotBuildError(f"it cannot be built ({type(error).__name__})") from error
    return Tiny(model.train(), list(inspect.signature(model.forward).parameters))


def _small(config_class: Any) -> Any:
    default = config_class()
    values = _values(default)
    for part in (
        "text_config",
        "vision_config",
        "audio_config",
        "encoder",
        "decoder",
        "encoder_config",
        "decoder_config",
        "thinker_config",
    ):
        inner = getattr(default, part, None)
        if isinstance(inner, transformers.PretrainedConfig):
            values[part] = _small(type(inner))
    try:
        return config_class(**values)
    except Exception:
        plain = {key: value for key, value in values.items() if key not in _OTHER or key.endswith("_id")}
        return config_class(**plain)


def _values(default: Any) -> dict[str, Any]:
    table = {
        **dict.fromkeys(_TWO_LAYERS, 2), **dict.fromkeys(_HEADS, 2), **dict.fromkeys(_WIDTH, 16), **dict.fromkeys(_INNER, 24),
        **dict.fromkeys(_POSITIONS, LONGEST), **_OTHER, "vocab_size": WORDS,
    }  # fmt: skip
    names = {default.attribute_map.get(name, name) for name in table if isinstance(getattr(default, name, None), int)}
    names |= {name for name in _OTHER if name.endswith("_id") and hasattr(default, name)}
    names |= {"decoder_start_token_id"} if getattr(default, "is_encoder_decoder", False) else set()
    known = {default.attribute_map.get(name, name): value for name, value in table.items()}
    return {name: known[name] for name in names if not isinstance(getattr(default, name, None), bool)}


def _size_of(config: Any) -> int:
    sizes = [getattr(config, name, 0) for name in (*_WIDTH, *_INNER)]
    return max((size for size in sizes if isinstance(size, int)), default=0)
