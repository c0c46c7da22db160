"""Masked-language-model pre-training: a small BERT on 185 pages of Wikipedia.

The pages are test data of the package `gensim` (text under CC BY-SA), cut into at most 512 pieces
by `sentencepiece`. Where one of both is absent, generated sentences of letters that follow each
other by a fixed chance. J. Devlin et al., "BERT" (2019), section 3.1: of 15 % of the pieces 80 %
are masked, 10 % replaced and 10 % kept, and all of them are to be told. Attention falls off with
the distance, as in O. Press et al., "Train Short, Test Long" (2022), so that little text suffices
to learn from neighbours.
"""

import bz2
import html
import io
import re
from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import torch
from torch import nn
from torch.nn import functional

from experiments.workloads.packaged import packaged_file
from experiments.workloads.workload import (
    Baseline,
    Optimizers,
    Workload,
)

NUM_PIECES = 512
LENGTH = 64
_PAGES = "enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
_MASK_PIECE = "<mask>"
_HELD_OUT_SEQUENCES = 256
_EVERY = 10  # each tenth page is held out
_SHORTEST_LINE = 80
_MARKUP = (
    (re.compile(r"<!--.*?-->|<ref[^>]*/>|<ref.*?</ref>|<math.*?</math>|<[^>]+>", re.S), " "),
    *[(re.compile(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}"), " ")] * 4,  # inner templates first
    (re.compile(r"\[\[(?:File|Image|Category)[^\[\]]*(?:\[\[[^\]]*\]\][^\[\]]*)*\]\]"), " "),
    (re.compile(r"\[\[(?:[^\]|]*\|)?([^\]]*)\]\]"), r"\1"),
    (re.compile(r"\[https?://\S+ ?([^\]]*)\]"), r"\1"),
    (re.compile(r"'{2,}|={2,}"), " "),
)


class Bert(nn.Module):
    """An encoder of transformer layers whose output matrix is that of its embeddings.

    Parameters
    ----------
    num_pieces, width, num_layers, num_heads : int
        Sizes; a head's attention falls by a power of two of the distance.
    """

    def __init__(
        self, num_pieces: int, width: int = 128, num_layers: int = 2, num_heads: int = 4
    ) -> None:
        super().__init__()
        self.pieces = nn.Embedding(num_pieces, width)
        self.positions = nn.Embedding(LENGTH, width)
        for embedding in (self.pieces, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(
            width, num_heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, num_layers, nn.LayerNorm(width), enable_nested_tensor=False
        )
        self.bias = nn.Parameter(torch.zeros(num_pieces))
        place = torch.arange(LENGTH, dtype=torch.float32)
        distance = (place[:, None] - place[None]).abs()
        slopes = [2.0 ** -(head + 1) for head in range(num_heads)]
        # No buffer: DDP would send it to all ranks in every step.
        self.nearness = torch.stack([-slope * distance for slope in slopes])

    def forward(self, pieces: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """Return the logits at the places `wanted` (batch, length) of `pieces`, one row each."""
        hidden = self.pieces(pieces) + self.positions.weight
        hidden = self.layers(hidden, mask=self.nearness.repeat(len(pieces), 1, 1))
        logits: torch.Tensor = functional.linear(hidden[wanted], self.pieces.weight, self.bias)
        return logits


class Language(Workload):
    """BERT with 471,000 parameters; quality is the loss at masked pieces of held-out pages.

    The target is 0.25 nats below the unigram cross-entropy of the held-out pieces that are asked
    for.
    """

    name = "language"
    metric = "masked loss (nats)"
    falling = True
    tolerance = 0.05
    global_batch = 64
    epochs = 8
    rate = 3e-3
    gain = 0.25
    epoch_steps = 25

    @property
    def target(self) -> float:  # type: ignore[override]
        """The loss to reach."""
        return self.baseline.quality - self.gain

    @property
    def num_examples(self) -> int:
        """Sequences to train on."""
        return len(self.data["train"])

    @property
    def steps_per_epoch(self) -> int:
        """An epoch is short, for there to be evaluations."""
        return min(self.epoch_steps, super().steps_per_epoch)

    @property
    def baseline(self) -> Baseline:
        """The cross-entropy of the held-out pieces under the pieces' frequencies in training."""
        counts = torch.bincount(self.data["train"].flatten(), minlength=self._num_pieces) + 1.0
        chances = (counts / counts.sum()).log()
        asked = self.data["held_out"][self.data["held_out_wanted"].bool()]
        return Baseline("unigram cross-entropy", -float(chances[asked].mean()))

    @property
    def _num_pieces(self) -> int:
        return int(self.data["num_pieces"])

    def module(self) -> nn.Module:
        """Return a new BERT."""
        return Bert(self._num_pieces)

    def optimizers(self, module: nn.Module) -> Optimizers:
        """Return AdamW with the betas of pre-training."""
        return [
            torch.optim.AdamW(module.parameters(), self.rate, betas=(0.9, 0.98), weight_decay=0.01)
        ]

    def loss(
        self, model: nn.Module, indices: torch.Tensor, generator: torch.Generator
    ) -> torch.Tensor:
        """Return the cross-entropy at pieces that are masked anew."""
        pieces = self.data["train"][indices].long()
        shown, wanted = masked(pieces, self._num_pieces, int(self.data["mask"]), generator)
        return functional.cross_entropy(model(shown, wanted), pieces[wanted])

    def score(self, module: nn.Module, part: slice) -> tuple[torch.Tensor, int]:
        """Return the loss at the held-out places, the same in each evaluation."""
        pieces = self.data["held_out"][part].long()
        wanted = self.data["held_out_wanted"][part].bool()
        logits = module(self.data["held_out_shown"][part].long(), wanted)
        loss = functional.cross_entropy(logits, pieces[wanted], reduction="sum")
        return loss, int(wanted.sum())


def masked(
    pieces: torch.Tensor, num_pieces: int, mask: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what BERT is shown of `pieces`, and where it is asked; both of their shape."""
    wanted = torch.rand(pieces.shape, generator=generator) < 0.15
    lot = torch.rand(pieces.shape, generator=generator)
    shown = torch.where(wanted & (lot < 0.8), mask, pieces)
    others = torch.randint(num_pieces, pieces.shape, generator=generator)
    return torch.where(wanted & (lot >= 0.9), others, shown), wanted


def read_language() -> tuple[dict[str, torch.Tensor], str, bool]:
    """Return sequences of pieces to train on and held out; where from; whether they are made up."""
    path = packaged_file("gensim", "test", "test_data", _PAGES)
    if path is None or find_spec("sentencepiece") is None:
        if path is not None:
            print("sentencepiece is not installed: install topo-ar[workloads]", flush=True)
        train, held_out, num_pieces = _generated()
        mask = num_pieces - 1
        source = "generated sentences"
    else:
        pages = list(wikipedia_pages(bz2.decompress(path.read_bytes()).decode()))
        train, held_out, num_pieces, mask = _as_pieces(pages)
        source = f"{len(pages)} pages of Wikipedia in the package gensim, {num_pieces} pieces"
    held_out = held_out[:_HELD_OUT_SEQUENCES]
    generator = torch.Generator().manual_seed(1)
    shown, wanted = masked(held_out, num_pieces, mask, generator)
    data = {
        "train": train.to(torch.int32),
        "held_out": held_out.to(torch.int32),
        "held_out_shown": shown.to(torch.int32),
        "held_out_wanted": wanted.to(torch.uint8),
        "num_pieces": torch.tensor(num_pieces),
        "mask": torch.tensor(mask),
    }
    return data, source, source.startswith("generated")


def wikipedia_pages(dump: str) -> Iterator[list[str]]:
    """Yield the paragraphs of each page of a dump in XML, in lower case and without markup."""
    for page in re.findall(r"<text[^>]*>(.*?)</text>", dump, flags=re.S):
        if page.upper().startswith("#REDIRECT"):
            continue
        text = html.unescape(html.unescape(page))
        for pattern, replacement in _MARKUP:
            text = pattern.sub(replacement, text)
        lines = (re.sub(r"\s+", " ", line).strip() for line in text.split("\n"))
        kept = [
            line.lower()
            for line in lines
            if len(line) > _SHORTEST_LINE and line[0] not in "*#|{}:;!"
        ]
        if kept:
            yield kept


def _as_pieces(pages: Sequence[Sequence[str]]) -> tuple[torch.Tensor, torch.Tensor, int, int]:
    import sentencepiece

    held_out = pages[::_EVERY]
    train = [page for number, page in enumerate(pages) if number % _EVERY]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for page in train for line in page),
        model_writer=model,
        vocab_size=NUM_PIECES,
        model_type="bpe",
        user_defined_symbols=[_MASK_PIECE],
        max_sentence_length=20_000,
        num_threads=1,
        minloglevel=2,
    )
    cutter = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())

    def sequences(some: Sequence[Sequence[str]]) -> torch.Tensor:
        flat = [piece for page in some for line in page for piece in cutter.encode(line)]
        return torch.tensor(flat[: len(flat) // LENGTH * LENGTH]).view(-1, LENGTH)

    return sequences(train), sequences(held_out), len(cutter), cutter.piece_to_id(_MASK_PIECE)


def _generated() -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return letters of which each is likely to be followed by a few others; the last is a mask."""
    num_letters = 63
    generator = torch.Generator().manual_seed(0)
    follows = torch.randint(num_letters, (num_letters, 4), generator=generator)
    letters = torch.randint(num_letters, (8192 + _HELD_OUT_SEQUENCES, LENGTH), generator=generator)
    choice = torch.randint(4, letters.shape, generator=generator)
    strays = torch.rand(letters.shape, generator=generator) < 0.1
    for place in range(1, LENGTH):
        next_one = follows[letters[:, place - 1], choice[:, place]]
        letters[:, place] = torch.where(strays[:, place], letters[:, place], next_one)
    return letters[:8192], letters[8192:], num_letters + 1
