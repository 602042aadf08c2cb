"""Make a small tokenizer and a streaming dataset from local text; nothing is downloaded.

``python demo/data.py`` makes those of ``yamls/mpt-tiny-fsdp1.yaml``; ``make demo`` does so too.
"""

import importlib.util
import shutil
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf
from streaming import MDSWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

__all__ = ["local_texts", "make_data"]

END_OF_TEXT = "<|endoftext|>"


def local_texts() -> list[Path]:
    """Files that are equal in every installation of the pinned stack, so the losses are equal too."""
    spec = importlib.util.find_spec("composer")
    assert spec is not None and spec.origin is not None, "`make demo` installs Composer"
    return sorted((Path(spec.origin).parent / "core").glob("*.py"))


def make_data(folder: Path, texts: list[Path], *, vocabulary: int, length: int) -> int:
    """Write ``folder/tokenizer`` and ``folder/mds``; return the number of samples of ``length`` tokens.

    Written beside the target and renamed, so an interrupted run leaves no partial folder.
    """
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    documents = [path.read_text() for path in texts]
    tokenizer = _train_tokenizer(documents, vocabulary)
    tokenizer.save_pretrained(unfinished / "tokenizer")
    tokens = np.concatenate([tokenizer(text + END_OF_TEXT)["input_ids"] for text in documents]).astype(np.int64)
    samples = tokens[: len(tokens) // length * length].reshape(-1, length)
    with MDSWriter(out=str(unfinished / "mds"), columns={"tokens": "ndarray:int64"}) as writer:
        for sample in samples:
            writer.write({"tokens": sample})
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return len(samples)


def _train_tokenizer(documents: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT, pad_token=END_OF_TEXT)


if __name__ == "__main__":
    root = Path(__file__).resolve().parent.parent
    config = OmegaConf.load(root / "yamls" / "mpt-tiny-fsdp1.yaml")
    folder = root / "demo" / "out" / "data"
    folder.parent.mkdir(parents=True, exist_ok=True)
    count = make_data(folder, local_texts(), vocabulary=config.model.vocab_size, length=config.max_seq_len)
    print(f"{count} samples of {config.max_seq_len} tokens in {folder}")
