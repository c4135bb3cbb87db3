"""Hugging Face folders out and in; nothing else knows Hugging Face's names."""

from megahead.convert.embedding import input_embedding
from megahead.convert.export_heads import FoldedBias, HeadName, fold_bias
from megahead.convert.exporting import ExportReport, export
from megahead.convert.importing import from_hf
from megahead.convert.loading import load_backbone, load_causal, load_classifier, load_masked, load_tokenizer_folder
from megahead.convert.resolve import Origin, hf_folder, origin
from megahead.convert.verify import Parity

__all__ = [
    "ExportReport",
    "FoldedBias",
    "HeadName",
    "Origin",
    "Parity",
    "export",
    "fold_bias",
    "from_hf",
    "hf_folder",
    "input_embedding",
    "load_backbone",
    "load_causal",
    "load_classifier",
    "load_masked",
    "load_tokenizer_folder",
    "origin",
]
