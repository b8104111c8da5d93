"""Writes the parts of two small encoders (BERT's architecture): config.json and a WordPiece tokenizer of the Polish texts.

python recipes/small/encoder.py data/encoders      # data/encoders/small, data/encoders/tiny
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}
SIZES = {"small": (2, 96), "tiny": (1, 48)}  # layers, width
VOCAB, POSITIONS = 1024, 128
LETTERS = list("aąbcćdeęfghijklłmnńoópqrsśtuvwxyzźżAĄBCĆDEĘFGHIJKLŁMNŃOÓPQRSŚTUVWXYZŹŻ0123456789.,;:!?()-")


def make_tokenizer() -> Tokenizer:
    text = (Path(__file__).parent / "texts" / "udhr-pl.jsonl").read_text().splitlines()
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIAL.values()), initial_alphabet=LETTERS, show_progress=False
    )
    tokenizer.train_from_iterator([json.loads(line)["text"] for line in text], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def main(folder: Path) -> None:
    tokenizer = make_tokenizer()
    for name, (layers, width) in SIZES.items():
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        config = {
            "model_type": "bert", "architectures": ["BertForMaskedLM"], "num_hidden_layers": layers, "hidden_size": width,
            "num_attention_heads": 4, "intermediate_size": 4 * width, "vocab_size": tokenizer.get_vocab_size(),
            "max_position_embeddings": POSITIONS, "type_vocab_size": 2, "pad_token_id": 0,
        }  # fmt: skip
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": POSITIONS, "eos_token": "[SEP]",
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"], **SPECIAL,
        }  # fmt: skip
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
        tokenizer.save(str(target / "tokenizer.json"))
        print(f"{target}: {layers} layers of width {width}, {tokenizer.get_vocab_size()} tokens")  # noqa: T201 - a script


if __name__ == "__main__":
    main(Path(sys.argv[1]))
