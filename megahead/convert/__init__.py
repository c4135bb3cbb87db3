"""Hugging Face folders out and in; nothing else knows Hugging Face's names.

Needs transformers, whose import costs seconds: it begins with the first use of a name, not with the package.
"""

from typing import TYPE_CHECKING

from megahead.on_first_use import on_first_use

if TYPE_CHECKING:
    from megahead.convert.embedding import input_embedding
    from megahead.convert.export_heads import FoldedBias, fold_bias
    from megahead.convert.exporting import ExportReport, export
    from megahead.convert.importing import from_hf
    from megahead.convert.loading import (
        context_length,
        context_of,
        is_encoder,
        load_backbone,
        load_causal,
        load_classifier,
        load_masked,
        load_tokenizer_folder,
    )
    from megahead.convert.new_vocabulary import RevocabularyReport, revocabulary
    from megahead.convert.published import PublishedModel
    from megahead.convert.resolve import Origin, hf_folder, hf_folder_to_classify, origin
    from megahead.convert.verify import Parity

__all__ = [
    "ExportReport",
    "FoldedBias",
    "Origin",
    "Parity",
    "PublishedModel",
    "RevocabularyReport",
    "context_length",
    "context_of",
    "export",
    "fold_bias",
    "from_hf",
    "hf_folder",
    "hf_folder_to_classify",
    "input_embedding",
    "is_encoder",
    "load_backbone",
    "load_causal",
    "load_classifier",
    "load_masked",
    "load_tokenizer_folder",
    "origin",
    "revocabulary",
]

__getattr__ = on_first_use(
    __name__,
    embedding=("input_embedding",),
    exporting=("ExportReport", "export"),
    export_heads=("FoldedBias", "fold_bias"),
    importing=("from_hf",),
    loading=(
        "context_length",
        "context_of",
        "is_encoder",
        "load_backbone",
        "load_causal",
        "load_classifier",
        "load_masked",
        "load_tokenizer_folder",
    ),
    new_vocabulary=("RevocabularyReport", "revocabulary"),
    published=("PublishedModel",),
    resolve=("Origin", "hf_folder", "hf_folder_to_classify", "origin"),
    verify=("Parity",),
)
